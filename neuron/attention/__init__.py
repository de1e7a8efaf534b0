"""How attention reads KV blocks and images, an implementation per module; `neuron.kernels` names the one of a device.

`masked` computes fixed shapes and masks what a query must not see: what a compiler can take. `per_sequence` reads each
sequence's own tokens where they lie, and so does `amx`, a kernel of this project. All take the same graph inputs, and
the model's tests run on each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from neuron.attention.interface import Attention

ATTENTION = {
    "masked": "neuron.attention.masked",
    "per_sequence": "neuron.attention.per_sequence",
    "amx": "neuron.attention.amx",
}
"""Modules that implement `interface.Attention` with functions of their own."""


def load_attention(name: str) -> Attention:
    return cast("Attention", importlib.import_module(ATTENTION[name]))
