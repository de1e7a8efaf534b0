"""Packing a step's images into attention blocks of known sizes, and dealing the blocks to the ranks.

Plain Python and deterministic: the scheduler's side calls it to send pixels to the ranks that need them, and every rank
calls it to know what it encodes and where the others' embeddings go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackedImage:
    """One image's place in an attention block."""

    mm_hash: str
    patch_offset: int
    """Its first row among the block's patches."""
    num_patches: int
    row_offset: int
    """Its first row among the block's embeddings."""
    num_rows: int


@dataclass(frozen=True)
class Round:
    """One pass of the encoder on all ranks, each at most one block, and one exchange of equal shapes."""

    num_patches: int
    """Size of its blocks: a configured bucket."""
    num_rows: int
    """Embeddings of one block."""
    blocks: tuple[tuple[PackedImage, ...], ...]
    """By rank; empty: the rank encodes nothing and joins the exchange with zeros."""


def pack(
    items: Sequence[tuple[str, int]], bucket_sizes: Sequence[int], world_size: int, merge_area: int
) -> list[Round]:
    """Pack images (mm_hash, patches) first-fit decreasing into blocks, and deal these to `world_size` ranks in rounds.

    A block is the smallest of `bucket_sizes` (ascending) that holds the largest image; a round whose blocks are all
    emptier takes a smaller one. merge_area: patches per embedding; it divides every image and bucket. Raises ValueError
    for an image larger than every bucket, an uneven one, or one given twice.
    """
    if len({mm_hash for mm_hash, _ in items}) != len(items):
        raise ValueError(f"an image is given twice among {[mm_hash for mm_hash, _ in items]}")
    for mm_hash, patches in items:
        if patches < 1 or patches % merge_area:
            raise ValueError(f"image {mm_hash}: {patches} patches, expected a positive multiple of {merge_area}")
    if not items:
        return []
    size = _bucket(max(patches for _, patches in items), bucket_sizes)
    # Stable: images of one size keep the message's order, which is the same on every rank.
    fills: list[int] = []
    blocks: list[list[PackedImage]] = []
    for mm_hash, patches in sorted(items, key=lambda item: -item[1]):
        index = next((i for i, fill in enumerate(fills) if fill + patches <= size), len(blocks))
        if index == len(blocks):
            fills.append(0)
            blocks.append([])
        offset = fills[index]
        blocks[index].append(
            PackedImage(mm_hash, offset, patches, offset // merge_area, patches // merge_area),
        )
        fills[index] += patches
    rounds = []
    for first in range(0, len(blocks), world_size):
        chosen = blocks[first : first + world_size]
        num_patches = _bucket(max(fills[first : first + world_size]), bucket_sizes)
        idle = [()] * (world_size - len(chosen))
        rounds.append(Round(num_patches, num_patches // merge_area, (*map(tuple, chosen), *idle)))
    return rounds


def _bucket(patches: int, bucket_sizes: Sequence[int]) -> int:
    for size in bucket_sizes:
        if patches <= size:
            return size
    raise ValueError(f"image of {patches} patches: buckets.vision_patches = {list(bucket_sizes)} holds none so large")
