"""The engine's loop over a simulated rank: it sleeps while there is nothing to do, and wakes in time."""

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from actors.messages import EngineOutput, EngineRequest, RankOutput, SamplingParams, SchedulerOutput
from actors.step_channel import RankFailure
from configs.engine import EngineConfig
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import MAX_FAILED_STEPS, Scheduler
from deployments.scheduler.stats import EngineStats
from tests.deployments.scheduler.simulation import FakeRank, make_config, make_request, text

HOLD_S = 0.4
CONFIG = make_config(encoder_cache__min_hold_time_ms=HOLD_S * 1000)


class FakeGang:
    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.rank = FakeRank(config)
        self.restarts: list[RankFailure | None] = []
        """What the restarts to come raise; none are to come: nothing."""
        self.num_restarts = 0
        self.fails_with: str | None = None
        """A request in whose steps a rank fails."""
        self.bug: Exception | None = None

    def step(
        self,
        output: SchedulerOutput,
        pixels: dict[str, Any],
        items: list[tuple[str, int]],
        meanwhile: Callable[[], None],
    ) -> RankOutput:
        meanwhile()
        if self.bug is not None:
            raise self.bug
        if self.fails_with in output.num_scheduled_tokens:
            raise RankFailure(0, "raised")
        return RankOutput(step_id=output.step_id, rank=0, sampled=self.rank.run(output))

    def check(self) -> None: ...

    def restart(self) -> None:
        self.num_restarts += 1
        self.rank = FakeRank(CONFIG)
        failure = self.restarts.pop(0) if self.restarts else None
        if failure is not None:
            raise failure

    def shutdown(self) -> None: ...


class NoStats:
    """Leaves the counts where they are."""

    def ignore(self, *_: object) -> None: ...

    record_step = record_idle = record_arrival = log_if_due = ignore

    def __init__(self) -> None:
        self.restarts: list[str] = []
        self.ends: list[bool] = []
        """Of each request that ended: whether its times count."""

    def record_restart(self, failure: RankFailure) -> None:
        self.restarts.append(failure.kind)

    def record_end(self, timeline: object, at: float, counts: bool = True) -> None:
        self.ends.append(counts)


class Running:
    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.scheduler = Scheduler(config)
        self.gang = FakeGang(config)
        self.stats = NoStats()
        self.lost: set[str] = set()
        """mm_hashes of images whose pixels are lost."""
        self.engine = Engine(
            self.scheduler,
            self.gang,
            cast(EngineStats, self.stats),
            check_invariants=True,
            find_lost=lambda pixels: [mm_hash for mm_hash in pixels if mm_hash in self.lost],
        )
        self.finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ends: dict[str, EngineOutput] = {}
        self.engine.start()

    def submit(self, request: EngineRequest) -> None:
        self.engine.submit(request, self._take)

    def _take(self, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            self.ends[output.request_id] = output
            self.finished.put(output.request_id)

    def end_of(self, request_id: str) -> EngineOutput:
        """The last output of the request that ends next."""
        assert self.finished.get(timeout=5) == request_id
        return self.ends[request_id]


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


def test_a_request_that_fails_its_steps_is_given_up_and_the_others_are_served(running: Running):
    running.gang.fails_with = "bad"
    running.submit(make_request("bad", *text(9)))
    for index in range(3):  # the first two are computed in the bad one's step
        running.submit(make_request(f"good{index}", *text(3, first=index), max_tokens=1))
    for _ in range(4):
        running.finished.get(timeout=5)
    bad = running.ends.pop("bad")
    assert (bad.finish_reason, bad.error_status) == ("error", 500)
    assert {end.finish_reason for end in running.ends.values()} <= {"stop", "length"}
    assert running.gang.num_restarts == MAX_FAILED_STEPS
    assert not running.scheduler.requests


def test_a_request_that_goes_on_between_failures_is_not_given_up(running: Running):
    calls = 0

    def step(*arguments: Any) -> RankOutput:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise RankFailure(0, "died")
        return FakeGang.step(running.gang, *arguments)

    running.gang.step = step  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=3 * MAX_FAILED_STEPS)
    running.submit(make_request("r", *text(3), sampling=sampling))
    assert running.end_of("r").finish_reason == "length"
    assert running.gang.num_restarts > MAX_FAILED_STEPS


def test_a_step_is_told_while_the_next_one_runs_and_before_a_failed_one_is_computed_again(running: Running):
    """Each time the ranks have a step, its client has the tokens of all steps before it, failed ones apart."""
    told, known = [0], []
    step = running.gang.step

    def counting(output: SchedulerOutput, pixels: dict, items: list, meanwhile: Callable[[], None]) -> RankOutput:
        if len(known) == 4:
            known.append(-1)
            raise RankFailure(0, "died")  # before it was told of the fourth step
        answer = step(output, pixels, items, meanwhile)
        known.append(told[0])
        return answer

    def take(output: EngineOutput) -> None:
        told[0] += len(output.token_ids)
        running._take(output)

    running.gang.step = counting  # type: ignore[method-assign]
    running.engine.submit(make_request("r", *text(3), sampling=SamplingParams(max_tokens=7)), take)
    assert running.end_of("r").finish_reason == "length"
    assert known[:8] == [0, 1, 2, 3, -1, 4, 5, 6]  # and a step that frees what it held
    assert told == [7]


def test_a_restart_that_fails_is_tried_again(running: Running):
    failures = iter([RankFailure(0, "died")])
    step = running.gang.step

    def fails_once(*arguments: Any) -> RankOutput:
        for failure in failures:
            raise failure
        return step(*arguments)

    running.gang.step = fails_once  # type: ignore[method-assign]
    running.gang.restarts = [RankFailure(-1, "died during the start")]
    running.submit(make_request("r", *text(3)))
    assert running.end_of("r").finish_reason in ("stop", "length")
    assert running.gang.num_restarts == 2


