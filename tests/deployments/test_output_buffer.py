"""What waits for a slow reader is one output, and says what all of them said."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import EngineOutput, TokenLogprobs
from deployments.output_buffer import OutputBuffer, read_ahead


def token(number: int, **fields) -> EngineOutput:
    logprobs = (TokenLogprobs(token_id=number, logprob=-1.0),)
    return EngineOutput(request_id="r", token_ids=(number,), logprobs=logprobs, **fields)


STOP = EngineOutput(request_id="r", finish_reason="stop", stop_token_id=0)
ERROR = EngineOutput(request_id="r", finish_reason="error", error="it failed", error_status=503, retry_after_s=3.0)


@given(st.lists(st.integers(0, 5), max_size=8), st.sampled_from([STOP, ERROR]))
def test_nothing_is_lost_however_they_are_read(reads: list[int], last: EngineOutput) -> None:
    """`reads`: outputs that come before each reading."""

    async def run() -> list[EngineOutput]:
        buffer = OutputBuffer()
        read = []
        number = 0
        for count in reads:
            for _ in range(count):
                buffer.put(token(number, num_cached_tokens=16 if number == 0 else 0))
                number += 1
            assert len(buffer) <= 1
            if count:
                read.append(await buffer.get())
        buffer.put(last)
        buffer.end()
        while (output := await buffer.get()) is not None:
            read.append(output)
        assert await buffer.get() is None
        return read

    read = asyncio.run(run())
    expected = tuple(range(sum(reads)))
    assert tuple(each for output in read for each in output.token_ids) == expected
    assert tuple(each.token_id for output in read for each in output.logprobs) == expected
    assert [output.finish_reason for output in read[:-1]] == [None] * (len(read) - 1)
    assert read[-1] == last
    if expected:
        assert read[0].num_cached_tokens == 16


def test_an_end_is_merged_with_the_tokens_before_it_and_an_error_is_not() -> None:
    async def run(last: EngineOutput) -> list[EngineOutput | None]:
        buffer = OutputBuffer()
        for output in (token(1), token(2), last):
            buffer.put(output)
        buffer.end()
        return [await buffer.get() for _ in range(len(buffer) + 1)]

    whole, end = asyncio.run(run(STOP))
    assert end is None
    assert (whole.token_ids, whole.finish_reason, whole.stop_token_id) == ((1, 2), "stop", 0)
    tokens, error, end = asyncio.run(run(ERROR))
    assert (tokens.token_ids, tokens.finish_reason, error, end) == ((1, 2), None, ERROR, None)


def test_outputs_come_from_another_thread() -> None:
    async def run() -> list[int]:
        buffer = OutputBuffer()
        thread = threading.Thread(target=lambda: [buffer.put(token(number)) for number in range(5000)])
        thread.start()
        read: list[int] = []
        while len(read) < 5000:
            read += (await buffer.get()).token_ids
        thread.join()
        return read

    assert asyncio.run(asyncio.wait_for(run(), 20)) == list(range(5000))


def test_a_stream_is_read_ahead_of_its_reader() -> None:
    async def run() -> None:
        given = asyncio.Event()

        async def outputs() -> AsyncIterator[EngineOutput]:
            for number in range(1000):
                yield token(number)
            given.set()
            yield STOP

        async with aclosing(read_ahead(outputs())) as ahead:
            first = await anext(ahead)
            await asyncio.wait_for(given.wait(), 5)  # nobody reads meanwhile
            rest = [output async for output in ahead]
        read = [*first.token_ids, *(each for output in rest for each in output.token_ids)]
        assert read == list(range(1000))
        assert len(rest) <= 2

    asyncio.run(run())


def test_a_stream_that_breaks_gives_its_tokens_first() -> None:
    read: list[int] = []

    async def outputs() -> AsyncIterator[EngineOutput]:
        yield token(1)
        yield token(2)
        raise ConnectionError("lost")

    async def run() -> None:
        async for output in read_ahead(outputs()):
            read.extend(output.token_ids)

    with pytest.raises(ConnectionError, match="lost"):
        asyncio.run(run())
    assert read == [1, 2]


def test_closing_it_stops_the_reading() -> None:
    async def run() -> None:
        closed = asyncio.Event()

        async def outputs() -> AsyncIterator[EngineOutput]:
            try:
                yield token(1)
                await asyncio.sleep(60)
            finally:
                closed.set()

        async with aclosing(read_ahead(outputs())) as ahead:
            await anext(ahead)
        assert closed.is_set()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
