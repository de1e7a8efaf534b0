"""TokenSampler: draws a step's tokens from its logits, on the host or by the device's sample graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.plan import EnginePlan, bucket_size
from actors.rank_metrics import RankMetrics
from neuron.device.graphs import Graphs
from neuron.device.interface import Device
from neuron.sample_graph import GRAPHS, empty_changes, empty_inputs, prepare
from neuron.sampler import SampledToken, SamplingRow, sample, with_logprobs


class TokenSampler:
    """One rank's, for one engine plan."""

    def __init__(self, plan: EnginePlan, device: Device, graphs: Graphs, rank_metrics: RankMetrics) -> None:
        self._device = device
        self._graphs = graphs
        self._metrics = rank_metrics
        self._in_graphs = plan.kind.samples
        self._vocab_size = plan.memory.model.vocab_size
        self._num_changes = plan.num_logit_changes

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """A token for each of `rows`. logits [S, vocab] float32 on the device, the first of them the rows'.

        Raises SamplerError for a row that cannot be sampled.
        """
        if self._in_graphs and (tokens := self._draw_in_graph(logits, rows)) is not None:
            if all(row.params.logprobs is None for row in rows):
                return [SampledToken(token, 0.0) for token in tokens]
            return with_logprobs(tokens, self._device.fetch(logits)[: len(rows)], rows)
        return sample(self._device.fetch(logits)[: len(rows)], rows)

    def _draw_in_graph(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int] | None:
        """None: the host must draw, or say which row cannot be sampled."""
        size = logits.shape[0]
        call = prepare(rows, size, self._vocab_size, self._num_changes)
        if call is None:
            return None
        name = f"{call.kind}/{size}"
        self._metrics.ran(name)
        tokens, usable = self._graphs.run(name, GRAPHS[call.kind], logits, *call.inputs)
        if not bool(self._device.fetch(usable)[: len(rows)].all()):
            return None
        drawn: list[int] = self._device.fetch(tokens)[: len(rows)].tolist()
        return drawn

    def warm_up(self, bucket_name: str) -> None:
        """Run a sample graph on padding alone."""
        size = bucket_size(bucket_name)
        inputs = empty_inputs(size, self._vocab_size)
        changes = empty_changes(size, self._vocab_size, self._num_changes)
        logits = torch.zeros(size, self._vocab_size)
        if bucket_name.startswith("sample_greedy/"):
            self._graphs.run(bucket_name, GRAPHS["sample_greedy"], logits)
        elif bucket_name.startswith("sample/"):
            self._graphs.run(bucket_name, GRAPHS["sample"], logits, inputs)
        else:
            self._graphs.run(bucket_name, GRAPHS["sample_penalties"], logits, inputs, changes)
