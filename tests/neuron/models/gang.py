"""A gang of ranks in threads, and a small scheduler that plays chunks, blocks and batches on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from neuron.kernels import load_kernels
from neuron.kv_blocks import KVBlocks
from neuron.models import family_of
from neuron.models.interface import DecodeInputs, Grid, ImageInputs, MRopeItem, PrefillInputs, VisionBlock
from neuron.vision_packing import pack

R = TypeVar("R")
NAN = float("nan")


class Meeting:
    """Where the threads of a gang put what they exchange."""

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=120)
        self.slots: list[Tensor | None] = [None] * world_size


class ThreadCollectives:
    """Implements `Collectives` for ranks that are threads of one process."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int):
        self.meeting, self.rank, self.world_size = meeting, rank, world_size

    def _exchange(self, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        if self.world_size == 1:
            return x
        self.meeting.slots[self.rank] = x
        self.meeting.barrier.wait()
        result = combine([slot for slot in self.meeting.slots if slot is not None])
        self.meeting.barrier.wait()
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._exchange(x, lambda parts: torch.cat(parts, dim=dim))

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda parts: torch.stack([part[self.rank] for part in parts]))

    def barrier(self) -> None:
        self.meeting.barrier.wait()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Image:
    name: str
    grid: Grid
    pixels: np.ndarray
    """[t * h * w, patch_dim] float32."""


