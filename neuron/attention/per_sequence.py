"""Attention of one sequence, or one image, at a time, over its own tokens alone: for the CPU.

What lies in the blocks one after the other is read there; only a sequence that is scattered is gathered. Padding is
neither read nor computed: its rows are zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from neuron.attention.interface import ReadsBlocks, ReadsPatches
from neuron.kv_blocks import KVBlocks, Slots
from neuron.models.interface import DecodeInputs, PrefillInputs

_SIMILAR = 0.7
"""Below it a sequence costs less in a call of its own than in padding."""
_LONG = 512
"""Tokens before a chunk from which on they are read without a mask, which costs half as much again."""


class _Chunk(NamedTuple):
    """A sequence's rows in a prefill."""

    rows: slice
    slots: Slots
    num_before: int
    """Tokens of the context before the rows, which all of them see."""
    mask: Tensor | None
    """[rows, context] added to the scores; None where `_attend` needs none."""


def prefill(kv: KVBlocks, inputs: PrefillInputs) -> ReadsBlocks:
    """Each chunk over its sequence, from the first token to the chunk's last."""
    context_slots = inputs.context_slots.numpy()
    chunks = []
    row = at = 0
    for count, context in zip(run_lengths(inputs.query_seq), run_lengths(inputs.context_seq), strict=True):
        slots = _slots(context_slots[at : at + context])
        before = context - count
        mask = _causal(count, context, kv.dtype) if 0 < before < _LONG and count > 1 else None
        chunks.append(_Chunk(slice(row, row + count), slots, before, mask))
        row, at = row + count, at + context

    def read(layer: int, q: Tensor) -> Tensor:
        attended = torch.zeros_like(q)
        for chunk in chunks:
            k, v = kv.read(layer, chunk.slots)
            part = _attend(chunk, *map(_heads_first, (q[chunk.rows], k, v)))
            attended[chunk.rows] = part[0].transpose(0, 1)
        return attended.flatten(1)

    return read


def _attend(chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [1, heads, rows, head_dim] over k, v [1, kv heads, context, head_dim], causal -> as q."""
    before, grouped = chunk.num_before, q.shape[1] > k.shape[1]
    if before < _LONG or q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask, is_causal=before == 0, enable_gqa=grouped)
    # What is before the rows, which needs no mask, and the rows among themselves, weighed by the sums of their softmax.
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if grouped else part for part in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    old, old_log_sum = flash(q, k[:, :, :before], v[:, :, :before])
    new, new_log_sum = flash(q, k[:, :, before:], v[:, :, before:], is_causal=True)
    weight = torch.sigmoid(new_log_sum - old_log_sum).unsqueeze(-1).to(q.dtype)
    return torch.lerp(old, new, weight)


def decode(kv: KVBlocks, inputs: DecodeInputs) -> ReadsBlocks:
    """Each row over its sequence, rows of similar length at once. A group's heads stand where queries usually do."""
    groups = [_batch(kv, inputs, rows) for rows in _similar(inputs.context_lens.tolist())]

    def read(layer: int, q: Tensor) -> Tensor:
        rows, _, head_dim = q.shape
        grouped = q.view(rows, kv.num_kv_heads, -1, head_dim)
        attended = torch.zeros_like(grouped)
        for batch in groups:
            queries = grouped[batch.rows]
            k, v = (
                part.view(len(queries), -1, *part.shape[1:]).transpose(1, 2) for part in kv.read(layer, batch.slots)
            )
            attended[batch.rows] = F.scaled_dot_product_attention(queries, k, v, attn_mask=batch.mask)
        return attended.view(rows, -1)

    return read


class _Batch(NamedTuple):
    """Rows of a decode step that are read together."""

    rows: Slots
    """Of the step."""
    slots: Slots
    """[rows * longest], behind a sequence's own its last one again."""
    mask: Tensor | None
    """[rows, 1, 1, longest] added to the scores; None: all are as long."""


def _batch(kv: KVBlocks, inputs: DecodeInputs, rows: list[int]) -> _Batch:
    places, lengths = _slots(np.array(rows)), inputs.context_lens.numpy()[rows]
    longest = int(lengths.max())
    blocks = inputs.block_tables.numpy()[rows, : -(-longest // kv.block_size)]
    slots = (blocks[:, :, None] * kv.block_size + np.arange(kv.block_size)).reshape(len(rows), -1)
    if len(rows) == 1:
        return _Batch(places, _slots(slots[0, :longest]), None)
    beyond = np.arange(longest) >= lengths[:, None]
    last = slots[np.arange(len(rows)), lengths - 1]
    slots = np.where(beyond, last[:, None], slots[:, :longest])
    mask = torch.zeros((), dtype=kv.dtype).masked_fill(torch.from_numpy(beyond), torch.finfo(kv.dtype).min)
    return _Batch(places, torch.from_numpy(slots.ravel()), mask[:, None, None] if beyond.any() else None)


def _similar(lengths: list[int]) -> list[list[int]]:
    """Rows that read something, dealt into groups in which the shortest has at least _SIMILAR of the longest."""
    groups: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        if not groups or lengths[row] < _SIMILAR * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def patches(segment_ids: Tensor, dtype: torch.dtype) -> ReadsPatches:
    """Each image's patches among themselves."""
    counts = run_lengths(segment_ids)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = torch.zeros_like(q)
        first = 0
        for count in counts:
            rows = slice(first, first + count)
            part = F.scaled_dot_product_attention(_heads_first(q[rows]), _heads_first(k[rows]), _heads_first(v[rows]))
            attended[rows] = part[0].transpose(0, 1)
            first += count
        return attended.flatten(1)

    return read


def run_lengths(ids: Tensor) -> list[int]:
    """How often 0, 1 ... occur in ids, which ascend and end with -1 for padding."""
    lengths: list[int] = np.bincount(ids[ids >= 0].numpy()).tolist()
    return lengths


def _slots(slots: np.ndarray) -> Slots:
    """A slice where the slots, or rows, follow one another."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and (np.diff(slots) == 1).all():
        return slice(first, last + 1)
    return torch.from_numpy(slots)


def _causal(count: int, context: int, dtype: torch.dtype) -> Tensor:
    """[count, context], added to scores: the rows are the context's last."""
    hidden = torch.ones(count, context, dtype=torch.bool).triu_(context - count + 1)
    return torch.zeros((), dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)
