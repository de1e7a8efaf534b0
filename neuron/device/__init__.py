"""The devices that a rank's graphs run on.

`interface` says what a device does, `graphs` runs a rank's graphs on one and watches for new shapes. A backend is one
module, one entry in `KINDS`, and its name in the setting `parallel.device`. Nothing here imports torch: the plan reads
`KINDS` too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from neuron.device.interface import Device


@dataclass(frozen=True)
class DeviceKind:
    """What the layers above need to know of a backend."""

    module: str
    """Offers `create(cache_dir: str | None) -> Device`."""
    compiles: bool
    """Whether a graph's first execution compiles it."""
    same_program: bool
    """Whether the ranks must run the same graphs at the same time: a rank without images then encodes padding."""
    kernels: str
    """Which of `neuron.kernels.KERNELS` its graphs call."""
    kernels_for_high: str | None
    """Which instead under `model.matmul_precision: high`, in float32; None: the same."""
    samples: bool
    """Whether tokens are drawn by graphs; else on the host, where the logits lie already."""


KINDS = {
    "cpu": DeviceKind(
        "neuron.device.cpu",
        compiles=False,
        same_program=False,
        kernels="per_sequence",
        kernels_for_high="amx",
        samples=False,
    ),
    "neuron": DeviceKind(
        "neuron.device.xla", compiles=True, same_program=True, kernels="masked", kernels_for_high=None, samples=True
    ),
}


def create_device(name: str, cache_dir: str | None = None) -> Device:
    """This process's device. cache_dir: of compiled graphs. Raises ConfigError when a package is missing."""
    return cast("Device", importlib.import_module(KINDS[name].module).create(cache_dir))
