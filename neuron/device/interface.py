"""The interface of a device."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Graph = Callable[..., Any]
"""A function of fixed-shape tensors, which may write some of them in place."""


class Device(Protocol):
    """Where a rank's tensors live and how its graphs run."""

    torch_device: torch.device
    """Of weights, caches and graph inputs."""

    def place(self, inputs: T) -> T:
        """Move a graph's inputs to the device: a tensor, or (nested) tuples of them. What is there already stays."""
        ...

    def fetch(self, x: Tensor) -> Tensor:
        """A result on the host. Waits for the graph that makes it."""
        ...

    def run(self, name: str, graph: Graph, *inputs: Any) -> Any:
        """Execute a graph, compiled first when it is new. Buffers that it writes in place are written when it returns,
        or before anything that reads them. `name`: its bucket's."""
        ...

    def wait(self) -> None:
        """Return when every graph that was run has ended."""
        ...

    def num_compilations(self) -> int:
        """Graphs compiled in this process so far; where nothing is compiled, different shapes seen."""
        ...
