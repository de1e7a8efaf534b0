"""Renderers on an engine's node: over a local socket each sends requests, and gets its tokens, a message per step.

A request comes over the socket, or as a streaming call of Serve, which says when it is taken, when it ends, that it is
cancelled, and that its replica is lost. An item of such a stream costs both processes more than everything else that a
token needs, so tokens of both go over the socket. Between nodes they are the items of the stream.

    LocalRenderers  one for each engine: connects to where a Renderer listens (`deployments.renderer.local_engines`)
    LocalRenderer   one connection: its outputs are bounded as OutputBuffer is, and it waits for nobody
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from actors.messages import Abort, EngineOutput, EngineRequest, PixelFile, Submit
from actors.pixel_memory import PixelMemory
from deployments.local_socket import framed, is_own_user, new_socket, read_message
from deployments.output_buffer import Merged, append

logger = logging.getLogger("trn_vision_serve")


class Submits(Protocol):
    """What a connection needs of an Engine."""

    def submit(self, request: EngineRequest, on_output: Callable[[EngineOutput], None]) -> None: ...

    def abort(self, request_id: str) -> None: ...

    @property
    def healthy(self) -> bool: ...


class LocalRenderer:
    """Outputs that could not be sent yet are merged into one per request. Lives on the event loop that connected it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        engine: Submits,
        memories: WeakValueDictionary[str, PixelMemory],
    ) -> None:
        """`memories`: pixels that are open already, by name."""
        writer.transport.set_write_buffer_limits(high=0)  # `drain` returns when the kernel has everything
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._engine = engine
        self._memories = memories
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Submit | Abort)
        self._lock = threading.Lock()
        self._readable = asyncio.Event()
        self._unread: dict[str, deque[Merged]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._submitted: set[str] = set()
        """Requests that came over this socket and have not ended."""
        self.closed = False
        """The other end has gone."""
        self._tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive(reader))]

    def __len__(self) -> int:
        """Requests with outputs to send."""
        return len(self._unread)

    def put(self, output: EngineOutput) -> None:
        """From any thread."""
        with self._lock:
            if self.closed:
                return
            wake = not self._unread
            append(self._unread.setdefault(output.request_id, deque()), output)
            if output.finish_reason is not None:
                self._submitted.discard(output.request_id)
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._readable.set)

    async def carry(self, request_id: str, submit: Callable[[], None]) -> None:
        """`submit` a request that `put`s its outputs here; returns once the last of them is sent.

        Raises ConnectionError when the other end has gone.
        """
        end = self._ends[request_id] = self._loop.create_future()
        try:
            if self.closed:
                raise _gone()
            submit()
            await end
        finally:
            del self._ends[request_id]
            with self._lock:
                self._unread.pop(request_id, None)

    def close(self) -> None:
        """What is not sent yet is dropped, and what came over the socket aborted."""
        with self._lock:
            self.closed = True
            self._unread = {}
            submitted, self._submitted = self._submitted, set()
        for request_id in submitted:
            self._engine.abort(request_id)
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(_gone())

    async def _send(self) -> None:
        while True:
            await self._readable.wait()
            with self._lock:
                unread, self._unread = self._unread, {}
                self._readable.clear()
            outputs = [merged.output() for waiting in unread.values() for merged in waiting]
            message = self._encoder.encode(outputs)
            try:
                self._writer.write(framed(message))
                await self._writer.drain()
            except OSError:
                self.close()
                return
            for output in outputs:
                end = self._ends.get(output.request_id) if output.finish_reason is not None else None
                if end is not None and not end.done():
                    end.set_result(None)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Requests and aborts, until the other end has gone."""
        try:
            while True:
                self._take(self._decoder.decode(await read_message(reader)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:
            logger.exception("a Renderer's message cannot be understood")
        self.close()

    def _take(self, message: Submit | Abort) -> None:
        """Nothing of it stays here: who waits for the next message would hold this one's pixels."""
        if isinstance(message, Abort):
            self._abort(message.request_id)
            return
        if not self._engine.healthy:  # refusing at once it would have the fewest requests, and get the next one, too
            self.close()
            return
        with self._lock:
            self._submitted.add(message.request.request_id)
        pixels = self._open(message.pixel_files)
        self._engine.submit(msgspec.structs.replace(message.request, pixels=pixels), self.put)

    def _abort(self, request_id: str) -> None:
        with self._lock:
            self._submitted.discard(request_id)
            self._unread.pop(request_id, None)
        self._engine.abort(request_id)

    def _open(self, files: Mapping[str, PixelFile]) -> dict[str, PixelMemory]:
        """Those that are still there: of what is missing the engine tells the Renderer."""
        pixels = {}
        for mm_hash, file in files.items():
            memory = self._memories.get(file.name)
            if memory is None:
                try:
                    memory = self._memories[file.name] = PixelMemory.open(file)
                except OSError as error:
                    # As text: who keeps the error keeps its traceback, and with it the pixels of the others.
                    logger.warning("pixels of image %s: %s", mm_hash, str(error))
                    continue
            pixels[mm_hash] = memory
        return pixels


class LocalRenderers:
    """An engine's connections by address. Lives on one event loop."""

    def __init__(self, engine: Submits) -> None:
        self._engine = engine
        self._memories: WeakValueDictionary[str, PixelMemory] = WeakValueDictionary()
        self._renderers: dict[str, asyncio.Task[LocalRenderer]] = {}

    async def to(self, address: str | None) -> LocalRenderer | None:
        """The one to this address; None where nobody listens at it on this node, or the engine has ended."""
        if address is None or not self._engine.healthy:
            return None
        task = self._renderers.get(address)
        if task is None or _is_over(task):
            self._renderers = {known: other for known, other in self._renderers.items() if not _is_over(other)}
            task = self._renderers[address] = asyncio.ensure_future(self._connect(address))
        try:
            return await asyncio.shield(task)
        except OSError:
            return None

    async def _connect(self, address: str) -> LocalRenderer:
        """Raises OSError where nobody listens, as on another node."""
        connection = new_socket()
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
            if not is_own_user(connection):
                raise PermissionError("the socket is another user's")
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return LocalRenderer(reader, writer, self._engine, self._memories)


def _is_over(task: asyncio.Task[LocalRenderer]) -> bool:
    return task.done() and (task.exception() is not None or task.result().closed)


def _gone() -> ConnectionError:
    return ConnectionError("the Renderer has closed its socket")
