"""The soak's clients over a simulated engine: they find answers right that are, and notice one that is not."""

import asyncio
from collections.abc import Iterator

import pytest

from actors.messages import TokenLogprobs
from configs.engine import EngineConfig, parse_config
from deployments.renderer.checkpoint import load_checkpoint
from tests.soak.talk import WAYS, Talk
from tests.support.simulated_stack import QuickRank, SimulatedStack, wait_until

CONFIG = {
    "model": {"max_model_len": 1024},
    "kv_cache": {"num_blocks": 96},
    "encoder_cache": {"block_size": 16, "num_blocks": 24},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 256},
}


class Lying(QuickRank):
    """Right until told otherwise; then every seventh token is another."""

    lies = False
    drawn = 0

    def _compute(self, *arguments) -> TokenLogprobs | None:
        token = super()._compute(*arguments)
        if token is None or not self.lies:
            return token
        self.drawn += 1
        return TokenLogprobs(token_id=8 - token.token_id, logprob=-1.0) if self.drawn % 7 == 0 else token


@pytest.fixture
def stack() -> Iterator[SimulatedStack]:
    with SimulatedStack(parse_config(CONFIG), load_checkpoint(EngineConfig()), Lying) as stack:
        yield stack


def run(talk: Talk, seconds: float) -> None:
    async def run() -> None:
        until = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, until.set)
        await talk.run(6, until)

    asyncio.run(run())


@pytest.mark.slow
def test_wrong_answers_and_errors_are_noticed_and_right_ones_are_right(stack: SimulatedStack) -> None:
    talk = Talk(stack.url, seed=0, conversations=3)
    asyncio.run(talk.prepare())
    run(talk, 2.0)
    assert set(talk.tally.counts) == set(WAYS)
    assert (talk.tally.wrong, talk.tally.errors) == ([], [])
    wait_until(lambda: not stack.scheduler.requests, what="the end of those whose client left")

    stack.gang.rank.lies = True
    run(talk, 1.0)
    assert talk.tally.wrong
    assert "instead of" in talk.tally.wrong[0]

    stack.renderer.check_model = None  # type: ignore[method-assign,assignment]
    run(talk, 0.2)
    assert any("HTTP 500" in error for error in talk.tally.errors)