@dataclass
class Seq:
    """One request: its tokens, where its images lie, and what the ranks hold of it."""

    tokens: list[int]
    images: list[tuple[int, Image]] = field(default_factory=list)
    """(first image token, image)."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Gang:
    """`world_size` ranks of one checkpoint, driven in lockstep, with buckets, block tables and an encoder cache.

    poison: every buffer starts as NaN, scratch is NaN again before each step, and padding points at NaN.
    """

    BLOCK = 16
    NUM_BLOCKS = 160
    CACHE_ROWS = 1024  # the last 64 are scratch
    PATCHES = (64, 256, 512)

    def __init__(
        self,
        folder: Path,
        world_size: int,
        kernels: str = "masked",
        poison: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        self.family = family_of(folder)
        self.config = self.family.load_config(folder)
        self.world_size, self.poison, self.dtype = world_size, poison, dtype
        self.pool = ThreadPoolExecutor(world_size)
        meeting = Meeting(world_size)
        self.models = [
            self.family.load_model(
                folder, ThreadCollectives(meeting, rank, world_size), load_kernels(kernels), dtype, "cpu"
            )
            for rank in range(world_size)
        ]
        shape = (self.config.num_layers, self.NUM_BLOCKS, self.BLOCK, self.config.num_local_kv_heads(world_size))
        self.kvs = [KVBlocks(*shape, self.config.head_dim, dtype) for _ in range(world_size)]
        self.caches = [
            torch.zeros(self.CACHE_ROWS, self.config.fat_dim // world_size, dtype=dtype) for _ in range(world_size)
        ]
        if poison:
            for buffer in self._buffers():
                buffer.fill_(NAN)
        self.free_blocks = list(range(self.NUM_BLOCKS - 1))  # the last one stays unallocated: padding points at it
        self.image_rows: dict[str, int] = {}
        self.next_row = 0

    def close(self) -> None:
        self.pool.shutdown()

    def _buffers(self) -> list[Tensor]:
        return [*self.caches, *(buffer for kv in self.kvs for buffer in (*kv.keys, *kv.values))]

    def _run(self, call: Callable[[int], R]) -> list[R]:
        """On every rank, after poisoning what no real row may see."""
        if self.poison:
            for kv in self.kvs:
                for buffer in (*kv.keys, *kv.values):
                    buffer[kv.scratch_slot :] = NAN
            for cache in self.caches:
                cache[-64:] = NAN
        return list(self.pool.map(call, range(self.world_size)))

    def _logits(self, call: Callable[[int], Tensor]) -> Tensor:
        """Of rank 0, after checking that every rank has the same."""
        first, *others = self._run(call)
        for other in others:
            assert torch.equal(first, other) or self.poison
        return first

    def encode(self, images: Sequence[Image]) -> None:
        """Encode those of `images` that are not in the cache."""
        wanted = {image.name: image for image in images if image.name not in self.image_rows}
        items = [(name, image.pixels.shape[0]) for name, image in wanted.items()]
        for round_ in pack(items, self.PATCHES, self.world_size, self.config.merge_area):
            rows = np.full((self.world_size, round_.num_rows), self.CACHE_ROWS - 1, dtype=np.int64)
            for rank, block in enumerate(round_.blocks):
                for placed in block:
                    self.image_rows[placed.mm_hash] = self.next_row
                    own = slice(placed.row_offset, placed.row_offset + placed.num_rows)
                    rows[rank, own] = np.arange(self.next_row, self.next_row + placed.num_rows)
                    self.next_row += placed.num_rows
                    assert self.next_row <= self.CACHE_ROWS - 64

            def step(rank: int, round_=round_, rows=rows) -> None:
                model, block = self.models[rank], round_.blocks[rank]
                embeddings = torch.zeros(round_.num_rows, self.config.fat_dim, dtype=self.dtype)
                if block:
                    contents = [(wanted[p.mm_hash].pixels, wanted[p.mm_hash].grid) for p in block]
                    inputs = self.family.prepare_vision_block(self.config, contents, round_.num_patches)
                    if self.poison:
                        inputs.pixels[inputs.segment_ids < 0] = NAN
                    embeddings = model.encode(VisionBlock(*map(torch.from_numpy, inputs)))
                model.write_embeddings(embeddings, self.caches[rank], torch.from_numpy(rows.reshape(-1)))

            self._run(step)

    def _reserve(self, seq: Seq, num_tokens: int) -> None:
        while len(seq.blocks) * self.BLOCK < num_tokens:
            seq.blocks.append(self.free_blocks.pop(0))

    def _slots(self, seq: Seq, start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        return np.array(seq.blocks)[positions // self.BLOCK] * self.BLOCK + positions % self.BLOCK

    def _rope(self, seq: Seq) -> tuple[np.ndarray, int]:
        items = [
            MRopeItem(offset, image.pixels.shape[0] // self.config.merge_area, image.grid)
            for offset, image in seq.images
        ]
        return self.family.mrope_positions(self.config, len(seq.tokens), items)

    def prefill(self, chunks: Sequence[tuple[Seq, int]], tokens_bucket: int, context_bucket: int) -> list[Tensor]:
        """Compute the next n tokens of each sequence in one step; returns logits [n, vocab] of each."""
        bad_slot = (self.NUM_BLOCKS - 1) * self.BLOCK
        t = {name: np.zeros(tokens_bucket, dtype=np.int64) for name in ("token_ids", "query_pos")}
        t |= {"slot_mapping": np.full(tokens_bucket, self.kvs[0].scratch_slot), "query_seq": np.full(tokens_bucket, -1)}
        rope = np.zeros((3, tokens_bucket), dtype=np.int64)
        c_slots, c_seq = np.full(context_bucket, bad_slot), np.full(context_bucket, -1)
        c_pos = np.zeros(context_bucket, dtype=np.int64)
        embed_rows = np.full(tokens_bucket, self.CACHE_ROWS - 1)
        is_image = np.zeros(tokens_bucket, dtype=bool)
        row, context = 0, 0
        for index, (seq, count) in enumerate(chunks):
            start, stop = seq.computed, seq.computed + count
            self._reserve(seq, stop)
            own, seen = slice(row, row + count), slice(context, context + stop)
            t["token_ids"][own] = seq.tokens[start:stop]
            t["query_pos"][own] = np.arange(start, stop)
            t["query_seq"][own] = index
            t["slot_mapping"][own] = self._slots(seq, start, stop)
            rope[:, own] = self._rope(seq)[0][:, start:stop]
            c_slots[seen], c_seq[seen] = self._slots(seq, 0, stop), index
            c_pos[seen] = np.arange(stop)
            for offset, image in seq.images:
                length = image.pixels.shape[0] // self.config.merge_area
                for position in range(max(offset, start), min(offset + length, stop)):
                    embed_rows[row + position - start] = self.image_rows[image.name] + position - offset
                    is_image[row + position - start] = True
            seq.computed = stop
            row, context = row + count, context + stop
        arrays = {**t, "rope_positions": rope, "context_slots": c_slots, "context_seq": c_seq, "context_pos": c_pos}
        arrays["logits_index"] = np.where(np.arange(tokens_bucket) < row, np.arange(tokens_bucket), 0)
        inputs = PrefillInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        with_images = bool(is_image.any())

        def step(rank: int) -> Tensor:
            images = ImageInputs(self.caches[rank], torch.from_numpy(embed_rows), torch.from_numpy(is_image))
            return self.models[rank].prefill(self.kvs[rank], inputs, images if with_images else None)

        return list(self._logits(step)[:row].split([count for _, count in chunks]))

    def decode(self, seqs: Sequence[Seq], seqs_bucket: int, blocks_bucket: int) -> Tensor:
        """Compute the last token of each sequence; returns logits [len(seqs), vocab]."""
        token_ids, lens = np.zeros(seqs_bucket, dtype=np.int64), np.zeros(seqs_bucket, dtype=np.int64)
        rope = np.zeros((3, seqs_bucket), dtype=np.int64)
        slots = np.full(seqs_bucket, self.kvs[0].scratch_slot)
        tables = np.full((seqs_bucket, blocks_bucket), self.NUM_BLOCKS - 1)
        for i, seq in enumerate(seqs):
            assert seq.computed == len(seq.tokens) - 1
            self._reserve(seq, len(seq.tokens))
            token_ids[i], lens[i] = seq.tokens[-1], len(seq.tokens)
            rope[:, i] = self._rope(seq)[0][:, -1]
            slots[i] = self._slots(seq, seq.computed, seq.computed + 1)[0]
            tables[i, : len(seq.blocks)] = seq.blocks
            seq.computed += 1
        inputs = DecodeInputs(*map(torch.from_numpy, (token_ids, rope, slots, tables, lens)))
        return self._logits(lambda rank: self.models[rank].decode(self.kvs[rank], inputs))[: len(seqs)]
