"""The NeuronCores of a gang: what Ray gave each rank, what the instance has, and whether the gang can run on them.

Core ids count logical NeuronCores (LNC), as Ray and the runtime do. Plain Python: imports neither Ray nor torch.
Tested with a fake `neuron-ls`; it has not run on hardware.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.engine import ConfigError

CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
_TOOLS = "/opt/aws/neuron/bin"
"""Where the Neuron tools are installed, and where Ray looks for them."""
_TOOLS_TIMEOUT_S = 60
_ROOT_PORT = 62182
"""Above Linux's ephemeral ports: the runtime binds the root port minutes after it was chosen, with the first graph."""


@dataclass(frozen=True)
class InstanceFacts:
    """What `neuron-ls` says of this instance."""

    name: str
    """The instance type, where this version of `neuron-ls` prints it."""
    cores: int
    """Logical NeuronCores, summed over the devices."""
    logical_neuroncore_config: int | None
    """Physical cores of a logical one; None on instances that have no such setting."""


def read_instance() -> InstanceFacts:
    """Ask `neuron-ls`. Raises ConfigError when it is missing or gives no devices."""
    program = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_TOOLS)
    if program is None:
        raise ConfigError(
            f"parallel.device = 'neuron': neuron-ls is neither on PATH nor in {_TOOLS}; install aws-neuronx-tools on "
            "every node, or set parallel.device: cpu"
        )
    try:
        result = subprocess.run(
            [program, "--json-output"], capture_output=True, text=True, timeout=_TOOLS_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        raise ConfigError(
            f"parallel.device = 'neuron': {program} --json-output failed ({error}) {said}".rstrip()
            + "; run it by hand: the Neuron driver must be loaded and its devices visible to Ray's processes"
        ) from error
    return parse_instance(result.stdout)


def parse_instance(output: str) -> InstanceFacts:
    """The facts in the output of `neuron-ls --json-output`, a list with an object per device. Raises ConfigError."""
    try:
        devices: list[dict[str, Any]] = json.loads(output)
        cores = sum(device["nc_count"] for device in devices)
        first = devices[0]
        return InstanceFacts(first.get("instance_type", "this instance"), cores, first.get("logical_neuroncore_config"))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"parallel.device = 'neuron': neuron-ls --json-output printed {output[:200]!r}: expected a list of devices "
            "with nc_count"
        ) from error


def parse_cores(visible: str | None) -> tuple[int, ...]:
    """The ids in a value of NEURON_RT_VISIBLE_CORES (`3`, `0-3,8`), none when it is not set. Raises ConfigError."""
    cores: list[int] = []
    try:
        for part in (visible or "").split(","):
            if part.strip():
                first, dash, last = part.partition("-")
                cores.extend(range(int(first), int(last if dash else first) + 1))
    except ValueError as error:
        raise ConfigError(f"{CORES_VARIABLE} = {visible!r}: expected core ids and ranges, such as 0-3,8") from error
    return tuple(cores)


def format_cores(cores: Sequence[int]) -> str:
    """Ascending ids and ranges: `0-3,8`; `none` for no core."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges) or "none"


def check_gang(
    cores_by_rank: Sequence[tuple[int, ...]],
    facts: InstanceFacts,
    logical_neuroncore_config: int,
    lnc_variable: str | None,
) -> None:
    """Whether a gang can run on the cores that its ranks were given. Raises ConfigError: which cores, what to change.

    logical_neuroncore_config: the setting; lnc_variable: NEURON_LOGICAL_NC_CONFIG in the ranks' environment.
    A gang whose cores are not contiguous, or do not start at a multiple of its size, would load and compile on Trn2 and
    then fail in its first reduce-scatter.
    """
    _check_lnc(facts, logical_neuroncore_config, lnc_variable)
    size = len(cores_by_rank)
    for rank, cores in enumerate(cores_by_rank):
        if len(cores) != 1:
            raise ConfigError(
                f"parallel.device = 'neuron': rank {rank} was given NeuronCores {format_cores(cores)}, expected one; "
                "where `ray start` runs, unset RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES, and write "
                f"{CORES_VARIABLE}, if it is set at all, as a list without ranges"
            )
    given = sorted(core for (core,) in cores_by_rank)
    said = f"parallel.world_size = {size}: the gang was given NeuronCores {format_cores(given)}"
    twice = sorted({core for core in given if given.count(core) > 1})
    if twice:
        raise ConfigError(
            f"{said}, and more than one rank NeuronCore {format_cores(twice)}; a core belongs to one process: let Ray "
            f"alone set {CORES_VARIABLE}"
        )
    if given[-1] >= facts.cores:
        raise ConfigError(
            f"{said}, and {facts.name} has {facts.cores}, from 0; let `ray start` count the cores itself, without "
            "neuron_cores in --resources"
        )
    if given[-1] - given[0] != size - 1:
        raise ConfigError(
            f"{said}, which are not contiguous; stop the actors that hold the cores between them, or start them after "
            "this application"
        )
    if given[0] % size:
        raise ConfigError(
            f"{said}, which start at {given[0]}, expected a multiple of {size}; stop the actors that hold the cores "
            f"before them, start them after this application, or let them ask for {size} neuron_cores at a time"
        )


def _check_lnc(facts: InstanceFacts, setting: int, variable: str | None) -> None:
    for source, found in (
        (f"{LNC_VARIABLE} in the ranks' environment", variable),
        (f"neuron-ls on {facts.name}", facts.logical_neuroncore_config),
    ):
        if found is not None and str(found) != str(setting):
            raise ConfigError(
                f"parallel.logical_neuroncore_config = {setting}: {source} says {found}; set "
                f"{LNC_VARIABLE}={setting} where `ray start` runs, on every node, or change the setting"
            )


def core_order(cores_by_rank: Sequence[tuple[int, ...]]) -> list[int]:
    """The indices of `cores_by_rank` by ascending core: the order in which a checked gang numbers its ranks."""
    return sorted(range(len(cores_by_rank)), key=lambda index: cores_by_rank[index])


def root_address(host: str, cores: Sequence[int]) -> str:
    """host:port where the gang on `cores` of `host` bootstraps its collectives: no other gang there has the port."""
    return f"{host}:{_ROOT_PORT + min(cores)}"


def runtime_environment(rank: int, world_size: int, root_address: str, cores: Sequence[int]) -> dict[str, str]:
    """The variables of the Neuron runtime for a rank's process, to be set before torch_xla is imported there.

    cores: the rank's own. The gang is on one instance, so that a rank's local number is its rank.
    """
    return {
        "PJRT_DEVICE": "NEURON",
        CORES_VARIABLE: format_cores(cores),
        "NEURON_RT_ROOT_COMM_ID": root_address,
        "NEURON_PJRT_PROCESS_INDEX": str(rank),
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join(["1"] * world_size),
        # Some versions of torch_neuronx overwrite the process index with RANK, and with 0 when that is not set.
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def set_runtime_environment(variables: dict[str, str]) -> None:
    """Set the variables in this process. Raises RuntimeError when torch_xla, which reads them, is imported already."""
    if "torch_xla" in sys.modules:
        raise RuntimeError("torch_xla was imported before the Neuron runtime's variables were set")
    os.environ.update(variables)
