"""Attention by sequence as a kernel of this project: float32, on CPUs with AMX (neuron/amx/attention.cpp)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuron.amx.library import Heads, library
from neuron.attention import per_sequence
from neuron.attention.interface import ReadsBlocks, ReadsPatches
from neuron.kv_blocks import KVBlocks
from neuron.models.interface import DecodeInputs, PrefillInputs

_LANES = 16
"""What a head's dimension must be a multiple of; other heads are left to torch."""


class Spans(NamedTuple):
    """Whose queries read what."""

    spans: np.ndarray
    """[sequences, 4] int64: first row and number of rows of the queries; first and number of its slots in `slots`."""
    slots: np.ndarray
    """int64, rows of keys and values."""
    causal: bool
    num_rows: int
    """Rows from the first one on that all belong to a sequence: the kernel writes them."""

    @classmethod
    def of(cls, spans: np.ndarray, slots: np.ndarray, causal: bool) -> Spans:
        rows = int(spans[:, 1].sum())
        last = int(spans[-1, 0] + spans[-1, 1]) if len(spans) else 0
        return cls(spans, slots, causal, rows if rows == last else 0)


def prefill(kv: KVBlocks, inputs: PrefillInputs) -> ReadsBlocks:
    """Each chunk over its sequence, from the first token to the chunk's last."""
    rows, context = per_sequence.run_lengths(inputs.query_seq), per_sequence.run_lengths(inputs.context_seq)
    if kv.head_dim % _LANES:
        return per_sequence.prefill(kv, inputs)
    return BlocksReader(kv, Spans.of(_spans(rows, context), inputs.context_slots.numpy(), causal=True))


def decode(kv: KVBlocks, inputs: DecodeInputs) -> ReadsBlocks:
    """Each row over its sequence."""
    if kv.head_dim % _LANES:
        return per_sequence.decode(kv, inputs)
    lengths = inputs.context_lens.numpy()
    blocks = inputs.block_tables.numpy()[:, : -(-int(lengths.max()) // kv.block_size)]
    slots = (blocks[:, :, None] * kv.block_size + np.arange(kv.block_size)).reshape(len(blocks), -1)
    rows = np.flatnonzero(lengths)
    first = rows * slots.shape[1]
    spans = np.stack((rows, np.ones_like(rows), first, lengths[rows]), axis=1)
    return BlocksReader(kv, Spans.of(spans, np.ascontiguousarray(slots), causal=True))


def patches(segment_ids: Tensor, dtype: torch.dtype) -> ReadsPatches:
    """Each image's patches among themselves."""
    counts = per_sequence.run_lengths(segment_ids)
    work = Spans.of(_spans(counts, counts), np.arange(len(segment_ids)), causal=False)
    return PatchesReader(work, per_sequence.patches(segment_ids, dtype))


class BlocksReader(NamedTuple):
    """Implements `interface.ReadsBlocks`."""

    kv: KVBlocks
    work: Spans

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        return _attend(self.work, q, self.kv.keys[layer], self.kv.values[layer])


class PatchesReader(NamedTuple):
    """Implements `interface.ReadsPatches`."""

    work: Spans
    plain: ReadsPatches
    """For heads of other dimensions."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plain(q, k, v) if q.shape[-1] % _LANES else _attend(self.work, q, k, v)


def _attend(work: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [rows, heads, head_dim] over k, v [slots, kv heads, head_dim]; heads lie together in a row."""
    rows, num_heads, head_dim = q.shape
    out = q.new_empty(rows, num_heads * head_dim)
    out[work.num_rows :] = 0.0
    heads = Heads(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_heads,
        k.shape[1],
        head_dim,
        work.causal,
        1 / math.sqrt(head_dim),
    )
    library().attention(heads, work.spans.ctypes.data, len(work.spans), work.slots.ctypes.data)
    return out


def _spans(rows: list[int], context: list[int]) -> np.ndarray:
    """Of sequences that lie one behind the other."""
    ends = np.cumsum(rows), np.cumsum(context)
    return np.stack((ends[0] - rows, rows, ends[1] - context, context), axis=1).astype(np.int64)
