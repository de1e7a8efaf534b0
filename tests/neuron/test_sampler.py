"""The sampler against straightforward references."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.messages import SamplingParams
from neuron.sampler import SamplerError, SamplingRow, sample, uniform

VOCAB = 40
SAMPLING_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 3),
        "top_k": st.integers(0, VOCAB + 3),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 3),
        "min_tokens": st.integers(0, 8),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def make_row(position: int = 0, prompt: Any = (), output: Any = (), **params: Any) -> SamplingRow:
    return SamplingRow(
        SamplingParams(max_tokens=100, **params), position, np.array(prompt, np.int64), np.array(output, np.int64)
    )


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference_probabilities(logits: torch.Tensor, params: SamplingParams, prompt: Any, output: Any) -> list[float]:
    """The filtered distribution, token by token as the parameters are documented."""
    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        if token in prompt or token in output:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * list(output).count(token)
        scores[token] -= params.presence_penalty * (token in output)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            scores[token] = -math.inf
    top = max(scores)
    weights = {token: math.exp((score - top) / params.temperature) for token, score in enumerate(scores)}
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p and weight > 0}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if kept and before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]
    return [weights[token] / before if token in kept else 0.0 for token in range(len(scores))]


FILTERS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (0, 3, 17, 5000)},
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    prompt, output = [1, 2, 3, 3, 9999], [4, 4, 4, 5, 6]
    logits = make_logits(1)
    rows = [make_row(position, prompt, output, seed=7, **FILTERS[name]) for position in range(4000)]
    tokens = [each.token_id for each in sample(logits.expand(len(rows), -1), rows)]
    expected = np.array(reference_probabilities(logits[0], rows[0].params, prompt, output)) * len(rows)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Chi-square, with the cells that expect few draws as one. Fixed seeds: this either holds or doesn't.
    rare = (expected > 0) & (expected < 8)
    cells = [*zip(counts[expected >= 8], expected[expected >= 8], strict=True)]
    if expected[rare].sum() > 0:
        cells.append((counts[rare].sum(), max(expected[rare].sum(), 1.0)))
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


@settings(max_examples=150, deadline=None)
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
    token = sample(logits, [row])[0].token_id
    expected = np.array(reference_probabilities(logits[0], row.params, prompt, output))
    for eps in (-1e-9, 1e-9):
        # Where a filter's edge is a matter of rounding, either side is right.
        moved = msgspec.structs.replace(row.params, top_p=row.params.top_p + eps, min_p=row.params.min_p + eps)
        kept = np.array(reference_probabilities(logits[0], moved, prompt, output)) > 0
        assume((kept == (expected > 0)).all())
    order = sorted(range(VOCAB), key=lambda each: (-expected[each], each))
    end = float(np.cumsum(expected[order])[order.index(token)])
    assert expected[token] > 0
    assert end - expected[token] - 1e-9 <= uniform(seed, position) <= end + 1e-9


def mixed_rows(count: int) -> list[SamplingRow]:
    kinds = [{"temperature": 0.0}, *FILTERS.values(), {"temperature": 0.0, "repetition_penalty": 1.5}]
    return [
        make_row(i, [i, 2, 3], [i % VOCAB, 5, 5], seed=i * 31, logprobs=(None, 0, 4)[i % 3], **kinds[i % len(kinds)])
        for i in range(count)
    ]


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    for vocab in (VOCAB, 5003):
        rows = mixed_rows(48)
        logits = make_logits(len(rows), vocab)
        together = sample(logits, rows)
        assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
        assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_the_seed_and_the_position_decide() -> None:
    logits = make_logits(1).expand(300, -1)
    first = sample(logits, [make_row(i, seed=3) for i in range(300)])
    assert sample(logits, [make_row(i, seed=3) for i in range(300)]) == first
    assert sample(logits, [make_row(i, seed=4) for i in range(300)]) != first
    assert len({each.token_id for each in first}) > 5


def test_the_random_numbers_stay_what_they_are() -> None:
    """Another replica, perhaps of another version, must continue a request with the same draws."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-1, 2**40)] == PINNED
    numbers = [uniform(5, position) for position in range(2000)]
    assert 0 <= min(numbers) < 0.01 < 0.99 < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.02


