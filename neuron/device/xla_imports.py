"""The one module that imports torch_xla and torch_neuronx, which are no requirements of the CPU device."""

import os
from dataclasses import dataclass
from typing import Any

from configs.engine import ConfigError


@dataclass(frozen=True)
class Xla:
    """What the project uses of torch_xla."""

    torch_xla: Any
    xla_model: Any
    """torch_xla.core.xla_model"""
    runtime: Any
    """torch_xla.runtime"""
    metrics: Any
    """torch_xla.debug.metrics"""


def import_xla(cache_dir: str | None = None) -> Xla:
    """Import torch_xla, and torch_neuronx where PJRT_DEVICE is NEURON. Registers torch.distributed's backend `xla`.

    cache_dir: where compiled programs are kept, by the Neuron runtime or else by torch_xla. The first call decides.
    The import reads the runtime's variables: they must have been set (actors/neuron_cores.py).
    Raises ConfigError when a package is missing.
    """
    on_neuron = os.environ.get("PJRT_DEVICE") == "NEURON"
    if cache_dir is not None and on_neuron:
        os.environ["NEURON_COMPILE_CACHE_URL"] = cache_dir
    try:
        import torch_xla
        import torch_xla.core.xla_model as xla_model
        import torch_xla.debug.metrics as metrics
        import torch_xla.distributed.xla_backend
        import torch_xla.runtime as runtime

        if on_neuron:
            import torch_neuronx  # noqa: F401  # registers the device
    except ImportError as error:
        raise ConfigError(
            f"parallel.device = 'neuron': {error}; install torch-neuronx from AWS's package index on every node "
            '(README.md, "On Trainium"), or set parallel.device: cpu'
        ) from error
    if cache_dir is not None and not on_neuron and "XLA_PERSISTENT_CACHE_PATH" not in os.environ:
        runtime.initialize_cache(cache_dir)
    return Xla(torch_xla, xla_model, runtime, metrics)
