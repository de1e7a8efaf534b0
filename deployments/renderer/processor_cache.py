"""Cache layer 1: processed pixels by mm_hash, so that a known image is neither decoded nor processed again."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.renderer.processor import ProcessedImage
from telemetry import metrics
from telemetry.recorder import Recorder


@dataclass(frozen=True)
class CachedImage:
    """What the Renderer keeps of a processed image."""

    mm_hash: str
    pixels: Any
    """Reference to the float32 array [patches, patch_dim], as `store` returned it."""
    grid: tuple[int, int, int]
    num_embeddings: int
    nbytes: int
    """Of the pixels."""


class ProcessorCache:
    """LRU over processed images, bounded by the bytes of their pixels. Lives on one event loop.

    An image larger than the bound is handed out but not kept; a bound of 0 turns the cache off, so nothing hits.
    Dropping an entry drops one reference to its pixels: requests that still hold another keep them alive.
    """

    def __init__(
        self,
        max_bytes: int,
        recorder: Recorder,
        executor: Executor,
        store: Callable[[np.ndarray], Any] = lambda pixels: pixels,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of all entries' pixels; never above max_bytes."""
        self._recorder = recorder
        self._executor = executor
        self._store = store
        self._entries: OrderedDict[str, CachedImage] = OrderedDict()  # least recently used first
        self._in_flight: dict[str, asyncio.Task[CachedImage]] = {}
        self._generation = 0  # counts resets: what was in flight before one is not kept after it

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def num_embeddings(self, mm_hash: str) -> int | None:
        """Of an image that is here; None where it is not. No lookup: nothing is counted or kept longer."""
        entry = self._entries.get(mm_hash)
        return None if entry is None else entry.num_embeddings

    async def get(
        self,
        mm_hash: str,
        process: Callable[[], ProcessedImage],
        on_lookup: Callable[[bool], None] = lambda hit: None,
    ) -> CachedImage:
        """The image, from the cache or through `process`, which is called in a worker thread, and so is `store`.

        Counts one query, and a hit where no work was done for this call; `on_lookup` is told which it was.

        A request that finds the same image in flight for another waits for that one's result, and has hit.
        """
        self._recorder.add(metrics.MM_CACHE_QUERIES)
        entry = self._entries.get(mm_hash)
        if entry is not None:
            self._entries.move_to_end(mm_hash)
            self._recorder.add(metrics.MM_CACHE_HITS)
            on_lookup(True)
            return entry
        waits_for_another = mm_hash in self._in_flight
        if not waits_for_another:
            on_lookup(False)
        entry = await self._shared(mm_hash, process)
        if waits_for_another:
            self._recorder.add(metrics.MM_CACHE_HITS)
            on_lookup(True)
        return entry

    async def renew(self, mm_hash: str, lost: Any, process: Callable[[], ProcessedImage]) -> CachedImage:
        """The image with other pixels than `lost`, a reference that leads to nothing. Counts no query."""
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.pixels is not lost:
            return entry
        if entry is not None:
            del self._entries[mm_hash]
            self.num_bytes -= entry.nbytes
        return await self._shared(mm_hash, process)

    def reset(self) -> None:
        """Forget everything, also what is being processed right now."""
        self._entries.clear()
        self.num_bytes = 0
        self._in_flight.clear()
        self._generation += 1

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        assert self.num_bytes == sum(entry.nbytes for entry in self._entries.values())
        assert self.num_bytes <= self.max_bytes

    async def _shared(self, mm_hash: str, process: Callable[[], ProcessedImage]) -> CachedImage:
        """What is being made already, or is from now on."""
        if self.max_bytes == 0:
            return await self._make(mm_hash, process)
        task = self._in_flight.get(mm_hash)
        if task is None:
            task = asyncio.create_task(self._make(mm_hash, process))
            self._in_flight[mm_hash] = task
            task.add_done_callback(lambda done: self._landed(mm_hash, done))
        # Shielded: a client that leaves must not take the image from those who wait for it too.
        return await asyncio.shield(task)

    async def _make(self, mm_hash: str, process: Callable[[], ProcessedImage]) -> CachedImage:
        generation = self._generation
        entry = await asyncio.get_running_loop().run_in_executor(self._executor, self._work, mm_hash, process)
        if generation == self._generation:
            self._keep(entry)
        return entry

    def _work(self, mm_hash: str, process: Callable[[], ProcessedImage]) -> CachedImage:
        image = process()
        return CachedImage(mm_hash, self._store(image.pixels), image.grid, image.num_embeddings, image.pixels.nbytes)

    def _keep(self, entry: CachedImage) -> None:
        if entry.nbytes > self.max_bytes:
            return
        while self.num_bytes + entry.nbytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        self._entries[entry.mm_hash] = entry
        self.num_bytes += entry.nbytes

    def _landed(self, mm_hash: str, task: asyncio.Task[CachedImage]) -> None:
        if self._in_flight.get(mm_hash) is task:
            del self._in_flight[mm_hash]
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report it when everyone who waited has left
