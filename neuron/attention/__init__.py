"""How attention reads KV blocks and images, an implementation per module, named by a device's `DeviceKind.attention`.

`masked` computes fixed shapes and masks what a query must not see: what a compiler can take. `per_sequence` reads each
sequence's own tokens where they lie. Both compute the same graph inputs, and the model's tests run on both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from neuron.attention.interface import Attention

ATTENTION = {"masked": "neuron.attention.masked", "per_sequence": "neuron.attention.per_sequence"}
"""Modules that implement `interface.Attention` with functions of their own."""


def load_attention(name: str) -> Attention:
    return cast("Attention", importlib.import_module(ATTENTION[name]))
