"""Requests over the socket: they arrive whole, with their pixels, and end with whoever is lost."""

import asyncio
import gc
from collections.abc import AsyncGenerator

import msgspec
import numpy as np
import pytest

from actors.messages import EngineOutput
from actors.pixel_memory import PixelMemory
from deployments.local_socket import framed
from deployments.renderer.local_engines import LocalEngines
from deployments.scheduler.local_renderers import LocalRenderers
from tests.deployments.scheduler.simulation import make_request
from tests.support.local_channel import Requests, Run, connected, token


async def begun(engines: LocalEngines, requests: Requests) -> AsyncGenerator[EngineOutput, None]:
    """The outputs of request r behind its first, which has token 1."""
    engine = engines.choose(1)
    assert engine is not None
    outputs = engines.generate(engine, make_request("r", 1), {})
    first = asyncio.ensure_future(anext(outputs))
    await requests.until(lambda: "r" in requests.submitted)
    requests.submitted["r"][1](token("r", 1))
    assert (await first).token_ids == (1,)
    return outputs


def test_a_request_goes_over_the_socket_with_its_pixels(run: Run) -> None:
    pixels = np.arange(12, dtype=np.float32).reshape(4, 3)
    request = make_request("r", 5, ("a", 4), ("b", 4), pixels={"a": "ours"})

    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, renderer):
            engine = engines.choose(1)
            assert engine is not None
            memory = PixelMemory.create(pixels)
            gone = PixelMemory.create(pixels).file
            outputs = engines.generate(engine, request, {"a": memory.file, "b": gone})
            first = asyncio.ensure_future(anext(outputs))
            await requests.until(lambda: "r" in requests.submitted)
            assert engines.choose(1) is None, "it has as many as it shall have"
            arrived, on_output = requests.submitted["r"]
            del memory
            (held,) = arrived.pixels.values()
            assert list(arrived.pixels) == ["a"], "of those that are gone nothing comes"
            assert np.array_equal(held.array(), pixels), "the engine holds them by itself"
            assert msgspec.structs.replace(arrived, pixels={}) == msgspec.structs.replace(request, pixels={})
            on_output(token("r", 1))
            assert (await first).token_ids == (1,)
            on_output(token("r", 2, finish_reason="stop"))
            assert [output.token_ids async for output in outputs] == [(2,)]
            assert engines.choose(1) is engine
            await asyncio.sleep(0.05)
            assert not requests.aborted
            assert not renderer._submitted
            assert not engines._receiving
            del arrived, held, requests.submitted["r"]
            gc.collect()
            assert not renderer._memories, "the connection holds no pixels"

    run(everything())


def test_the_same_pixels_are_open_once_however_many_requests_have_them(run: Run) -> None:
    memory = PixelMemory.create(np.zeros((4, 3), np.float32))

    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, _):
            engine = engines.choose(8)
            assert engine is not None
            for name in ("r", "s"):
                engine.submit(make_request(name, 1), {"a": memory.file})
            await requests.until(lambda: len(requests.submitted) == 2)
            (first,), (second,) = (request.pixels.values() for request, _ in requests.submitted.values())
            assert first is second

    run(everything())


def test_a_reader_who_leaves_aborts_the_request(run: Run) -> None:
    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, renderer):
            outputs = await begun(engines, requests)
            assert engines.choose(1) is None
            await outputs.aclose()
            await requests.until(lambda: requests.aborted == ["r"])
            assert not renderer._submitted
            assert engines.choose(1) is not None

    run(everything())


def test_the_end_of_the_renderer_aborts_what_it_has_sent(run: Run) -> None:
    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, renderer):
            engine = engines.choose(8)
            assert engine is not None
            for name in ("r", "s", "done"):
                engine.submit(make_request(name, 1), {})
            await requests.until(lambda: len(requests.submitted) == 3)
            requests.submitted["done"][1](token("done", 1, finish_reason="stop"))
            engine._writer.transport.abort()
            await requests.until(lambda: len(requests.aborted) == 2)
            assert sorted(requests.aborted) == ["r", "s"]
            assert renderer.closed

    run(everything())


def test_a_lost_engine_ends_its_requests_with_503(run: Run) -> None:
    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, renderer):
            outputs = await begun(engines, requests)
            renderer.close()
            (last,) = [output async for output in outputs]
            assert (last.finish_reason, last.error_status) == ("error", 503)
            assert engines.choose(1) is None

    run(everything())


def test_the_engine_with_the_fewest_requests_gets_the_next(run: Run) -> None:
    async def everything() -> None:
        async with connected() as (engines, _):
            assert await LocalRenderers(Requests()).to(engines.address) is not None
            while len(engines._engines) < 2:
                await asyncio.sleep(0)
            chosen = []
            for number in range(4):
                engine = engines.choose(2)
                assert engine is not None
                engine.submit(make_request(f"r{number}", 1), {})
                chosen.append(engine)
            assert len(set(chosen[:2])) == len(set(chosen[2:])) == 2
            assert engines.choose(2) is None
            chosen[3].end("r3", aborted=True)
            assert engines.choose(2) is chosen[3]

    run(everything())


def test_nonsense_closes_the_connection(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def everything() -> None:
        async with connected() as (engines, renderer):
            engine = engines.choose(1)
            assert engine is not None
            engine._writer.write(framed(b"nonsense"))
            while not renderer.closed:
                await asyncio.sleep(0.01)
            while engines._engines:
                await asyncio.sleep(0.01)

    run(everything())
    assert "cannot be understood" in caplog.text


def test_an_engine_that_has_ended_gets_no_request_any_more(run: Run) -> None:
    """It would refuse each at once, have the fewest, and get the next one, too."""

    async def everything() -> None:
        requests = Requests()
        renderers = LocalRenderers(requests)
        async with connected(requests) as (engines, _):
            engine = engines.choose(1)
            assert engine is not None
            requests.healthy = False
            outputs = [output async for output in engines.generate(engine, make_request("r", 1), {})]
            assert [output.error_status for output in outputs] == [503]
            assert engines.choose(1) is None
            assert not requests.submitted
            assert await renderers.to(engines.address) is None

    run(everything())


def test_an_engine_that_cannot_open_pixels_gets_no_more_of_them(run: Run) -> None:
    async def everything() -> None:
        requests = Requests()
        async with connected(requests) as (engines, _):
            outputs = await begun(engines, requests)
            error = {"finish_reason": "error", "error_status": 503, "lost_mm_hashes": ("a",)}
            requests.submitted["r"][1](EngineOutput(request_id="r", **error))
            assert [output.lost_mm_hashes async for output in outputs] == [("a",)]
            assert engines.choose(1, with_pixels=True) is None
            assert engines.choose(1) is not None

    run(everything())