@pytest.mark.parametrize("stopped", [True, False])
def test_an_engine_that_has_ended_says_so_to_whoever_waits_or_comes(stopped: bool):
    running = Running()
    running.submit(with_image("first", "a"))
    assert running.end_of("first").finish_reason == "length"
    running.submit(with_image("waits", "b"))  # for the end of the first one's hold window
    if stopped:
        running.engine.stop()
    else:
        running.gang.bug = ValueError("a bug")
        running.submit(make_request("meets it", *text(3)))
    waits = running.end_of("waits")
    assert (waits.finish_reason, waits.error_status) == ("error", 503)
    assert stopped or running.end_of("meets it").error_status == 503
    deadline = time.monotonic() + 5
    while running.engine.healthy and time.monotonic() < deadline:
        time.sleep(0.01)
    running.submit(make_request("comes", *text(3)))
    comes = running.end_of("comes")
    assert (comes.finish_reason, comes.error_status) == ("error", 503)
    with pytest.raises(RuntimeError, match="the engine"):
        running.engine.call(lambda scheduler: scheduler.reset_prefix_cache()).result(5)
    running.engine.abort("comes")
    assert not running.scheduler.requests


def fail_steps(running: Running, failures: list[RankFailure]) -> None:
    """The next steps end so; then all goes well."""
    step = running.gang.step

    def failing(*arguments: Any) -> RankOutput:
        if failures:
            raise failures.pop(0)
        return step(*arguments)

    running.gang.step = failing  # type: ignore[method-assign]


def test_one_line_says_who_failed_why_and_what_it_cost(running: Running, caplog: pytest.LogCaptureFixture):
    calls = 0
    step = running.gang.step

    def fails_at_the_third(*arguments: Any) -> RankOutput:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RankFailure(7, "raised in step 3: MemoryError", "raised", "Traceback ...")
        return step(*arguments)

    running.gang.step = fails_at_the_third  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=6)
    running.submit(make_request("r", *text(9), sampling=sampling))
    assert running.end_of("r").finish_reason == "length"
    (line,) = [record.getMessage() for record in caplog.records if "computed again" in record.getMessage()]
    assert line.startswith("rank 7 raised in step 3: MemoryError: gang restarted in ")
    assert line.endswith("computed again: 1 requests, 10 tokens; given up: 0 requests")
    assert running.stats.restarts == ["raised"]


@pytest.mark.parametrize("while_starting", [False, True])
def test_a_gang_that_fails_three_times_and_serves_nothing_is_given_up(while_starting: bool):
    running = Running()
    failures = [RankFailure(2, f"died the {n}. time") for n in range(1, 4)]
    if while_starting:
        fail_steps(running, failures[:1])
        running.gang.restarts = [failures[1], failures[2]]
        running.submit(make_request("r", *text(3)))
    else:  # with nothing to do, so that no request may be to blame
        running.gang.check = lambda: fail_all(failures)  # type: ignore[method-assign]
        running.engine.call(lambda scheduler: None)
    deadline = time.monotonic() + 5
    while running.engine.healthy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(running.engine.failure, RankFailure)
    assert "died the 3. time" in str(running.engine.failure)
    assert running.stats.restarts == ["died"] * 2
    if while_starting:
        end = running.end_of("r")
        assert (end.finish_reason, end.error_status) == ("error", 503)  # another engine may go on with it
        assert running.stats.ends == [False]


def fail_all(failures: list[RankFailure]) -> None:
    raise failures.pop(0)


def test_requests_that_get_the_blame_clear_the_gang_once():
    """The first request that fails three times may be at fault; when the next one fails as well it is the gang."""
    running = Running()
    fail_steps(running, [RankFailure(0, "raised", "raised")] * 100)
    ends = []
    for name in ("first", "second"):
        running.submit(make_request(name, *text(3)))
        ends.append(running.end_of(name))
    assert [(end.finish_reason, end.error_status) for end in ends] == [("error", 500)] * 2
    deadline = time.monotonic() + 5
    while running.engine.healthy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(running.engine.failure, RankFailure)
    assert len(running.stats.restarts) == 2 * MAX_FAILED_STEPS - 1


def test_lost_pixels_end_their_request_only_and_nothing_of_them_stays(running: Running):
    running.lost = {"b"}
    for name, mm_hash in (("good", "a"), ("bad", "b"), ("bad too", "b")):
        running.submit(make_request(name, *text(2), (mm_hash, 4), max_tokens=2, pixels={mm_hash: None}))
    for _ in range(3):
        running.finished.get(timeout=5)
    assert running.ends["good"].finish_reason in ("stop", "length")
    for name in ("bad", "bad too"):
        end = running.ends[name]
        assert (end.finish_reason, end.error_status, end.lost_mm_hashes) == ("error", 503, ("b",))
    assert running.gang.num_restarts == 0
    running.lost = set()
    request = make_request("bad~1", *text(2), ("b", 4), max_tokens=2, pixels={"b": None})
    running.submit(request)
    running.finished.get(timeout=5)
    assert running.ends["bad~1"].finish_reason in ("stop", "length")
    assert running.gang.rank.num_encoded >= 3  # "b" twice: what stood in for it was not used again


def test_a_request_without_its_pixels_is_refused_and_harms_nobody(running: Running):
    running.submit(make_request("half", *text(2), ("a", 4), ("b", 4), max_tokens=2, pixels={"a": None}))
    end = running.end_of("half")
    assert (end.error_status, end.lost_mm_hashes) == (503, ("b",))
    running.submit(with_image("whole", "a"))
    assert running.end_of("whole").finish_reason == "length"
