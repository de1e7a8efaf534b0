"""Attention of fixed shapes: gathers as many slots as the bucket has, and masks what a query must not see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron.attention.interface import ReadsBlocks, ReadsPatches
from neuron.kv_blocks import KVBlocks
from neuron.models.interface import DecodeInputs, PrefillInputs


def prefill(kv: KVBlocks, inputs: PrefillInputs) -> ReadsBlocks:
    """All queries over all of the step's context, [T, C]. Padding reads a slot that the step has just written."""
    visible = (inputs.query_seq[:, None] == inputs.context_seq) & (inputs.query_pos[:, None] >= inputs.context_pos)
    slots = torch.where(inputs.context_seq >= 0, inputs.context_slots, inputs.slot_mapping[:1])
    mask = _additive(visible, kv.dtype)

    def read(layer: int, q: Tensor) -> Tensor:
        k, v = kv.read(layer, slots)
        grouped = q.shape[1] > k.shape[1]
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return attended.squeeze(0).transpose(0, 1).flatten(1)

    return read


def decode(kv: KVBlocks, inputs: DecodeInputs) -> ReadsBlocks:
    """Each sequence over its row of the block table, [S, L]. The heads of a group stand where queries usually do."""
    offsets = torch.arange(kv.block_size, device=inputs.token_ids.device)
    slots = (inputs.block_tables[:, :, None] * kv.block_size + offsets).flatten(1)  # [S, L]
    visible = torch.arange(slots.shape[1], device=slots.device) < inputs.context_lens[:, None]
    slots = torch.where(visible, slots, inputs.slot_mapping[:, None]).flatten()
    mask = _additive(visible, kv.dtype)[:, None, None]

    def read(layer: int, q: Tensor) -> Tensor:
        seqs, _, head_dim = q.shape
        k, v = (part.view(seqs, -1, *part.shape[1:]).transpose(1, 2) for part in kv.read(layer, slots))
        grouped = q.view(seqs, k.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(seqs, -1)

    return read


def patches(segment_ids: Tensor, dtype: torch.dtype) -> ReadsPatches:
    """All patches over all, [P, P]. Padding sees padding, so that no row of the softmax is empty."""
    mask = _additive(segment_ids[:, None] == segment_ids, dtype)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(0).transpose(0, 1).flatten(1)

    return read


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, else the lowest finite value: a row that sees nothing stays finite too."""
    return torch.zeros((), dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
