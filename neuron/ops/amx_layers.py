"""Layers as one call of the kernels: no Python runs between them, which takes longer than a small product."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from neuron.amx.library import Layer, LinearMap, Pass, library
from neuron.ops.interface import LayerParts

if TYPE_CHECKING:
    from neuron.attention.amx import BlocksReader, PatchesReader
    from neuron.kv_blocks import KVBlocks


class _HasMap(Protocol):
    """AmxLinear, whose module imports this one."""

    map: LinearMap


class AmxLayers:
    """Implements `interface.Layers`: what layer by layer calls the same kernels gives the same bits."""

    def __init__(self, parts: Sequence[LayerParts]) -> None:
        """Of AmxLinear maps."""
        self._parts = parts  # owns what the structures point to
        self._layers = (Layer * len(parts))(*map(_layer, parts))
        self._kv: KVBlocks | None = None
        self._kernel = library().layers

    def __call__(
        self,
        layers: range,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: BlocksReader | PatchesReader,
        write_slots: Tensor | None = None,
        added: Sequence[Tensor] = (),
    ) -> Tensor:
        kv = getattr(attend, "kv", None)
        if kv is not self._kv:
            self._point_to(kv)
        work, first = attend.work, self._layers[layers.start]
        x, (rows, hidden) = x.contiguous(), x.shape
        cos, sin = (each.contiguous() for each in rope)
        qkv, attended, up = (x.new_empty(rows, width) for width in _widths(first))
        middle, y = x.new_empty(rows, hidden), x.new_empty(rows, hidden)
        added = [each.contiguous() for each in added]
        behind = (ctypes.c_void_p * len(layers))(*(each.data_ptr() for each in added))
        step = Pass(
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            up=up.data_ptr(),
            middle=middle.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            write_slots=None if write_slots is None else write_slots.data_ptr(),
            spans=work.spans.ctypes.data,
            slots=work.slots.ctypes.data,
            rows=rows,
            num_spans=len(work.spans),
            num_attended=work.num_rows,
            causal=work.causal,
        )
        self._kernel(ctypes.byref(first), len(layers), step, x.data_ptr(), behind, y.data_ptr())
        return y

    def _point_to(self, kv: KVBlocks | None) -> None:
        self._kv = kv
        for index, layer in enumerate(self._layers):
            layer.keys = None if kv is None else kv.keys[index].data_ptr()
            layer.values = None if kv is None else kv.values[index].data_ptr()


def _layer(part: LayerParts) -> Layer:
    norm = part.head_norm
    maps = [cast("_HasMap", each).map for each in (part.qkv, part.out, part.up, part.down)]
    return Layer(
        *map(ctypes.pointer, maps),
        norm=None if norm is None else norm.weight.data_ptr(),
        eps=0.0 if norm is None else norm.eps,
        heads=part.num_heads,
        kv_heads=part.num_kv_heads,
        dim=part.head_dim,
    )


def _widths(layer: Any) -> tuple[int, int, int]:
    """Columns of qkv, of what attention gives, and between the MLP's maps, which are the same in every layer."""
    return layer.qkv.contents.outputs, layer.out.contents.inputs, layer.up.contents.outputs
