"""What may stand before a linear map, and the norm of heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """Over the last dimension, in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMS norm of query and key heads, each with its own row of weights; `Ops.rotate_and_store` computes it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [heads + kv heads, head_dim]."""
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.eps = eps


class LayerNorm(nn.Module):
    """Over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.bias = nn.Buffer(bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Gelu(nn.Module):
    def __init__(self, approximate: str) -> None:
        """approximate: "none" or "tanh"."""
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


class SwiGlu(nn.Module):
    """[..., 2 * n], gate and up -> [..., n]."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
