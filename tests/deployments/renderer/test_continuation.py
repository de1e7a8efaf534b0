"""A request goes on behind what its client has, whichever engines are lost under it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.messages import EngineOutput, EngineRequest, SamplingParams
from deployments.renderer import continuation
from deployments.renderer.continuation import follow
from deployments.renderer.engine_client import EngineLostError, EngineUnavailableError
from tests.deployments.renderer.fake_engine import FakeEngine, finish, tokens
from tests.deployments.scheduler.simulation import make_config, make_request, reference_output, text

LOST = EngineLostError("lost")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(continuation, "LONGEST_PAUSE_S", 0.01)


def engine_of(*scripts: Callable[[EngineRequest], list]) -> FakeEngine:
    """One script for each time that the request is sent; the last one again and again."""
    engine = FakeEngine()
    engine.script = lambda request: scripts[min(len(engine.requests), len(scripts)) - 1](request)
    return engine


def read(engine: FakeEngine, request: EngineRequest, wait_s: float = 5, renew: Any = None) -> list[EngineOutput]:
    async def collect() -> list[EngineOutput]:
        return [output async for output in follow(engine, request, wait_s, renew)]

    return asyncio.run(collect())


def test_what_was_streamed_is_kept_and_sent_along() -> None:
    engine = engine_of(
        lambda request: [tokens(request, 5, num_cached_tokens=16), tokens(request, 6, 7), LOST],
        lambda request: [LOST],
        lambda request: [tokens(request, 8, num_cached_tokens=32), finish(request, stop_token_id=0)],
    )
    request = make_request("r", *text(3), mm_cache_queries=2, mm_cache_hits=1)
    outputs = read(engine, request)
    assert [token for output in outputs for token in output.token_ids] == [5, 6, 7, 8]
    assert outputs[-1].finish_reason == "stop"
    # What the first engine found cached of the prompt is what was cached.
    assert [output.num_cached_tokens for output in outputs] == [16, 0, 0, 0]
    first, second, third = engine.requests
    assert first is request
    assert second.output_token_ids == third.output_token_ids == (5, 6, 7)
    assert len({each.request_id for each in engine.requests}) == 3
    assert third.sampling is request.sampling
    assert (third.mm_cache_queries, third.mm_cache_hits) == (0, 0)


def test_the_first_engine_that_gets_anywhere_says_what_was_cached() -> None:
    engine = engine_of(
        lambda request: [LOST],
        lambda request: [tokens(request, 8, num_cached_tokens=32), finish(request)],
    )
    assert read(engine, make_request("r", 1))[0].num_cached_tokens == 32


def test_an_engine_that_stopped_is_one_that_is_lost() -> None:
    engine = engine_of(
        lambda request: [tokens(request, 5), finish(request, "error", error="it stopped", error_status=503)],
        lambda request: [tokens(request, 6)],  # ends without a last word
        lambda request: [finish(request, "length")],
    )
    outputs = read(engine, make_request("r", 1))
    assert [output.token_ids for output in outputs] == [(5,), (6,), ()]
    assert engine.requests[-1].output_token_ids == (5, 6)


@pytest.mark.parametrize("status", [400, 429, 500])
def test_what_an_engine_refuses_it_does_not_get_again(status: int) -> None:
    engine = engine_of(lambda request: [finish(request, "error", error="no", error_status=status)])
    (output,) = read(engine, make_request("r", 1))
    assert output.error_status == status
    assert len(engine.requests) == 1


def test_it_waits_for_an_engine_up_to_a_limit() -> None:
    engine = engine_of(lambda request: [tokens(request, 5), LOST], lambda request: [LOST])
    got: list[EngineOutput] = []

    async def collect() -> None:
        async for output in follow(engine, make_request("r", 1), 0.1):
            got.append(output)

    with pytest.raises(EngineUnavailableError):
        asyncio.run(asyncio.wait_for(collect(), 5))
    assert [output.token_ids for output in got] == [(5,)]
    assert len(engine.requests) > 3


def test_whoever_leaves_aborts_the_attempt_at_hand() -> None:
    engine = engine_of(lambda request: [LOST], lambda request: [tokens(request, 5), 60.0])

    async def leave() -> None:
        outputs = follow(engine, make_request("r", 1), 5)
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(asyncio.wait_for(leave(), 5))
    assert engine.aborted == ["r~1"]


def test_lost_pixels_are_made_anew() -> None:
    def lost(request: EngineRequest) -> list:
        return [finish(request, "error", error="lost", error_status=503, lost_mm_hashes=("b",))]

    async def renew(mm_hash: str, reference: Any) -> str:
        assert (mm_hash, reference) == ("b", "old")
        return "new"

    engine = engine_of(lost, lambda request: [finish(request)])
    request = make_request("r", ("a", 4), ("b", 4), pixels={"a": "old", "b": "old"})
    assert read(engine, request, renew=renew)[-1].finish_reason == "stop"
    assert engine.requests[-1].pixels == {"a": "old", "b": "new"}
    assert request.pixels == {"a": "old", "b": "old"}  # of its siblings, too


@pytest.mark.parametrize("cut", range(1, 6))
def test_the_scheduler_goes_on_where_another_one_was_lost(cut: int) -> None:
    """Against the simulated rank: the same tokens, the same end, whatever the limits count from."""
    from tests.deployments.scheduler.simulation import Simulation

    config = make_config()
    sampling = SamplingParams(max_tokens=6, min_tokens=5, stop_token_ids=tuple(range(9)))
    request = make_request("r", *text(5), ("a", 4), *text(3), sampling=sampling, pixels={"a": None})
    whole, reason = reference_output(request, config.model.max_model_len)
    assert (len(whole), reason) == (5, "stop")
    simulation = Simulation(config)
    continued = continuation._behind(request, whole[:cut], request.pixels, 1)
    simulation.add(continued)
    simulation.drain()
    assert simulation.tokens(continued.request_id) == whole[cut:]
    outputs = simulation.outputs[continued.request_id]
    assert outputs[-1].finish_reason == reason
    assert sum(output.num_cached_tokens for output in outputs) == 0
    # The engine that began it has counted its prompt, its prefix and its images.
    stats = simulation.scheduler.take_stats()
    assert (stats.prompt_tokens, stats.prefix_queries, stats.encoder.queries) == (0, 0, 0)
    assert stats.generation_tokens == len(whole) - cut + 1  # and the one that ended it
