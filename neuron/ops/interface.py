"""The interface of a layer's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from neuron.kv_blocks import KVBlocks
    from neuron.ops.before import HeadNorm


class Linear(Protocol):
    """A linear map: `before` the product, bias and residual behind it."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs of `before`] -> [rows, outputs]; residual [rows, outputs] is added."""


class LayerParts(NamedTuple):
    """A pre-norm transformer layer: qkv, attention, out with the residual; up, down with the residual."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norm: HeadNorm | None
    """None: queries and keys are turned only, and attention reads the rows' own."""


class Layers(Protocol):
    """Several layers, computed at once, by the same operators."""

    def __call__(
        self,
        layers: range,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Any,
        write_slots: Tensor | None = None,
        added: Sequence[Tensor] = (),
    ) -> Tensor:
        """x [rows, hidden] through these layers; `added` [rows, hidden] behind the first of them, one each.

        rope: cos and sin [rows, 1, head_dim], as for `Ops.rotate`. attend: of the attention that belongs to these
        operators. write_slots [rows]: where keys and values are stored; None: attention reads the rows' own.
        """


class Ops(Protocol):
    """One implementation."""

    def layers(self, parts: Sequence[LayerParts]) -> Layers | None:
        """None where layers are computed operator by operator, by who asks."""

    def weighted_rows(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """table [n, width]; rows, weights [count, k] -> sums [count, width] of k rows each."""

    def linear(self, weight: Tensor, bias: Tensor | None = None, before: nn.Module | None = None) -> Linear:
        """weight [outputs, inputs]. before: a module of `neuron.ops.before`; None: nothing."""

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [rows, 3, heads, head_dim], which may be written -> q, k, both turned, and v: [rows, heads, head_dim].

        cos, sin [rows, 1, head_dim]; sin is negative in its first half: the pairs are (i, i + head_dim / 2).
        """

    def rotate_and_store(
        self, qkv: Tensor, norm: HeadNorm, cos: Tensor, sin: Tensor, kv: KVBlocks, layer: int, slots: Tensor
    ) -> Tensor:
        """qkv [T, (heads + 2 * kv heads) * head_dim], which may be written -> q [T, heads, head_dim].

        Queries and keys are normed and turned, keys and values stored at slots [T] of the layer.
        """
