"""What the seam promises, on the XLA device: buffers written in place, one program per shape, no hidden reads."""

import pytest
import torch

from neuron.device import create_device
from neuron.device.graphs import Graphs
from neuron.sample_graph import GRAPHS, prepare
from neuron.sampler import sample
from tests.neuron.device.test_devices import add_rows, make_inputs
from tests.neuron.test_sampler import VOCAB, make_logits, mixed_rows

pytestmark = pytest.mark.xla


def test_a_graph_writes_its_buffer_in_place_and_a_new_shape_is_told() -> None:
    device, told = create_device("neuron"), []  # type: ignore[var-annotated]
    graphs = Graphs(device, told.append)
    buffer = device.place(torch.zeros(8, 2))
    assert device.fetch(graphs.run("add/2", add_rows, buffer, make_inputs(2))) == 4
    graphs.end_warm_up()
    for total in (8, 12):
        assert device.fetch(graphs.run("add/2", add_rows, buffer, make_inputs(2))) == total
    assert told == []
    assert device.fetch(buffer)[:3].tolist() == [[3, 3], [3, 3], [0, 0]]
    graphs.run("add/2", add_rows, buffer, make_inputs(4))
    assert told == ["add/2"]


def test_a_graph_that_would_be_two_is_an_error() -> None:
    device = create_device("neuron")
    with pytest.raises(RuntimeError, match="Unexpected execution happens inside the compiled function"):
        device.run("reads", lambda x: x + 1 if x.sum() > 0 else x, device.place(torch.ones(2)))


def test_the_sample_graph_draws_what_the_host_draws() -> None:
    device = create_device("neuron")
    rows = mixed_rows(24)
    logits = make_logits(len(rows))
    call = prepare(rows, len(rows), VOCAB, VOCAB)
    assert call is not None
    assert call.kind == "sample_penalties"
    tokens, usable = device.run("sample", GRAPHS[call.kind], *device.place((logits, *call.inputs)))
    assert device.fetch(usable).all()
    assert device.fetch(tokens).tolist() == [each.token_id for each in sample(logits, rows)]
