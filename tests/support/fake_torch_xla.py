"""A stand-in for torch_xla: the calls that this project makes, on CPU tensors, its backend `xla` carried by gloo.

It behaves as torch_xla 2.9 does where that matters: the runtime counts devices by NEURON_PJRT_PROCESSES_NUM_DEVICES,
but only one before `set_replication`, and the barrier waits for nobody.
"""

import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Put the modules into sys.modules, torch_neuronx beside them, and register the backend."""
    replicated: list[Any] = []

    def world_size() -> int:
        counts = os.environ.get("NEURON_PJRT_PROCESSES_NUM_DEVICES", "1").split(",")
        return sum(map(int, counts)) if replicated else 1

    def barrier(*_: Any) -> None:
        return None

    package = _module("torch_xla", device=lambda: torch.device("cpu"))
    core = _module("torch_xla.core")
    core.xla_model = _module(  # type: ignore[attr-defined]
        "torch_xla.core.xla_model", set_replication=lambda device, devices: replicated.extend(devices)
    )
    distributed = _module("torch_xla.distributed")
    distributed.xla_backend = _module("torch_xla.distributed.xla_backend")  # type: ignore[attr-defined]
    debug = _module("torch_xla.debug")
    debug.metrics = _module("torch_xla.debug.metrics", metric_data=lambda name: None)  # type: ignore[attr-defined]
    package.debug = debug  # type: ignore[attr-defined]
    package.core, package.distributed = core, distributed  # type: ignore[attr-defined]
    package.runtime = _module(  # type: ignore[attr-defined]
        "torch_xla.runtime",
        world_size=world_size,
        global_ordinal=lambda: int(os.environ.get("NEURON_PJRT_PROCESS_INDEX", "0")),
    )
    _module("torch_neuronx")
    if "xla" not in dist.Backend.backend_list:
        dist.Backend.register_backend("xla", dist.ProcessGroupGloo, devices="cpu")
    dist.barrier = barrier


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module
