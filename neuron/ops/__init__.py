"""What layers compute beside attention, an implementation per module: linear maps with what stands before and behind
them, and rotary positions.

`plain` is made of torch's operators, for every device and type. `amx` calls this project's kernels on CPUs that can.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from neuron.ops.interface import Ops

OPS = {"plain": "neuron.ops.plain", "amx": "neuron.ops.amx"}
"""Modules that implement `interface.Ops` with names of their own."""


def load_ops(name: str) -> Ops:
    return cast("Ops", importlib.import_module(OPS[name]))
