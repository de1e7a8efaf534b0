"""NeuronCores, through torch_xla. It has not run on hardware; the tests run it on torch-xla's CPU device."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from neuron.device.interface import Graph
from neuron.device.xla_imports import import_xla

T = TypeVar("T")


class XlaDevice:
    """Implements `Device`: a graph is traced with lazy tensors at each call and executed as one program.

    Programs are looked up by what was traced, so that a bucket compiles once. Buffers written in place are inputs that
    are aliased to outputs. Tracing at each call costs the host more than torch.compile(backend="openxla") would, but it
    is what AWS documents for torch-neuronx on torch_xla, and how torch_xla's collectives become part of a graph.
    """

    def __init__(self, cache_dir: str | None = None) -> None:
        """cache_dir: a folder for compiled programs, where they are kept between processes."""
        self._xla = import_xla(cache_dir)
        self.torch_device = self._xla.torch_xla.device()
        self._programs: dict[str, Callable[..., Any]] = {}

    def place(self, inputs: T) -> T:
        if isinstance(inputs, Tensor):
            return cast(T, inputs.to(self.torch_device))
        if isinstance(inputs, tuple):
            placed = [self.place(each) for each in inputs]
            make: Any = type(inputs)
            return cast(T, make(*placed) if hasattr(inputs, "_fields") else make(placed))
        return inputs

    def fetch(self, x: Tensor) -> Tensor:
        return x.cpu()

    def run(self, name: str, graph: Graph, *inputs: Any) -> Any:
        if name not in self._programs:
            # full_graph: an error where the graph would read a value, and so become two.
            self._programs[name] = self._xla.torch_xla.compile(graph, full_graph=True, name=name)
        return self._programs[name](*inputs)

    def wait(self) -> None:
        self._xla.torch_xla.sync(wait=True)

    def num_compilations(self) -> int:
        recorded = self._xla.metrics.metric_data("CompileTime")
        return recorded[0] if recorded else 0


def create(cache_dir: str | None) -> XlaDevice:
    return XlaDevice(cache_dir)
