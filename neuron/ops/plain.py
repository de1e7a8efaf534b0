"""Operators made of torch's own. Implements `interface.Ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron.kv_blocks import KVBlocks
from neuron.ops.before import HeadNorm
from neuron.ops.interface import LayerParts


class PlainLinear(nn.Module):
    """The weight lies in memory input by input: on the CPU the product with 16 rows takes a third to two thirds of the
    time, that with one or with hundreds no longer."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, before: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight.t().contiguous().t())
        self.bias = None if bias is None else nn.Buffer(bias)
        self.before = before

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x if self.before is None else self.before(x), self.weight, self.bias)
        return y if residual is None else residual + y


linear = PlainLinear


def layers(parts: Sequence[LayerParts]) -> None:
    """Operator by operator."""


def weighted_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    return (table[rows] * weights[:, :, None]).sum(1)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    qk, v = qkv[:, :2], qkv[:, 2]
    qk = _turn(qk, cos.unsqueeze(1), sin.unsqueeze(1)).to(v.dtype)
    return qk[:, 0], qk[:, 1], v


def rotate_and_store(
    qkv: Tensor, norm: HeadNorm, cos: Tensor, sin: Tensor, kv: KVBlocks, layer: int, slots: Tensor
) -> Tensor:
    turned, head_dim = norm.weight.shape
    qkv = qkv.view(len(qkv), -1, head_dim)
    qk, v = qkv.split((turned, kv.num_kv_heads), dim=1)
    qk = _turn(F.rms_norm(qk, (head_dim,), eps=norm.eps) * norm.weight, cos, sin)
    q, k = qk.split((turned - kv.num_kv_heads, kv.num_kv_heads), dim=1)
    kv.write(layer, slots, k, v)
    return q


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + head_dim / 2) of x [..., heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
