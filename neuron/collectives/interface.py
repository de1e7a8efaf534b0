"""The interface of the collectives, and the one error they end with."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class CollectiveError(RuntimeError):
    """A collective did not complete. The object that raised it is broken: every later call raises, too.

    operation: the collective's name, e.g. "all_reduce".
    missing_ranks: the ranks that died, left or did not arrive in time; empty where that is not the cause.
    """

    def __init__(self, operation: str, reason: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason
        self.missing_ranks = tuple(missing_ranks)

    def __reduce__(self) -> tuple[type["CollectiveError"], tuple[str, str, tuple[int, ...]]]:
        return type(self), (self.operation, self.reason, self.missing_ranks)


class Collectives(Protocol):
    """What the ranks of one gang do together.

    Every rank makes the same calls in the same order, with tensors of the same shape and dtype, from one thread.
    Inputs may be non-contiguous and are not changed. Results are contiguous and new, except that a gang of one may
    get its input back. A call either completes or raises CollectiveError within the timeout.
    """

    rank: int
    world_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, of x's shape and dtype, bitwise identical on every rank."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors concatenated along `dim` in rank order: dimension `dim` is world_size times x's."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [world_size, ...]: slot i goes to rank i. Result [world_size, ...]: slot j came from rank j."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def close(self) -> None:
        """Leave the gang, free what it holds. Peers that wait for this rank get a CollectiveError. Idempotent."""
        ...
