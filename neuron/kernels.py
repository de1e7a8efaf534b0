"""Which kernels a model's layers call: an implementation of attention and one of the other operators, by one name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from neuron.attention import load_attention
from neuron.ops import load_ops

if TYPE_CHECKING:
    from neuron.attention.interface import Attention
    from neuron.ops.interface import Ops

logger = logging.getLogger("trn_vision_serve")

KERNELS = {"masked": ("masked", "plain"), "per_sequence": ("per_sequence", "plain"), "amx": ("amx", "amx")}
"""Names in `neuron.attention.ATTENTION` and in `neuron.ops.OPS`."""


class Kernels(NamedTuple):
    attention: Attention
    ops: Ops


def load_kernels(name: str) -> Kernels:
    attention, ops = KERNELS[name]
    return Kernels(load_attention(attention), load_ops(ops))


def choose_kernels(exact: str, high: str | None, dtype: str, matmul_precision: str) -> Kernels:
    """A device's kernels: those for `high` where they can run here, the setting allows them, and dtype is float32."""
    if high is None or dtype != "float32" or matmul_precision != "high":
        return load_kernels(exact)
    from neuron.amx.library import AmxError, library

    try:
        library()
    except AmxError as error:
        logger.info("model.matmul_precision = 'high' computes as 'highest' does: %s", error)
        return load_kernels(exact)
    return load_kernels(high)
