"""The engine's loop over a simulated rank: it sleeps while there is nothing to do, and wakes in time."""

import queue
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from actors.messages import EngineOutput, EngineRequest, RankOutput, SchedulerOutput
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from tests.deployments.scheduler.simulation import FakeRank, make_config, make_request, text

HOLD_S = 0.4
CONFIG = make_config(encoder_cache__min_hold_time_ms=HOLD_S * 1000)


class FakeGang:
    def __init__(self) -> None:
        self.rank = FakeRank(CONFIG)

    def step(self, output: SchedulerOutput, pixels: dict[str, Any], items: list[tuple[str, int]]) -> RankOutput:
        return RankOutput(step_id=output.step_id, rank=0, sampled=self.rank.run(output))

    def check(self) -> None: ...
    def restart(self) -> None: ...
    def shutdown(self) -> None: ...


class NoStats:
    """Leaves the counts where they are."""

    def ignore(self, *_: object) -> None: ...

    record_step = record_idle = record_arrival = record_end = log_if_due = ignore


class Running:
    def __init__(self) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.engine = Engine(self.scheduler, FakeGang(), cast(EngineStats, NoStats()), check_invariants=True)
        self.finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.engine.start()

    def submit(self, request: EngineRequest) -> None:
        self.engine.submit(request, self._take)

    def _take(self, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            self.finished.put(output.request_id)


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.engine.stop()
    assert running.engine.failure is None


def with_image(request_id: str, mm_hash: str) -> EngineRequest:
    """Its image fills the encoder cache."""
    return make_request(request_id, *text(2), (mm_hash, 32), max_tokens=1, pixels={mm_hash: None})


def test_who_waits_for_a_hold_window_is_looked_up_a_few_times_only(running: Running):
    begin = time.monotonic()
    running.submit(with_image("first", "a"))
    running.submit(with_image("second", "b"))
    assert [running.finished.get(timeout=5) for _ in range(2)] == ["first", "second"]
    assert HOLD_S * 0.9 < time.monotonic() - begin < HOLD_S + 2
    assert running.scheduler.encoder_cache.stats.scheduler_queries < 20


def test_an_arrival_does_not_wait_for_the_hold_window_of_another(running: Running):
    running.submit(with_image("first", "a"))
    assert running.finished.get(timeout=5) == "first"
    running.submit(with_image("second", "b"))
    time.sleep(HOLD_S / 8)
    running.submit(make_request("text", *text(3), max_tokens=1))
    assert running.finished.get(timeout=5) == "text"
    assert running.finished.get(timeout=5) == "second"
