"""Which graphs of a plan lie compiled in a cache folder: a list of ours beside the cache, which offers no such query.

A list is good for exactly what its programs were compiled from: versions, flags, the model's code and config, and every
size that is part of a graph. Each graph is listed with the files that its compilation added to the folder.
"""

import importlib.metadata
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from actors.plan import EnginePlan
from configs.engine import ROOT, ConfigError

_LISTS = "trn-vision-serve"
"""Folder of the lists in the cache folder."""
_PACKAGES = ("torch", "torch_xla", "torch-neuronx", "neuronx-cc", "libneuronxla")
_VARIABLES = (
    "PJRT_DEVICE",
    "NEURON_CC_FLAGS",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "XLA_FLAGS",
)
"""Of the environment, those that change what a compiler makes."""


class CompiledGraphs:
    """The list for one plan. Bucket name -> files, relative to the cache folder."""

    def __init__(self, plan: EnginePlan, digest: str) -> None:
        """digest: a rank's `graphs_digest`. Reads the list as it is. Raises ConfigError without compiler.cache_dir."""
        if plan.config.compiler.cache_dir is None:
            raise ConfigError("compiler.cache_dir = None: expected a folder, which keeps the compiled graphs")
        self.folder = Path(plan.config.compiler.cache_dir)
        self._path = self.folder / _LISTS / f"{digest}.json"
        self._files: dict[str, list[str]] = {}
        if self._path.exists():
            self._files = json.loads(self._path.read_text())

    def has(self, bucket: str) -> bool:
        return bucket in self._files and all((self.folder / file).exists() for file in self._files[bucket])

    def files(self) -> set[str]:
        """What the cache holds now."""
        found = (file for file in self.folder.rglob("*") if file.is_file() and not file.name.endswith(".lock"))
        return {str(file.relative_to(self.folder)) for file in found if _LISTS not in file.parts}

    def add(self, bucket: str, files: set[str]) -> None:
        """List a graph that was compiled, with the files that this added; without any, it was there before."""
        self._files[bucket] = sorted({*files, *self._files.get(bucket, ())})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(self._files, indent=1))
        written.replace(self._path)


def check_compiled(plan: EnginePlan) -> None:
    """On a rank: raises ConfigError naming the graphs that were not compiled for this plan.

    Devices that don't compile pass.
    """
    if not plan.kind.compiles:
        return
    compiled = CompiledGraphs(plan, graphs_digest(plan))
    names = plan.bucket_names()
    missing = [name for name in names if not compiled.has(name)]
    if missing:
        raise ConfigError(
            f"compiler.require_compiled = True: {len(missing)} of {len(names)} graphs are not compiled in "
            f"{compiled.folder}: {', '.join(missing)}; run `make compile` with this configuration, these package "
            "versions and compiler flags, or set compiler.require_compiled: false"
        )


def graphs_digest(plan: EnginePlan) -> str:
    """Of all that the plan's programs are compiled from, but for the buckets, which name them. Of this process, whose
    variables and packages may be others than those of another one."""
    config = plan.config
    what: dict[str, Any] = {
        "device": plan.device,
        "dtype": plan.dtype,
        "world_size": config.parallel.world_size,
        "kv_cache": [config.kv_cache.planned_num_blocks, config.kv_cache.block_size],
        "encoder_cache": [config.encoder_cache.num_blocks, config.encoder_cache.block_size],
        "max_num_seqs": config.scheduler.max_num_seqs,
        "num_logit_changes": plan.num_logit_changes,
        # A dataclass in every family; the protocol that the plan knows it by cannot say so.
        "model": asdict(plan.memory.model),  # type: ignore[call-overload]
        "packages": {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "code": {str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / "neuron").rglob("*.py"))},
    }
    return blake3(json.dumps(what, sort_keys=True).encode()).hexdigest(length=16)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
