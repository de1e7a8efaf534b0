"""Outputs of many requests over one socket: each gets its own, all of them, and nobody waits for who does not read."""

import asyncio
import socket
import threading
from functools import partial

import pytest

from actors.messages import EngineOutput, TokenLogprobs
from deployments.renderer import local_engines
from deployments.renderer.local_engines import LocalEngines, Receiving
from deployments.scheduler import local_renderers
from deployments.scheduler.local_renderers import LocalRenderer, LocalRenderers
from tests.support.local_channel import Requests, Run, connected, token


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
