"""The seam: what a device promises to the layers above, and how a new shape is noticed."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from configs.engine import ROOT, ConfigError
from neuron.device import KINDS, create_device
from neuron.device.cpu import CpuDevice
from neuron.device.graphs import Graphs


class Inputs(NamedTuple):
    rows: torch.Tensor
    pair: tuple[torch.Tensor, torch.Tensor | None]


def add_rows(buffer: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    buffer.index_add_(0, inputs.rows, inputs.pair[0])
    return buffer.sum()


def make_inputs(count: int) -> Inputs:
    return Inputs(torch.arange(count), (torch.ones(count, 2), None))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_graph_writes_its_buffer_and_a_new_shape_is_told(compiler: str | None) -> None:
    torch.compiler.reset()
    told: list[str] = []
    device = CpuDevice(compiler)
    graphs = Graphs(device, told.append)
    buffer = torch.zeros(8, 2)
    assert device.fetch(graphs.run("add/2", add_rows, buffer, make_inputs(2))) == 4
    assert graphs.run("add/3", add_rows, buffer, make_inputs(3)) == 10
    graphs.end_warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert graphs.run("add/2", add_rows, buffer, make_inputs(2)) == 14
    assert told == []
    assert device.num_compilations() == 2
    graphs.run("add/2", add_rows, buffer, make_inputs(4))
    assert told == ["add/2"]
    assert buffer[3, 0] == 1


def test_every_registered_device_has_its_module() -> None:
    assert isinstance(create_device("cpu"), CpuDevice)
    for kind in KINDS.values():
        assert (ROOT / (kind.module.replace(".", "/") + ".py")).exists()


def test_the_neuron_device_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigError, match="install torch-neuronx from AWS's package index"):
        create_device("neuron")


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, neuron.device; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "False"
