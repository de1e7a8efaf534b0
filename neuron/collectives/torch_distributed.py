"""Collectives through torch.distributed."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from neuron.collectives.interface import CollectiveError

# The older name is deprecated where the newer one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_GRACE_S = 2.0
"""How long ranks that saw a failure wait for each other's report of it."""


class TorchDistributedCollectives:
    """Collectives over torch.distributed's default process group, of which a process has one.

    rendezvous: an init_method (`tcp://host:port`, `file:///path`). backend: "gloo" for CPU tensors; another backend's
    name where its package has registered it. A gang of one needs no process group and returns its inputs.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: str, timeout_s: float, backend: str = "gloo") -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._error: CollectiveError | None = None
        self._open = world_size > 1
        if not self._open:
            return
        if dist.is_initialized():
            raise ValueError("torch.distributed is initialized in this process already: close its user first")
        try:
            dist.init_process_group(
                backend,
                init_method=rendezvous,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise CollectiveError("join", f"{error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._usable("all_reduce"):
            return x
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self._run("all_reduce", lambda: dist.all_reduce(result))
        return result

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"all_gather dim {dim}: expected a dimension of a tensor of shape {tuple(x.shape)}")
        if not self._usable("all_gather"):
            return x
        mine = x.detach().contiguous()
        gathered = mine.new_empty((self.world_size, *x.shape))
        self._run("all_gather", lambda: _all_gather(gathered.view(-1), mine.view(-1)))
        return gathered.movedim(0, dim % x.dim()).flatten(dim % x.dim(), dim % x.dim() + 1).contiguous()

    def all_to_all(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[0] != self.world_size:
            raise ValueError(f"all_to_all of shape {tuple(x.shape)}: expected [{self.world_size}, ...]")
        if not self._usable("all_to_all"):
            return x
        mine = x.detach().contiguous()
        result = torch.empty_like(mine)
        self._run("all_to_all", lambda: dist.all_to_all_single(result, mine))
        return result

    def barrier(self) -> None:
        if self._usable("barrier"):
            self._run("barrier", dist.barrier)

    def close(self) -> None:
        if self._error is None:
            self._error = CollectiveError("close", "the collectives are closed")
        if self._open:
            self._open = False
            dist.destroy_process_group()

    def _usable(self, operation: str) -> bool:
        """False in a gang of one. Raises when an earlier collective failed or after `close`."""
        if self._error is not None:
            error = self._error
            raise CollectiveError(operation, f"not possible since {error}", error.missing_ranks) from error
        return self._open

    def _run(self, operation: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            missing = self._find_missing()
            found = f"missing ranks {missing}: " if missing else ""
            self._error = CollectiveError(operation, f"{found}{error}", missing)
            raise self._error from error

    def _find_missing(self) -> list[int]:
        """The ranks that do not report a failure, too, within the grace; rank 0 when the store went with it."""
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _GRACE_S
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"failed/{self.rank}", "")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([f"failed/{rank}"])]
                time.sleep(0.02)
        except RuntimeError:
            missing = [0]
        return missing
