"""Cache layer 1 and what fills it."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.renderer.checkpoint import Checkpoint
from deployments.renderer.errors import APIError
from deployments.renderer.processor import ImageProcessor, ProcessedImage
from deployments.renderer.processor_cache import ProcessorCache
from tests.deployments.renderer.conftest import encoded, picture
from tests.deployments.renderer.fake_engine import Counters

EXECUTOR = ThreadPoolExecutor(4)


def image_of(nbytes: int) -> ProcessedImage:
    return ProcessedImage(np.zeros((nbytes // 4,), np.float32), (1, 2, 2), 1)


def cache_of(max_bytes: int) -> tuple[ProcessorCache, Counters]:
    counters = Counters()
    return ProcessorCache(max_bytes, counters, EXECUTOR), counters


def test_key_depends_on_bytes_and_everything_that_shapes_the_pixels(checkpoint: Checkpoint):
    processor = checkpoint.image_processor
    one = ImageProcessor(processor, "m")
    content = encoded(picture())
    assert one.mm_hash(content) == ImageProcessor(processor, "m").mm_hash(content)
    assert one.mm_hash(content) != one.mm_hash(encoded(picture(seed=1)))
    assert one.mm_hash(content) != ImageProcessor(processor, "n").mm_hash(content)
    other = type(processor)(**{**processor.to_dict(), "size": {"shortest_edge": 4096, "longest_edge": 65536}})
    assert one.mm_hash(content) != ImageProcessor(other, "m").mm_hash(content)
    # Equal pixel values, another shape.
    assert one.mm_hash(encoded(picture(64, 32).resize((64, 64)))) != one.mm_hash(encoded(picture(64, 64)))


def test_hit_calls_nothing_and_counts():
    async def check() -> None:
        cache, counters = cache_of(1000)
        first = await cache.get("a", lambda: image_of(400))
        assert counters.values == (1, 0)
        second = await cache.get("a", lambda: pytest.fail("processed again"))
        assert second is first
        assert counters.values == (2, 1)
        assert (first.nbytes, cache.num_bytes, len(cache)) == (400, 400, 1)

    asyncio.run(check())


def test_least_recently_used_goes_first():
    async def check() -> None:
        cache, _ = cache_of(1000)
        for key in ("a", "b"):
            await cache.get(key, lambda: image_of(400))
        await cache.get("a", lambda: image_of(400))
        await cache.get("c", lambda: image_of(400))
        assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)

    asyncio.run(check())


def test_too_large_and_off():
    async def check() -> None:
        cache, counters = cache_of(1000)
        await cache.get("a", lambda: image_of(400))
        assert (await cache.get("big", lambda: image_of(1004))).nbytes == 1004
        assert "big" not in cache
        assert "a" in cache
        off, counters = cache_of(0)
        await asyncio.gather(*(off.get("a", lambda: image_of(4)) for _ in range(3)))
        assert len(off) == 0
        assert counters.values == (3, 0)

    asyncio.run(check())


def test_the_same_image_at_once_is_processed_once():
    async def check() -> None:
        cache, counters = cache_of(1000)
        calls = []

        def process() -> ProcessedImage:
            calls.append(threading.current_thread())
            time.sleep(0.05)
            return image_of(400)

        results = await asyncio.gather(*(cache.get("a", process) for _ in range(5)))
        assert len(calls) == 1
        assert calls[0] is not threading.main_thread()
        assert all(result is results[0] for result in results)
        assert counters.values == (5, 4)

    asyncio.run(check())


def test_who_leaves_does_not_take_the_image_from_the_others():
    async def check() -> None:
        cache, counters = cache_of(1000)

        def process() -> ProcessedImage:
            time.sleep(0.05)
            return image_of(400)

        leaver = asyncio.create_task(cache.get("a", process))
        stayer = asyncio.create_task(cache.get("a", process))
        await asyncio.sleep(0.01)
        leaver.cancel()
        assert (await stayer).nbytes == 400
        assert counters.values == (2, 1)

    asyncio.run(check())


def test_failure_reaches_all_who_wait_and_is_not_kept():
    async def check() -> None:
        cache, counters = cache_of(1000)

        def process() -> ProcessedImage:
            time.sleep(0.02)
            raise APIError("bad")

        results = await asyncio.gather(*(cache.get("a", process) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, APIError) for result in results)
        assert counters.values == (3, 0)
        await cache.get("a", lambda: image_of(4))
        assert "a" in cache

    asyncio.run(check())


def test_reset_forgets_also_what_is_in_flight():
    async def check() -> None:
        cache, counters = cache_of(1000)
        await cache.get("a", lambda: image_of(400))

        def slow() -> ProcessedImage:
            time.sleep(0.05)
            return image_of(400)

        flight = asyncio.create_task(cache.get("b", slow))
        await asyncio.sleep(0.01)
        cache.reset()
        assert (await flight).nbytes == 400
        assert (len(cache), cache.num_bytes) == (0, 0)
        await cache.get("b", lambda: image_of(400))
        assert counters.values == (3, 0)
        cache.check_integrity()

    asyncio.run(check())


def test_lost_pixels_are_made_once_and_count_nothing():
    async def check() -> None:
        cache, counters = cache_of(1000)
        lost = await cache.get("a", lambda: image_of(400))
        made = []

        def process() -> ProcessedImage:
            made.append(1)
            return image_of(400)

        first, second = await asyncio.gather(*(cache.renew("a", lost.pixels, process) for _ in range(2)))
        assert first is second
        assert first.pixels is not lost.pixels
        assert await cache.renew("a", lost.pixels, lambda: pytest.fail("made anew already")) is first
        assert await cache.get("a", lambda: pytest.fail("kept")) is first
        assert (len(made), counters.values) == (1, (2, 1))
        cache.check_integrity()
        off, counters = cache_of(0)
        assert (await off.renew("a", lost.pixels, process)).pixels is not lost.pixels
        assert counters.values == (0, 0)

    asyncio.run(check())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 80)), max_size=60))
def test_bound_holds_whatever_comes(lookups):
    async def check() -> None:
        cache, counters = cache_of(400)
        sizes: dict[int, int] = {}
        for key, size in lookups:
            size = sizes.setdefault(key, size) * 4
            await cache.get(str(key), lambda size=size: image_of(size))
            cache.check_integrity()
        assert counters.values[0] == len(lookups)

    asyncio.run(check())
