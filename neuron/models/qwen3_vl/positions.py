"""Positions of text tokens (M-RoPE) and of image patches (2D rotary, interpolated table). Plain numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from neuron.models.interface import Grid, MRopeItem, VisionBlock
from neuron.models.qwen3_vl.config import Qwen3VLConfig


def mrope_positions(config: Qwen3VLConfig, num_tokens: int, items: Sequence[MRopeItem]) -> tuple[np.ndarray, int]:
    """Rotary positions [3, num_tokens] int64 (temporal, vertical, horizontal), and the delta behind them.

    A text token has one position on all three axes. An image's tokens sit on its merged grid, from the position that
    follows the text before it; the text behind it goes on after the grid's longer side. So token i >= num_tokens, being
    text, sits at i + delta. items: sorted by offset.
    """
    merge = config.vision.spatial_merge_size
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for offset, length, (t, h, w) in items:
        rows, columns = h // merge, w // merge
        if length != t * rows * columns or offset < token or offset + length > num_tokens:
            raise ValueError(
                f"image at token {offset} of {num_tokens}: {length} tokens, expected {t * rows * columns} "
                f"for its grid {(t, h, w)}, behind token {token}"
            )
        text = offset - token
        positions[:, token:offset] = np.arange(position, position + text)
        position += text
        positions[:, offset : offset + length] = np.indices((t, rows, columns)).reshape(3, -1) + position
        position += max(rows, columns)
        token = offset + length
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions, int(positions.max(initial=-1)) + 1 - num_tokens


def prepare_vision_block(
    config: Qwen3VLConfig, images: Sequence[tuple[np.ndarray, Grid]], num_patches: int
) -> VisionBlock[np.ndarray]:
    """Pack images, in order and without gaps, into the inputs of one attention block.

    images: pixels [t * h * w, patch_dim] float32 and grid (t, h, w) of each. Raises ValueError if they do not fit.
    """
    if (total := sum(pixels.shape[0] for pixels, _ in images)) > num_patches:
        raise ValueError(f"{len(images)} images of {total} patches do not fit a vision block of {num_patches}")
    block: VisionBlock[np.ndarray] = VisionBlock(
        pixels=np.zeros((num_patches, config.patch_dim), dtype=np.float32),
        position_rows=np.zeros((num_patches, 4), dtype=np.int64),
        position_weights=np.zeros((num_patches, 4), dtype=np.float32),
        rope_positions=np.zeros((num_patches, 2), dtype=np.int64),
        segment_ids=np.full(num_patches, -1, dtype=np.int64),
    )
    start, segment = 0, 0
    for pixels, (t, h, w) in images:
        if pixels.shape != (t * h * w, config.patch_dim):
            raise ValueError(f"pixels {pixels.shape}: expected {(t * h * w, config.patch_dim)} for grid {(t, h, w)}")
        place = slice(start, start + t * h * w)
        patches, rows, weights = _patch_positions(h, w, config.vision.spatial_merge_size, config.vision.position_grid)
        block.pixels[place] = pixels
        block.rope_positions[place] = np.tile(patches, (t, 1))
        block.position_rows[place] = np.tile(rows, (t, 1))
        block.position_weights[place] = np.tile(weights, (t, 1))
        block.segment_ids[place] = np.repeat(np.arange(segment, segment + t), h * w)  # frames do not see each other
        start, segment = place.stop, segment + t
    return block


@functools.lru_cache(maxsize=256)
def _patch_positions(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the patches of an h x w image in the processor's order, merge x merge squares one after the other:
    (row, column) [h * w, 2]; the four nearest entries of the side x side position table [h * w, 4]; their weights."""
    raster = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    patches = raster.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    row_taps, row_weights = _axis_taps(h, side)
    column_taps, column_weights = _axis_taps(w, side)
    row, column = patches[:, 0], patches[:, 1]
    rows = row_taps[row][:, :, None] * side + column_taps[column][:, None, :]
    weights = row_weights[row][:, :, None] * column_weights[column][:, None, :]
    return patches, rows.reshape(-1, 4), weights.reshape(-1, 4)


def _axis_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` patches spread over a table of `side` entries, end to end: the neighbours of each [size, 2], weights."""
    # In float32, as the model was trained: a patch may otherwise fall on the other side of an entry.
    place = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    lower = np.floor(place).astype(np.int64)
    weight = place - lower.astype(np.float32)
    taps = np.stack((lower, np.minimum(lower + 1, side - 1)), axis=1)
    return taps, np.stack((1 - weight, weight), axis=1).astype(np.float32)
