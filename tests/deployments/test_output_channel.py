"""Outputs of many requests over one socket: each gets its own, all of them, and nobody waits for who does not read."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import uvloop

from actors.messages import EngineOutput, TokenLogprobs
from deployments import output_channel
from deployments.output_channel import OutputReceiver, OutputSender, OutputSenders, Receiving


def token(request_id: str, number: int, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=request_id, token_ids=(number,), **fields)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """On either loop: Ray's actors run on uvloop's."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[OutputReceiver, OutputSender]]:
    receiver = OutputReceiver()
    await receiver.start()
    sender = await OutputSenders().to(receiver.address)
    assert sender is not None
    try:
        yield receiver, sender
    finally:
        sender.close()
        receiver.close()


async def read(receiving: Receiving) -> list[EngineOutput]:
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        output = await receiving.buffer.get()
        assert output is not None
        outputs.append(output)
    return outputs


def test_each_request_gets_its_own_from_the_engines_thread(run: Run) -> None:
    names = [f"r{number}" for number in range(16)]

    async def one(receiver: OutputReceiver, sender: OutputSender, name: str, submitted: list[str]) -> list[int]:
        with receiver.receiving(name) as receiving:
            await sender.carry(name, partial(submitted.append, name))
            assert len(sender._ends) <= len(names)
            outputs = await read(receiving)
            assert receiving.complete.is_set()
        return [token_id for output in outputs for token_id in output.token_ids]

    async def everything() -> None:
        async with connected() as (receiver, sender):
            submitted: list[str] = []
            tasks = [asyncio.ensure_future(one(receiver, sender, name, submitted)) for name in names]
            while len(submitted) < len(names):
                await asyncio.sleep(0)

            def engine() -> None:
                for step in range(200):
                    for index, name in enumerate(names):
                        sender.put(token(name, 1000 * index + step, finish_reason="length" if step == 199 else None))

            thread = threading.Thread(target=engine)
            thread.start()
            for index, tokens in enumerate(await asyncio.gather(*tasks)):
                assert tokens == [1000 * index + step for step in range(200)]
            thread.join()
            assert not sender._ends
            assert not receiver._receiving

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
        async with connected() as (receiver, sender):
            with receiver.receiving("r") as receiving:
                sender.put(whole)
                sender.put(error)
                assert await read(receiving) == [whole, error], "an error stays apart from the tokens before it"

    run(everything())


def test_what_nobody_asked_for_is_dropped(run: Run) -> None:
    async def everything() -> None:
        async with connected() as (receiver, sender):
            with receiver.receiving("here") as receiving:
                sender.put(token("gone", 1))
                sender.put(token("here", 2, finish_reason="stop"))
                assert [output.request_id for output in await read(receiving)] == ["here"]

    run(everything())


def test_a_renderer_that_does_not_read_costs_one_output_a_request(run: Run) -> None:
    async def everything() -> None:
        address = "\0tvs-test-" + str(id(object()))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            sender = await OutputSender.connect(address)
            names = [f"r{number}" for number in range(8)]
            count = 20_000  # several times what the sockets' buffers take
            for number in range(count):
                for name in names:
                    sender.put(token(name, number))
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert len(sender) == len(names)
            assert [len(waiting) for waiting in sender._unread.values()] == [1] * len(names)
            # It gets every token when it reads.
            receiver = OutputReceiver()
            taken, _ = listening.accept()
            reading = asyncio.ensure_future(receiver._read(*await asyncio.open_unix_connection(sock=taken)))
            with receiver.receiving("r0") as receiving:
                sender.put(token("r0", count, finish_reason="stop"))
                outputs = await read(receiving)
            assert [each for output in outputs for each in output.token_ids] == list(range(count + 1))
            sender.close()
            await reading

    run(everything())


def test_the_end_of_the_renderer_ends_what_is_carried_to_it(run: Run) -> None:
    async def everything() -> None:
        senders = OutputSenders()
        with socket.socket(socket.AF_UNIX) as listening:
            address = "\0tvs-test-" + str(id(object()))
            listening.bind(address)
            listening.listen()
            sender = await senders.to(address)
            assert sender is not None
            assert await senders.to(address) is sender
            carried = asyncio.ensure_future(sender.carry("r", lambda: sender.put(token("r", 1))))
            taken, _ = listening.accept()
            await asyncio.sleep(0)
            taken.close()
            with pytest.raises(ConnectionError, match="has closed its socket"):
                await carried
            sender.put(token("r", 2))
            assert len(sender) == 0
            with pytest.raises(ConnectionError):
                await sender.carry("late", lambda: pytest.fail("submitted"))
            # Another one at the same address is connected to anew.
            assert await senders.to(address) is not sender
        assert len(senders._senders) == 1

    run(everything())


def test_where_nobody_listens_there_is_no_sender(run: Run) -> None:
    async def everything() -> None:
        senders = OutputSenders()
        assert await senders.to(None) is None
        assert await senders.to("\0tvs-outputs-of-another-node") is None
        assert await senders.to("\0tvs-outputs-of-another-node") is None

    run(everything())


def test_another_user_is_not_listened_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def everything() -> None:
        receiver = OutputReceiver()
        await receiver.start()
        monkeypatch.setattr(output_channel, "_is_own_user", lambda connection: False)
        assert await OutputSenders().to(receiver.address) is None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(receiver.address)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        assert await reader.read() == b""
        writer.close()
        receiver.close()

    run(everything())


def test_a_cancelled_request_leaves_nothing_behind(run: Run) -> None:
    async def everything() -> None:
        async with connected() as (_, sender):
            carried = asyncio.ensure_future(sender.carry("r", lambda: None))
            await asyncio.sleep(0)
            sender._readable.clear()
            sender.put(token("r", 1))
            carried.cancel()
            await asyncio.wait((carried,))
            assert not sender._ends
            assert len(sender) == 0

    run(everything())
