"""Graphs: runs graphs on a device and notices what was compiled after the warm-up."""

from collections.abc import Callable
from typing import Any

from neuron.device.interface import Device, Graph


class NewShapeError(RuntimeError):
    """A graph met a new shape after the warm-up: a bug, since the warm-up runs every bucket."""


class Graphs:
    """A rank's graphs by their bucket's name."""

    def __init__(self, device: Device, on_new_shape: Callable[[str], None]) -> None:
        """on_new_shape: called with the bucket's name when something was compiled after the warm-up."""
        self._device = device
        self._on_new_shape = on_new_shape
        self._warm = False

    def end_warm_up(self) -> None:
        """From here on a new shape is reported."""
        self._warm = True

    def run(self, name: str, graph: Graph, *inputs: Any) -> Any:
        """The graph's result, on the device. `inputs` may still be on the host."""
        before = self._device.num_compilations()
        result = self._device.run(name, graph, *self._device.place(inputs))
        if self._warm and self._device.num_compilations() != before:
            self._on_new_shape(name)
        return result
