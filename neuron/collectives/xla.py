"""Collectives of ranks on NeuronCores. They have not run on hardware."""

import torch
import torch.distributed as dist

from neuron.collectives.interface import CollectiveError
from neuron.collectives.torch_distributed import TorchDistributedCollectives
from neuron.device.xla_imports import import_xla


class XlaCollectives(TorchDistributedCollectives):
    """Collectives over torch.distributed's backend `xla`, for tensors on the XLA device.

    It has not run on hardware. It is written against torch_xla 2.9 and tested over a stand-in for it.

    rendezvous: an init_method, `tcp://host:port`. The Neuron runtime's variables must have been set in this process.
    Calls are lazy: a collective runs with the graph that it is part of, and what goes wrong is raised where the graph's
    results are read. `timeout_s` bounds joining; how long a graph may wait for a peer is the runtime's own limit,
    NEURON_RT_EXEC_TIMEOUT in seconds.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        if world_size > 1:
            xla = import_xla()
            self._device = xla.torch_xla.device()
            # Without it torch_xla counts one device, and each collective returns its input without a word.
            xla.xla_model.set_replication(self._device, [self._device])
            found = (xla.runtime.global_ordinal(), xla.runtime.world_size())
            if found != (rank, world_size):
                raise CollectiveError(
                    "join",
                    f"the XLA runtime is device {found[0]} of {found[1]}, expected {rank} of {world_size}: "
                    "NEURON_PJRT_PROCESS_INDEX and NEURON_PJRT_PROCESSES_NUM_DEVICES must be set before torch_xla is "
                    "imported",
                )
        super().__init__(rank, world_size, rendezvous, timeout_s, backend="xla")

    def barrier(self) -> None:
        # The backend's own barrier returns at once: read a sum to which every rank must have added.
        if self._usable("barrier"):
            self._run("barrier", self._read_a_sum)

    def _read_a_sum(self) -> None:
        arrived = torch.ones(1, device=self._device)
        dist.all_reduce(arrived)
        arrived.item()
