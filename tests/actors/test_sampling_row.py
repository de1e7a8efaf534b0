"""What a rank gives the sampler, and to a decode step, of a request: no more than is read, and nothing less."""

from typing import Any

import numpy as np
import pytest
import torch

from actors.messages import NewRequest, SamplingParams
from actors.model_runner import _sampling_row
from actors.rank_request import RankRequest
from neuron.sampler import SamplingRow, sample

VOCABULARY = 12


def request(num_prompt: int, tokens: list[int], **params: Any) -> RankRequest:
    new = NewRequest(
        request_id="r",
        token_ids=tuple(tokens),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        block_ids=(5, 2),
        sampling=SamplingParams(max_tokens=100, **params),
    )
    rope = np.stack([np.arange(6), np.arange(6) * 2, np.arange(6) * 3])
    return RankRequest.from_message(new, rope, rope_delta=-2)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 2.0, "temperature": 0.0},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 4.0, "temperature": 0.0},
        {"min_tokens": 4, "stop_token_ids": (1, 2, 3, 4, 5), "temperature": 0.0},
        {"min_tokens": 5, "stop_token_ids": (1, 2, 3, 4, 5), "temperature": 0.0},
        {"repetition_penalty": 0.5, "min_tokens": 9, "stop_token_ids": (7,), "logprobs": 3},
    ],
)
def test_draws_as_with_all_tokens(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        tokens = [int(token) for token in rng.integers(0, VOCABULARY, 9)]
        one = request(5, tokens, seed=seed, **params)
        whole = SamplingRow(
            params=one.sampling,
            position=9,
            prompt_token_ids=np.array(tokens[:5]),
            output_token_ids=np.array(tokens[5:]),
        )
        logits = torch.from_numpy(rng.normal(size=(1, VOCABULARY)).astype(np.float32))
        assert sample(logits, [_sampling_row(one)]) == sample(logits, [whole])


def test_tokens_that_nothing_reads_are_not_copied() -> None:
    row = _sampling_row(request(5, list(range(9)), temperature=0.7, top_p=0.9))
    assert len(row.prompt_token_ids) == len(row.output_token_ids) == 0


@pytest.mark.parametrize("position", range(9))
def test_one_position_is_that_of_many(position: int) -> None:
    one = request(6, list(range(9)))
    place = np.empty(3, np.int64)
    place[:] = one.rope_position(position)
    assert place.tolist() == one.rope_positions(position, position + 1)[:, 0].tolist()
