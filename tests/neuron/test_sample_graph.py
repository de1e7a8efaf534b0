"""The sampler's graphs against the sampler of the host: the same tokens, but for rounding at an edge."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from neuron.sample_graph import GRAPHS, empty_changes, empty_inputs, prepare
from neuron.sampler import SamplingRow, sample, uniform
from tests.neuron.test_sampler import (
    SAMPLING_PARAMS,
    TOKENS,
    VOCAB,
    make_logits,
    make_row,
    mixed_rows,
    reference_probabilities,
)


def draw(logits: torch.Tensor, rows: list[SamplingRow], size: int | None = None) -> list[int]:
    """Tokens of the graph that the rows need, run on `size` rows of which the last ones are padding."""
    size = size or len(rows)
    vocab = logits.shape[1]
    call = prepare(rows, size, vocab, num_changes=vocab)
    assert call is not None
    padded = torch.cat((logits, torch.zeros(size - len(rows), vocab)))
    tokens, usable = GRAPHS[call.kind](padded, *call.inputs)
    assert tokens.dtype == torch.int64
    assert usable[: len(rows)].all()
    return tokens[: len(rows)].tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 10_000),
    SAMPLING_PARAMS,
    TOKENS,
    TOKENS,
)
def test_every_draw_is_the_inverse_of_the_reference_distribution(
    seed: int, position: int, params: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    # Coarse logits, so that there are ties.
    logits = make_logits(1, seed=seed % 1000).mul(2).round().div(2)
    row = make_row(position, prompt, output, seed=seed, stop_token_ids=(1, 2), **params)
    token = draw(logits, [row])[0]
    expected = np.array(reference_probabilities(logits[0], row.params, prompt, output))
    rounding = 1e-5
    for eps in (-rounding, rounding):
        # Where a filter's edge is a matter of rounding, either side is right; so is either order of two near equals.
        moved = msgspec.structs.replace(row.params, top_p=row.params.top_p + eps, min_p=row.params.min_p * (1 + eps))
        kept = np.array(reference_probabilities(logits[0], moved, prompt, output)) > 0
        assume((kept == (expected > 0)).all())
    different = np.abs(np.subtract.outer(expected, expected))
    assume(not ((different > 0) & (different < rounding * expected[:, None])).any())
    order = sorted(range(VOCAB), key=lambda each: (-expected[each], each))
    end = float(np.cumsum(expected[order])[order.index(token)])
    assert expected[token] > 0
    assert end - expected[token] - rounding <= uniform(seed, position) <= end + rounding


@pytest.mark.parametrize("vocab", [VOCAB, 5003])
def test_the_graph_draws_what_the_host_draws(vocab: int) -> None:
    """Every filter: mixed, padded, and each row alone. Here no edge falls between float32 and float64."""
    rows = mixed_rows(48)
    logits = make_logits(len(rows), vocab)
    expected = [each.token_id for each in sample(logits, rows)]
    assert draw(logits, rows) == expected
    assert draw(logits, rows, size=64) == expected
    assert [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == expected


def test_rows_of_padding_may_hold_anything() -> None:
    rows = mixed_rows(24)
    logits = make_logits(32)
    expected = draw(logits[:24], rows)
    for rows_of_a_kind in (rows, [make_row(i) for i in range(24)], [make_row(temperature=0.0)] * 24):
        call = prepare(rows_of_a_kind, 32, VOCAB, VOCAB)
        assert call is not None
        clean, _ = GRAPHS[call.kind](logits, *call.inputs)
        poisoned = logits.clone()
        poisoned[24:] = float("nan")
        tokens, usable = GRAPHS[call.kind](poisoned, *call.inputs)
        assert torch.equal(tokens[:24], clean[:24])
        assert usable.tolist() == [True] * 24 + [False] * 8
    assert draw(logits[:24], rows) == expected


def test_each_kind_of_graph_is_chosen_by_what_the_rows_need() -> None:
    greedy, drawn, changed = make_row(temperature=0.0), make_row(), make_row(output=[1], presence_penalty=0.5)
    kinds = [prepare(rows, 4, VOCAB, VOCAB) for rows in ([greedy], [greedy, drawn], [greedy, drawn, changed])]
    assert [call and call.kind for call in kinds] == ["sample_greedy", "sample", "sample_penalties"]
    assert prepare([make_row(output=range(9), presence_penalty=0.5)], 4, VOCAB, num_changes=8) is None


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [30, 7, 12]] = 1.5
    assert draw(logits, [make_row(temperature=0.0)] * 2) == [7, 0]
    assert draw(logits, [make_row(temperature=0.0), make_row(temperature=1.0, top_k=1)]) == [7, 0]
    assert draw(logits, [make_row(temperature=0.0, output=[7], presence_penalty=0.1)] * 2)[0] == 12


def test_a_row_that_cannot_be_sampled_is_marked() -> None:
    logits = make_logits(3)
    logits[1, 11] = float("nan")
    rows = [make_row(), make_row(), make_row(min_tokens=5, stop_token_ids=tuple(range(VOCAB)))]
    call = prepare(rows, 3, VOCAB, VOCAB)
    assert call is not None
    assert GRAPHS[call.kind](logits, *call.inputs)[1].tolist() == [True, False, False]
    assert GRAPHS["sample_greedy"](logits)[1].tolist() == [True, False, True]


def test_extreme_parameters_draw_a_token() -> None:
    logits = make_logits(1, spread=30.0)
    logits[0, 0] = 1e30
    logits[0, 1] = -1e30
    for params in (
        {"temperature": 1.1e-5},
        {"temperature": 1e9},
        {"top_p": 1e-12},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300, "temperature": 2e-5},
        {"top_k": 10**9},
        {"seed": 2**64 - 1},
        {"seed": -5},
    ):
        assert 0 <= draw(logits, [make_row(prompt=[0, 1, -7], output=[1, 10**9], **params)])[0] < VOCAB


def test_filters_hold_over_a_large_vocabulary() -> None:
    """Each draw is where a full sort has it, within float32's rounding."""
    logits = make_logits(1, 60_000, spread=0.3)
    probabilities = torch.softmax(logits[0].double(), 0)
    order = torch.sort(probabilities, descending=True, stable=True).indices
    cumulated = probabilities[order].cumsum(0)
    for top_p in (1.0, 0.5, 0.01):
        kept = cumulated[: int((cumulated < top_p).sum()) + 1] if top_p < 1 else cumulated
        rows = [make_row(position, seed=1, top_p=top_p) for position in range(30)]
        for position, token in enumerate(draw(logits.expand(30, -1), rows)):
            end = float(cumulated[order == token]) / float(kept[-1])
            begin = end - float(probabilities[token]) / float(kept[-1])
            assert begin - 1e-5 <= uniform(1, position) <= end + 1e-5


def test_graphs_have_no_breaks_and_one_shape_compiles_once() -> None:
    torch.compiler.reset()
    padding = empty_inputs(4, VOCAB)
    for kind, inputs in (
        ("sample_greedy", ()),
        ("sample", (padding,)),
        ("sample_penalties", (padding, empty_changes(4, VOCAB, 16))),
    ):
        graph = torch.compile(GRAPHS[kind], fullgraph=True, dynamic=False, backend="aot_eager")
        graph(torch.zeros(4, VOCAB), *inputs)
        temperature = 0.0 if kind == "sample_greedy" else 0.5
        penalty = 0.4 if kind == "sample_penalties" else 0.0
        row = make_row(7, output=[3, 4], seed=3, temperature=temperature, presence_penalty=penalty)
        call = prepare([row], 4, VOCAB, 16)
        assert call is not None
        assert call.kind == kind
        with torch.compiler.set_stance("fail_on_recompile"):
            tokens, _ = graph(make_logits(4), *call.inputs)
        assert torch.equal(tokens, GRAPHS[kind](make_logits(4), *call.inputs)[0])
