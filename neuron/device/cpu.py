"""The CPU: graphs are called as they are."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from neuron.device.interface import Graph

T = TypeVar("T")


class CpuDevice:
    """Implements `Device`. Nothing is compiled: a shape that was not seen before counts as a compilation.

    compiler: a backend of torch.compile, for tests: graphs are then compiled without breaks, each shape once.
    """

    torch_device = torch.device("cpu")

    def __init__(self, compiler: str | None = None) -> None:
        self._compiler = compiler
        self._compiled: dict[Graph, Callable[..., Any]] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def place(self, inputs: T) -> T:
        return inputs

    def fetch(self, x: Tensor) -> Tensor:
        return x

    def run(self, name: str, graph: Graph, *inputs: Any) -> Any:
        self._seen.add((name, *_shapes(inputs)))
        if self._compiler is not None:
            if graph not in self._compiled:
                self._compiled[graph] = torch.compile(graph, fullgraph=True, dynamic=False, backend=self._compiler)
            graph = self._compiled[graph]
        return graph(*inputs)

    def wait(self) -> None:
        pass

    def num_compilations(self) -> int:
        return len(self._seen)


def _shapes(inputs: tuple[Any, ...]) -> list[torch.Size]:
    """Of the tensors in nested tuples."""
    shapes: list[torch.Size] = []
    for each in inputs:
        if isinstance(each, Tensor):
            shapes.append(each.shape)
        elif isinstance(each, tuple):
            shapes += _shapes(each)
    return shapes


def create(cache_dir: str | None) -> CpuDevice:
    return CpuDevice()
