"""OutputBuffer: a request's outputs between who makes them and who reads them, who may be slow or not there yet."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import msgspec

from actors.messages import EngineOutput, TokenLogprobs


class Merged:
    """Outputs of a request in a row, as one."""

    def __init__(self, output: EngineOutput) -> None:
        self._last = output
        self._several = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_cached_tokens = 0

    def add(self, output: EngineOutput) -> None:
        if not self._several:
            self._several = True
            self._take(self._last)
        self._take(output)
        self._last = output

    def output(self) -> EngineOutput:
        if not self._several:
            return self._last
        return msgspec.structs.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _take(self, output: EngineOutput) -> None:
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)


def append(unread: deque[Merged], output: EngineOutput) -> None:
    """Behind what nobody has read yet. An error stays apart from the tokens before it, which its reader sees first."""
    if not unread or output.error is not None:
        unread.append(Merged(output))
    else:
        unread[-1].add(output)


class OutputBuffer:
    """Outputs that nobody has read yet are merged into one.

    `put` never waits: who reads slowly holds nobody up, finds every token when they come, and costs no more than the
    tokens of one answer, `max_tokens` of them with the log probabilities asked for.
    """

    def __init__(self) -> None:
        """On the event loop of its reader."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._readable = asyncio.Event()
        self._unread: deque[Merged] = deque()
        self._ended = False

    def __len__(self) -> int:
        """Outputs to read: two at most, tokens and an error."""
        return len(self._unread)

    def put(self, output: EngineOutput) -> None:
        """From any thread."""
        with self._lock:
            wake = not self._unread
            append(self._unread, output)
        if wake:
            self._wake()

    def end(self) -> None:
        """No output will follow."""
        self._ended = True
        self._wake()

    async def get(self) -> EngineOutput | None:
        """All that came since the last call, as one output; waits for the first. None behind the last."""
        await self._readable.wait()
        with self._lock:
            if not self._unread:
                return None
            first = self._unread.popleft()
            if not self._unread and not self._ended:
                self._readable.clear()
        return first.output()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._readable.set()
            return
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._readable.set)


async def read_ahead(
    outputs: AsyncIterator[EngineOutput], buffer: OutputBuffer | None = None
) -> AsyncGenerator[EngineOutput, None]:
    """The same outputs, those merged that came while nobody read here. Closing it stops the reading.

    `buffer`: what others put into it comes along.
    """
    buffer = OutputBuffer() if buffer is None else buffer

    async def fill() -> None:
        try:
            async for output in outputs:
                buffer.put(output)
        finally:
            buffer.end()

    filling = asyncio.ensure_future(fill())
    try:
        while (output := await buffer.get()) is not None:
            yield output
        await filling
    finally:
        filling.cancel()
        await asyncio.wait((filling,))
