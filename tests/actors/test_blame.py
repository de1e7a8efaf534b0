"""Which rank is named when a step fails on some of them, and how soon."""

import time
from collections.abc import Callable

import msgspec
import pytest

from actors.messages import RankOutput, SchedulerOutput
from actors.plan import make_plan
from actors.rank_actor import missing_ranks
from actors.rank_group import RankGroup
from actors.step_channel import RankFailure
from configs.engine import parse_config

STEP = SchedulerOutput(step_id=7, clock=0.0, phase="decode")
TRACE = "Traceback (most recent call last):\n  File ...\nMemoryError: no room\n"


class Channel:
    """Answers that come in this order; then silence."""

    def __init__(self, *events: RankOutput | RankFailure) -> None:
        self.events = list(events)
        self.waited_for: list[int] = []

    def send(self, command: bytes) -> None:
        self.waited_for = [0, 1, 2, 3]

    def receive(self, timeout_s: float) -> bytes | None:
        if not self.events:
            time.sleep(min(timeout_s, 0.01))
            return None
        event = self.events.pop(0)
        if isinstance(event, RankFailure):
            raise event
        self.waited_for.remove(event.rank)
        return msgspec.msgpack.encode(event)


def ok(rank: int) -> RankOutput:
    return RankOutput(step_id=7, rank=rank)


def failed(rank: int, *missing: int) -> RankOutput:
    return RankOutput(step_id=7, rank=rank, error=TRACE, missing_ranks=missing)


def failure_of(*events: RankOutput | RankFailure) -> RankFailure:
    group = RankGroup(make_plan(parse_config({"parallel": {"world_size": 4, "device": "cpu"}})), lambda *_: None)
    group._channel = Channel(*events)  # type: ignore[assignment]
    with pytest.raises(RankFailure) as raised:
        group.step(STEP, {}, [])
    return raised.value


@pytest.mark.parametrize(
    ("events", "rank", "kind"),
    [
        ((ok(0), failed(2)), 2, "raised"),  # without waiting for 1 and 3, who wait for it
        ((failed(0, 3), failed(1, 3), failed(2, 3)), 3, "hung"),  # who never says anything
        ((failed(0, 3), RankFailure(3, "died: its step socket closed")), 3, "died"),
        ((failed(0, 3), failed(3)), 3, "raised"),  # it told its own reason a moment later
        ((ok(0), ok(1), ok(3)), 2, "hung"),
        ((failed(0, 3), ok(1), ok(2), ok(3)), 3, "hung"),
    ],
)
def test_the_rank_at_fault_is_named(events: tuple, rank: int, kind: str) -> None:
    failure = failure_of(*events)
    assert (failure.rank, failure.kind) == (rank, kind)
    assert "\n" not in str(failure)


def test_the_reason_is_one_line_and_the_traceback_is_kept() -> None:
    failure = failure_of(failed(1))
    assert str(failure) == "rank 1 raised in step 7: MemoryError: no room"
    assert failure.details == TRACE


def test_whom_a_collective_missed_is_found_behind_other_errors() -> None:
    from neuron.collectives import CollectiveError

    def raised(act: Callable[[], None]) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            act()
        return caught.value

    def wrapped() -> None:
        try:
            raise CollectiveError("all_reduce", "late", [3, 1])
        except CollectiveError as error:
            raise RuntimeError("a graph failed") from error

    def own() -> None:
        raise MemoryError

    assert missing_ranks(raised(wrapped)) == (3, 1)
    assert missing_ranks(raised(own)) == ()
