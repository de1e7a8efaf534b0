"""Requests and outputs over one socket: each gets its own, all of them, and nobody waits for who does not read."""

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from actors.messages import EngineOutput, EngineRequest, TokenLogprobs
from actors.pixel_memory import PixelMemory
from deployments.local_socket import framed
from deployments.renderer import local_engines
from deployments.renderer.local_engines import LocalEngines, Receiving
from deployments.scheduler import local_renderers
from deployments.scheduler.local_renderers import LocalRenderer, LocalRenderers
from tests.deployments.scheduler.simulation import make_request


def token(request_id: str, number: int, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=request_id, token_ids=(number,), **fields)


class Requests:
    """An engine that does nothing with them."""

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[EngineRequest, Callable[[EngineOutput], None]]] = {}
        self.aborted: list[str] = []
        self.changed = asyncio.Event()

    def submit(self, request: EngineRequest, on_output: Callable[[EngineOutput], None]) -> None:
        self.submitted[request.request_id] = request, on_output
        self.changed.set()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.changed.wait()
            self.changed.clear()


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """On either loop: Ray's actors run on uvloop's."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run


@asynccontextmanager
async def connected(requests: Requests | None = None) -> AsyncIterator[tuple[LocalEngines, LocalRenderer]]:
    engines = LocalEngines()
    await engines.start()
    renderer = await LocalRenderers(requests or Requests()).to(engines.address)
    assert renderer is not None
    while not engines._engines:
        await asyncio.sleep(0)
    try:
        yield engines, renderer
    finally:
        renderer.close()
        engines.close()


async def read(receiving: Receiving) -> list[EngineOutput]:
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        output = await receiving.buffer.get()
        assert output is not None
        outputs.append(output)
    return outputs


def test_each_request_gets_its_own_from_the_engines_thread(run: Run) -> None:
    names = [f"r{number}" for number in range(16)]

    async def one(engines: LocalEngines, renderer: LocalRenderer, name: str, submitted: list[str]) -> list[int]:
        with engines.receiving(name) as receiving:
            await renderer.carry(name, partial(submitted.append, name))
            assert len(renderer._ends) <= len(names)
            outputs = await read(receiving)
            assert receiving.complete.is_set()
        return [token_id for output in outputs for token_id in output.token_ids]

    async def everything() -> None:
        async with connected() as (engines, renderer):
            submitted: list[str] = []
            tasks = [asyncio.ensure_future(one(engines, renderer, name, submitted)) for name in names]
            while len(submitted) < len(names):
                await asyncio.sleep(0)

            def engine() -> None:
                for step in range(200):
                    for index, name in enumerate(names):
                        renderer.put(token(name, 1000 * index + step, finish_reason="length" if step == 199 else None))

            thread = threading.Thread(target=engine)
            thread.start()
            for index, tokens in enumerate(await asyncio.gather(*tasks)):
                assert tokens == [1000 * index + step for step in range(200)]
            thread.join()
            assert not renderer._ends
            assert not engines._receiving

    run(everything())


def test_every_field_arrives(run: Run) -> None:
    whole = EngineOutput(
        request_id="r",
        token_ids=(5, 6),
        logprobs=(TokenLogprobs(token_id=5, logprob=-0.5, top=((5, -0.5), (7, -2.0))),) * 2,
        stop_token_id=3,
        num_cached_tokens=16,
    )
    error = EngineOutput(
        request_id="r", finish_reason="error", error="lost", error_status=503, retry_after_s=2.5, lost_mm_hashes=("a",)
    )

    async def everything() -> None:
        async with connected() as (engines, renderer):
            with engines.receiving("r") as receiving:
                renderer.put(whole)
                renderer.put(error)
                assert await read(receiving) == [whole, error], "an error stays apart from the tokens before it"

    run(everything())


def test_what_nobody_asked_for_is_dropped(run: Run) -> None:
    async def everything() -> None:
        async with connected() as (engines, renderer):
            with engines.receiving("here") as receiving:
                renderer.put(token("gone", 1))
                renderer.put(token("here", 2, finish_reason="stop"))
                assert [output.request_id for output in await read(receiving)] == ["here"]

    run(everything())


def test_a_renderer_that_does_not_read_costs_one_output_a_request(run: Run) -> None:
    async def everything() -> None:
        address = "\0tvs-test-" + str(id(object()))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            renderer = await LocalRenderers(Requests()).to(address)
            assert renderer is not None
            names = [f"r{number}" for number in range(8)]
            count = 20_000  # several times what the sockets' buffers take
            for number in range(count):
                for name in names:
                    renderer.put(token(name, number))
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert len(renderer) == len(names)
            assert [len(waiting) for waiting in renderer._unread.values()] == [1] * len(names)
            # It gets every token when it reads.
            engines = LocalEngines()
            taken, _ = listening.accept()
            reading = asyncio.ensure_future(engines._read(*await asyncio.open_unix_connection(sock=taken)))
            with engines.receiving("r0") as receiving:
                renderer.put(token("r0", count, finish_reason="stop"))
                outputs = await read(receiving)
            assert [each for output in outputs for each in output.token_ids] == list(range(count + 1))
            renderer.close()
            await reading

    run(everything())


def test_the_end_of_the_renderer_ends_what_is_carried_to_it(run: Run) -> None:
    async def everything() -> None:
        renderers = LocalRenderers(Requests())
        with socket.socket(socket.AF_UNIX) as listening:
            address = "\0tvs-test-" + str(id(object()))
            listening.bind(address)
            listening.listen()
            renderer = await renderers.to(address)
            assert renderer is not None
            assert await renderers.to(address) is renderer
            carried = asyncio.ensure_future(renderer.carry("r", lambda: renderer.put(token("r", 1))))
            taken, _ = listening.accept()
            await asyncio.sleep(0)
            taken.close()
            with pytest.raises(ConnectionError, match="has closed its socket"):
                await carried
            renderer.put(token("r", 2))
            assert len(renderer) == 0
            with pytest.raises(ConnectionError):
                await renderer.carry("late", lambda: pytest.fail("submitted"))
            # Another one at the same address is connected to anew.
            assert await renderers.to(address) is not renderer
        assert len(renderers._renderers) == 1

    run(everything())


def test_where_nobody_listens_there_is_no_renderer(run: Run) -> None:
    async def everything() -> None:
        renderers = LocalRenderers(Requests())
        assert await renderers.to(None) is None
        assert await renderers.to("\0tvs-outputs-of-another-node") is None
        assert await renderers.to("\0tvs-outputs-of-another-node") is None

    run(everything())


def test_another_user_is_not_listened_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def everything() -> None:
        engines = LocalEngines()
        await engines.start()
        for module in (local_engines, local_renderers):
            monkeypatch.setattr(module, "is_own_user", lambda connection: False)
        assert await LocalRenderers(Requests()).to(engines.address) is None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(engines.address)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        assert await reader.read() == b""
        writer.close()
        engines.close()

    run(everything())


def test_a_cancelled_request_leaves_nothing_behind(run: Run) -> None:
    async def everything() -> None:
        async with connected() as (_, renderer):
            carried = asyncio.ensure_future(renderer.carry("r", lambda: None))
            await asyncio.sleep(0)
            renderer._readable.clear()
            renderer.put(token("r", 1))
            carried.cancel()
            await asyncio.wait((carried,))
            assert not renderer._ends
            assert len(renderer) == 0

    run(everything())


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
            engine = engines.choose(1)
            assert engine is not None
            outputs = engines.generate(engine, make_request("r", 1), {})
            first = asyncio.ensure_future(anext(outputs))
            await requests.until(lambda: "r" in requests.submitted)
            requests.submitted["r"][1](token("r", 1))
            await first
            await outputs.aclose()
            await requests.until(lambda: requests.aborted == ["r"])
            assert not renderer._submitted
            assert engines.choose(1) is engine

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
            engine = engines.choose(1)
            assert engine is not None
            outputs = engines.generate(engine, make_request("r", 1), {})
            first = asyncio.ensure_future(anext(outputs))
            await requests.until(lambda: "r" in requests.submitted)
            renderer.put(token("r", 1))
            await first
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
