"""Requests whose Renderer died are dropped, and no step waits for the pixels that died with it."""

import asyncio
import queue
from typing import Any

import msgspec
import pytest
import ray
from ray.exceptions import GetTimeoutError, OwnerDiedError

from actors.messages import EngineRequest
from deployments.scheduler.readers import Reader, Readers, find_lost
from tests.deployments.scheduler.simulation import make_config, make_request
from tests.deployments.scheduler.test_engine import Running, with_image

HERE, GONE = ("renderer-1", "serve"), ("renderer-2", "serve")


def read_by(reader: Reader | None, request_id: str) -> EngineRequest:
    return msgspec.structs.replace(make_request(request_id, 1), reader=reader)


def test_requests_of_a_dead_reader_are_dropped_and_no_others() -> None:
    dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
    dead: set[Reader] = set()
    readers = Readers(dropped.put, lambda reader: reader not in dead)
    with readers.reading(read_by(HERE, "a")), readers.reading(read_by(None, "b")):
        with readers.reading(read_by(GONE, "c")):
            with pytest.raises(queue.Empty):
                dropped.get(timeout=0.6)
            dead.add(GONE)
            assert dropped.get(timeout=5) == "c"
        while not dropped.empty():  # told again as long as it is there
            assert dropped.get() == "c"
        with pytest.raises(queue.Empty):
            dropped.get(timeout=0.6)


def test_a_dropped_request_frees_its_place_and_its_stream_ends() -> None:
    running = Running(make_config(encoder_cache__min_hold_time_ms=60_000))

    async def read() -> list[str | None]:
        request = msgspec.structs.replace(with_image("second", "b"), reader=GONE)
        with Readers(running.engine.drop, lambda reader: False).reading(request):
            return [output.finish_reason async for output in running.engine.stream(request)]

    running.submit(with_image("first", "a"))
    running.end_of("first")  # the second one would wait for the end of its hold window
    assert asyncio.run(asyncio.wait_for(read(), 5)) == ["abort"]
    assert not running.scheduler.requests
    running.engine.stop()


@pytest.mark.parametrize("error", [OwnerDiedError("00", None, "site"), GetTimeoutError("10 s")])
def test_pixels_that_are_lost_are_known_before_the_step_is_sent(monkeypatch: pytest.MonkeyPatch, error) -> None:
    def get(references: list[Any], timeout: float) -> None:
        if "gone" in references:
            raise error

    monkeypatch.setattr(ray, "get", get)
    assert find_lost({"a": "here", "b": "here, too"}) == []
    assert find_lost({"a": "here", "b": "gone", "c": "here"}) == ["b"]
