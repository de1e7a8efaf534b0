"""Operators as kernels of this project: float32, on CPUs with AMX. Implements `interface.Ops`.

A float32 product is made of bfloat16 halves (neuron/amx/tiles.h); its relative error is about 2^-18. What has
sides that the tiles don't divide is left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron.amx.library import LinearMap, Rotation, library
from neuron.kv_blocks import KVBlocks
from neuron.ops import plain
from neuron.ops.amx_layers import AmxLayers
from neuron.ops.before import Gelu, HeadNorm, LayerNorm, RmsNorm, SwiGlu
from neuron.ops.interface import LayerParts, Layers, Linear

_BLOCK = 32
"""What the sides of a matrix and a head must be multiples of."""
_BEFORE: dict[type, int] = {RmsNorm: 1, LayerNorm: 2, Gelu: 3, SwiGlu: 4}
_ERF_GELU = 5


class AmxLinear(nn.Module):
    """Weights as tiles read them: in two bytes each where all are bfloat16 numbers, else in as many as float32 has."""

    def __init__(self, weight: Tensor, bias: Tensor | None, before: nn.Module | None) -> None:
        super().__init__()
        self.outputs, inputs = weight.shape
        self.tiles = nn.Buffer(right_operands(weight))
        self.bias = None if bias is None else nn.Buffer(bias)
        code = _BEFORE.get(type(before), 0)
        if isinstance(before, Gelu) and before.approximate == "none":
            code = _ERF_GELU
        self.before = before
        self.fused = code != 0 or before is None
        norm = before if isinstance(before, RmsNorm | LayerNorm) else None
        self.map = LinearMap(
            weight=self.tiles.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            norm_weight=None if norm is None else norm.weight.data_ptr(),
            norm_bias=norm.bias.data_ptr() if isinstance(norm, LayerNorm) else None,
            eps=0.0 if norm is None else norm.eps,
            inputs=inputs,
            outputs=self.outputs,
            before=code,
            halves=self.tiles.shape[2],
        )
        self._kernel = library().linear

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = (x if self.fused or self.before is None else self.before(x)).contiguous()
        y = x.new_empty(len(x), self.outputs)
        added = None if residual is None else residual.contiguous()
        self._kernel(self.map, x.data_ptr(), *x.shape, None if added is None else added.data_ptr(), y.data_ptr())
        return y


def linear(weight: Tensor, bias: Tensor | None = None, before: nn.Module | None = None) -> Linear:
    if any(side % _BLOCK for side in weight.shape):
        return plain.linear(weight, bias, before)
    return AmxLinear(weight, bias, before)


def layers(parts: Sequence[LayerParts]) -> Layers | None:
    whole = all(
        part.head_dim % _BLOCK == 0
        and all(isinstance(each, AmxLinear) and each.fused for each in (part.qkv, part.out, part.up, part.down))
        for part in parts
    )
    return AmxLayers(parts) if whole else None


def weighted_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum")


def right_operands(weight: Tensor) -> Tensor:
    """[outputs, inputs] float32 -> bfloat16 [outputs / 32, inputs / 32, high and low, 2, 16 pairs of inputs, 16, 2].

    Where all low halves are 0, they are left out.
    """
    outputs, inputs = weight.shape
    high = weight.bfloat16()
    low = (weight - high.float()).bfloat16()
    parts = torch.stack((high, low) if low.any() else (high,))
    parts = parts.view(len(parts), outputs // 32, 2, 16, inputs // 32, 16, 2)
    return parts.permute(1, 4, 0, 2, 5, 3, 6).contiguous()


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, heads, head_dim = qkv.shape
    if head_dim % _BLOCK:
        return plain.rotate(qkv, cos, sin)
    rotation = Rotation(norm=None, heads=2 * heads, kv_heads=0, dim=head_dim)
    library().rotate(rotation, qkv.data_ptr(), rows, qkv.stride(0), cos.data_ptr(), sin.data_ptr(), None, None, None)
    return qkv[:, 0], qkv[:, 1], qkv[:, 2]


def rotate_and_store(
    qkv: Tensor, norm: HeadNorm, cos: Tensor, sin: Tensor, kv: KVBlocks, layer: int, slots: Tensor
) -> Tensor:
    turned, head_dim = norm.weight.shape
    if head_dim % _BLOCK:
        return plain.rotate_and_store(qkv, norm, cos, sin, kv, layer, slots)
    heads = turned - kv.num_kv_heads
    rotation = Rotation(norm.weight.data_ptr(), norm.eps, heads, kv.num_kv_heads, head_dim)
    library().rotate(
        rotation,
        qkv.data_ptr(),
        len(qkv),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        kv.keys[layer].data_ptr(),
        kv.values[layer].data_ptr(),
        slots.data_ptr(),
    )
    return qkv.view(len(qkv), -1, head_dim)[:, :heads]