PINNED = [0.011546754286331562, 0.3035680343067586, 0.8133540609793564, 0.8277035787776519]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [30, 7, 12]] = 1.5
    assert [each.token_id for each in sample(logits, [make_row(temperature=0.0)] * 2)] == [7, 0]
    assert sample(logits, [make_row(temperature=0.0), make_row(temperature=1.0, top_k=1)])[1].token_id == 0
    penalized = make_row(temperature=0.0, output=[7], presence_penalty=0.1)
    assert sample(logits, [penalized] * 2)[0].token_id == 12


def test_greedy_applies_penalties_and_min_tokens() -> None:
    logits = make_logits(20)
    for params in FILTERS.values():
        row = make_row(prompt=[1, 2, 3], output=[4, 4, 5], **{**params, "temperature": 0.0})
        reference = SamplingParams(max_tokens=1, **{**params, "temperature": 1.0, "top_k": 1})
        for i, drawn in enumerate(sample(logits, [row] * 20)):
            assert reference_probabilities(logits[i], reference, [1, 2, 3], [4, 4, 5])[drawn.token_id] == 1


def test_stop_tokens_come_back_after_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 50
    for outputs, expected in ((0, 0), (4, 0), (5, 3), (6, 3)):
        row = make_row(output=[9] * outputs, temperature=0.0, min_tokens=5, stop_token_ids=(3,))
        assert sample(logits, [row])[0].token_id == expected
    with pytest.raises(SamplerError, match="row 0: min_tokens 5 masks every token"):
        sample(logits, [make_row(min_tokens=5, stop_token_ids=tuple(range(VOCAB)))])


def test_filters_hold_over_a_vocabulary_larger_than_the_sorted_head() -> None:
    """The draw reaches beyond the first thousands of candidates, and finds what a full sort finds."""
    logits = make_logits(1, 60_000, spread=0.3)
    probabilities = torch.softmax(logits[0].double(), 0)
    order = torch.sort(probabilities, descending=True, stable=True).indices
    cumulated = probabilities[order].cumsum(0)
    for top_p in (1.0, 0.5, 0.01):
        kept = cumulated[: int((cumulated < top_p).sum()) + 1] if top_p < 1 else cumulated
        rows = [make_row(position, seed=1, top_p=top_p) for position in range(30)]
        for position, drawn in enumerate(sample(logits.expand(30, -1), rows)):
            wanted = int(torch.searchsorted(kept, torch.tensor(uniform(1, position)) * kept[-1], right=True))
            assert drawn.token_id == int(order[wanted])


def test_logprobs_are_the_raw_log_softmax() -> None:
    logits = make_logits(6, 500)
    logits[0, 100:110] = logits[0].max()
    expected = torch.log_softmax(logits.double(), dim=1)
    rows = [make_row(i, [1], [2], logprobs=i * 3, temperature=0.4 * i, repetition_penalty=1.2) for i in range(6)]
    for i, drawn in enumerate(sample(logits, rows)):
        assert drawn.logprob == pytest.approx(float(expected[i, drawn.token_id]), abs=1e-6)
        order = sorted(range(500), key=lambda token: (-float(logits[i, token]), token))[: i * 3]
        assert [token for token, _ in drawn.top] == order
        scores = [float(expected[i, token]) for token in order]
        assert [score for _, score in drawn.top] == pytest.approx(scores, abs=1e-6)
    assert len(sample(logits[:, :4], [make_row(logprobs=20)] * 6)[0].top) == 4
    assert sample(logits[:1], [make_row(logprobs=None)])[0].top == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float) -> None:
    logits = make_logits(4)
    logits[2, 11] = value
    with pytest.raises(SamplerError, match="row 2: logit of token 11 is") as caught:
        sample(logits, [make_row(temperature=temperature)] * 4)
    assert caught.value.row == 2


def test_a_call_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(SamplerError, match=r"shape \(2, 40\): expected \[1, vocab\]"):
        sample(make_logits(2), [make_row()])
    with pytest.raises(SamplerError, match=r"expected torch\.float32"):
        sample(make_logits(1).bfloat16(), [make_row()])
    assert sample(make_logits(0), []) == []


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
        row = make_row(prompt=[0, 1, -7], output=[1, 10**9], **params)
        assert 0 <= sample(logits, [row])[0].token_id < VOCAB
        assert torch.isfinite(logits).all()
