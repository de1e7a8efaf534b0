"""When a gang that fails is started once more, and when not."""

import pytest

from actors.step_channel import RankFailure
from deployments.scheduler.crash_loop import MAX_FAILURES, CrashLoop, start_patiently


def test_three_failures_within_a_minute_of_work_are_the_end() -> None:
    loop = CrashLoop(now=0)
    assert not loop.failed(1000)
    loop.restarted(1010)
    assert not loop.failed(1030)
    loop.restarted(1500)  # however long a restart takes
    assert loop.failed(1520)


def test_restarts_that_fail_count_and_take_no_time_of_work() -> None:
    loop = CrashLoop(now=0)
    assert not loop.failed(5)
    assert not loop.failed(300)
    assert loop.failed(600)


def test_what_is_served_in_between_starts_the_count_anew() -> None:
    loop = CrashLoop(now=0)
    for now in range(0, 100, 2):
        assert not loop.failed(now)
        loop.restarted(now + 1)
        loop.served()


def test_failures_that_are_far_apart_are_no_loop() -> None:
    loop = CrashLoop(now=0)
    for now in range(0, 1000, 40):
        assert not loop.failed(now + 31)
        loop.restarted(now + 40)


def test_a_request_that_is_given_up_takes_the_blame_once() -> None:
    loop = CrashLoop(now=0)
    assert [loop.failed(now, given_up=now == 3) for now in (1, 2, 3)] == [False] * 3
    assert [loop.failed(now, given_up=now == 6) for now in (4, 5, 6)] == [False, False, True]


def test_a_start_is_tried_three_times() -> None:
    failures: list[RankFailure] = []
    outcomes = [RankFailure(1, "died")] * 2

    def start() -> None:
        if outcomes:
            raise outcomes.pop()

    start_patiently(start, failures.append)
    assert len(failures) == 2
    outcomes += [RankFailure(1, "died")] * MAX_FAILURES
    with pytest.raises(RankFailure):
        start_patiently(start, failures.append)
    outcomes += [ValueError()]  # type: ignore[list-item]
    with pytest.raises(ValueError):  # noqa: PT011
        start_patiently(start, failures.append)
    assert len(failures) == 4
