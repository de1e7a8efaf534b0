"""What becomes of requests when the Renderer that sent them dies: nobody reads them, and their pixels are gone."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from actors.messages import EngineRequest, RankOutput, SchedulerOutput
from actors.rank_group import RankGroup
from actors.step_channel import RankFailure

CHECK_S = 0.25
PIXELS_TIMEOUT_S = 10.0

Reader = tuple[str, str]
"""Name and namespace of a Ray actor."""


def is_alive(reader: Reader) -> bool:
    import ray

    try:
        ray.get_actor(reader[0], reader[1])
    except ValueError:
        return False
    return True


class Readers:
    """Watches, on a thread of its own, who reads the requests at hand; `drop` ends a request that nobody reads."""

    def __init__(self, drop: Callable[[str], None], alive: Callable[[Reader], bool] = is_alive) -> None:
        self._drop = drop
        self._alive = alive
        self._requests: dict[str, Reader] = {}
        """Request id -> who reads it."""
        threading.Thread(target=self._watch, name="readers", daemon=True).start()

    @contextmanager
    def reading(self, request: EngineRequest) -> Iterator[None]:
        """While this lasts the request is dropped when its reader dies."""
        if request.reader is not None:
            self._requests[request.request_id] = request.reader
        try:
            yield
        finally:
            self._requests.pop(request.request_id, None)

    def _watch(self) -> None:
        wait = threading.Event().wait
        while not wait(CHECK_S):
            requests = list(self._requests.items())
            dead = {reader for reader in {reader for _, reader in requests} if not self._alive(reader)}
            for request_id, reader in requests:
                if reader in dead:
                    self._drop(request_id)


class CheckedGang(RankGroup):
    """A gang that is not sent a step whose pixels died with their Renderer: its ranks would wait for them in vain."""

    def step(self, output: SchedulerOutput, pixels: Mapping[str, Any], items: list[tuple[str, int]]) -> RankOutput:
        check_pixels(pixels)
        return super().step(output, pixels, items)


def check_pixels(pixels: Mapping[str, Any]) -> None:
    """Raises RankFailure where a reference leads to nothing. What is there is mapped, not copied."""
    if not pixels:
        return
    import ray

    try:
        ray.get(list(pixels.values()), timeout=PIXELS_TIMEOUT_S)
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
        raise RankFailure(-1, f"cannot be sent the pixels of this step's images: {error}") from error
