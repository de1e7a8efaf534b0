"""When a client that finds the queue full is told to come back: as the queue's measured rate says."""

import math

import pytest

from deployments.scheduler.queue_rate import MAX_RETRY_S, MIN_RETRY_S, REMEMBERED, QueueRate, seconds_until_room
from deployments.scheduler.request import RequestError
from tests.deployments.scheduler.simulation import Simulation, make_config, make_request, text


@pytest.mark.parametrize(
    ("requests", "tokens", "rates", "expected"),
    [
        (0, 0, (0.0, 0.0), 0.0),
        (-3, -100, (1.0, 1.0), 0.0),
        (1, -5, (4.0, 10.0), 0.25),
        (-1, 50, (4.0, 10.0), 5.0),
        (8, 50, (4.0, 100.0), 2.0),
        (1, 0, (0.0, 5.0), math.inf),
    ],
)
def test_seconds_until_room(requests: int, tokens: int, rates: tuple[float, float], expected: float) -> None:
    assert seconds_until_room(requests, tokens, *rates) == expected


def steady(every_s: float, tokens: int, starts: int = REMEMBERED) -> tuple[QueueRate, float]:
    """A queue from which a request starts every so often; and the time."""
    rate = QueueRate()
    rate.on_pass(100.0, waiting=9)
    for index in range(1, starts + 1):
        rate.on_start(100.0 + index * every_s, tokens)
    return rate, 100.0 + starts * every_s


@pytest.mark.parametrize("starts", [1, REMEMBERED, 5 * REMEMBERED])
def test_the_rate_is_that_of_the_latest_starts(starts: int) -> None:
    rate, now = steady(4.0, 20, starts)
    assert rate.retry_after(now, requests=3, tokens=-1, own_tokens=20) == pytest.approx(12.0)
    rate, now = steady(4.0, 20, starts)
    assert rate.retry_after(now, requests=0, tokens=45, own_tokens=20) == pytest.approx(9.0)


def test_a_rate_that_falls_is_noticed_before_the_next_start() -> None:
    rate, now = steady(0.1, 20)
    assert rate.retry_after(now, 1, 0, 20) == MIN_RETRY_S
    rate, now = steady(0.1, 20)
    assert rate.retry_after(now + 640.0, 1, 0, 20) > 9.0


def test_it_stays_within_its_bounds() -> None:
    rate, now = steady(30.0, 20)
    assert rate.retry_after(now, 50, 0, 20) == MAX_RETRY_S
    rate, now = steady(0.001, 20)
    assert rate.retry_after(now, 1, 0, 20) == MIN_RETRY_S


def test_before_anything_started_it_is_as_long_as_that_took_until_now() -> None:
    rate = QueueRate()
    assert rate.retry_after(5.0, 1, 0, 20) == MIN_RETRY_S
    rate.on_pass(5.0, waiting=9)
    assert rate.retry_after(5.0, 1, 0, 20) == MIN_RETRY_S
    assert rate.retry_after(12.0, 1, 0, 20) == 7.0
    assert rate.retry_after(500.0, 1, 0, 20) == MAX_RETRY_S


def test_who_comes_together_is_not_told_to_come_back_together() -> None:
    rate, now = steady(2.0, 20)
    assert [rate.retry_after(now, 1, 0, 20) for _ in range(4)] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    rate, now = steady(2.0, 20)
    assert [rate.retry_after(now, 0, 10, 20) for _ in range(4)] == pytest.approx([1.0, 3.0, 5.0, 7.0])


def test_what_was_promised_is_given_as_requests_start_and_never_beyond_the_bound() -> None:
    rate, now = steady(2.0, 20)
    told = [rate.retry_after(now, 1, 0, 20) for _ in range(1000)]
    assert told[-900:] == [MAX_RETRY_S] * 900
    for index in range(1, 31):  # as many as there is in a minute: the others were promised nothing
        rate.on_start(now + 2.0 * index, 20)
    assert rate.retry_after(now + 60.0, 1, 0, 20) == pytest.approx(2.0)


def test_a_queue_that_was_empty_measures_anew() -> None:
    rate, now = steady(2.0, 20)
    rate.on_pass(now, waiting=0)
    rate.on_start(now + 999.0, 20)  # it did not wait for others
    rate.on_pass(now + 1000.0, waiting=1)
    rate.on_start(now + 1003.0, 20)
    assert rate.retry_after(now + 1003.0, 2, 0, 20) == pytest.approx(6.0)


def test_a_queue_is_full_by_tokens_too() -> None:
    simulation = Simulation(make_config(scheduler__max_waiting_tokens=30))
    simulation.add(make_request("large", *text(40)))  # an empty queue takes anything
    with pytest.raises(RequestError, match=r"scheduler\.max_waiting_tokens = 30") as refused:
        simulation.add(make_request("more", *text(1)))
    assert refused.value.status == 429
    assert refused.value.retry_after_s == MIN_RETRY_S
    simulation.step()
    simulation.add(make_request("a", *text(20)))
    simulation.add(make_request("b", *text(10)))
    with pytest.raises(RequestError, match="requests of 30 tokens are waiting and this one has 1"):
        simulation.add(make_request("c", *text(1)))
    simulation.abort("b")
    simulation.add(make_request("c", *text(10)))
    simulation.drain()


def test_preempted_requests_fill_the_queue_and_are_never_refused() -> None:
    simulation = Simulation(
        make_config(kv_cache__num_blocks=16, kv_cache__enable_prefix_caching=False, scheduler__max_waiting_tokens=30)
    )
    for name in "abcd":
        simulation.add(make_request(name, *text(12), max_tokens=40, sampling=None))
        simulation.step()
    while not (waiting := list(simulation.scheduler.waiting)):
        assert simulation.step() is not None
    assert simulation.scheduler.waiting.num_tokens == sum(request.num_tokens for request in waiting)
    simulation.drain()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_who_comes_back_when_told_finds_room(by_tokens: bool) -> None:
    """A full queue that empties at a steady rate: every refused request is taken at its second try."""
    limit = {"scheduler__max_waiting_tokens": 128} if by_tokens else {"scheduler__max_waiting_requests": 8}
    simulation = Simulation(make_config(kv_cache__enable_prefix_caching=False, **limit))
    returns: list[tuple[float, str]] = []
    tries: dict[str, int] = {}

    def ask(name: str) -> None:
        tries[name] = tries.get(name, 0) + 1
        try:
            # A prompt takes a whole step and the answer is one token: a request starts every two seconds.
            simulation.add(make_request(name, *text(16), max_tokens=1))
        except RequestError as error:
            returns.append((simulation.now + (error.retry_after_s or 0.0), name))

    for index in range(8):
        ask(f"first{index}")
    for index in range(6):
        simulation.step(2.0)
        ask(f"next{index}")
    assert not returns
    for index in range(6):
        ask(f"late{index}")
    assert len(returns) == 6
    while returns or simulation.scheduler.requests:
        due = sorted(name for when, name in returns if when <= simulation.now + 1e-6)
        returns = [(when, name) for when, name in returns if name not in due]
        for name in due:
            ask(name)
        simulation.step(2.0)
    assert max(tries.values()) == 2
    simulation.check_answers()
