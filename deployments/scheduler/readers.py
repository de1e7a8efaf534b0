"""What becomes of requests when the Renderer that sent them dies: nobody reads them, and their pixels are gone."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from actors.messages import EngineRequest
from actors.pixel_memory import PixelMemory

CHECK_S = 0.25
PIXELS_TIMEOUT_S = 10.0
"""For all images of a step. One after the other they are looked at only when that was too short for all."""
ONE_IMAGE_TIMEOUT_S = 1.0

Reader = tuple[str, str]
"""Name and namespace of a Ray actor."""


def is_alive(reader: Reader) -> bool:
    import ray

    try:
        ray.get_actor(reader[0], reader[1])
    except ValueError:
        return False
    except Exception:  # Ray cannot say now
        return True
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


def find_lost(pixels: Mapping[str, Any]) -> list[str]:
    """mm_hashes whose reference leads to nothing. What is there is mapped, not copied; memory of this node is there."""
    objects = {mm_hash: held for mm_hash, held in pixels.items() if not isinstance(held, PixelMemory)}
    if not objects:
        return []
    import ray

    def is_lost(references: list[Any], timeout_s: float) -> bool:
        try:
            ray.get(references, timeout=timeout_s)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return True
        return False

    if not is_lost(list(objects.values()), PIXELS_TIMEOUT_S):
        return []
    return [mm_hash for mm_hash, reference in objects.items() if is_lost([reference], ONE_IMAGE_TIMEOUT_S)]
