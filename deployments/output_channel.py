"""Outputs of many requests over one local socket, from an engine to a Renderer on the same node, a message per step.

A request is a streaming call of Serve, which says when it is taken, when it ends, that it is cancelled, and that its
replica is lost. An item of such a stream costs both processes more than everything else that a token needs, so tokens
go beside it where the two share a node; between nodes they are the items of the stream (`server.output_channel`).

    OutputReceiver  the Renderer's end: listens
    OutputSender    an engine's end, one for each Renderer: bounded as OutputBuffer is, and it waits for nobody
"""

import asyncio
import os
import socket
import struct
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from actors.messages import EngineOutput
from deployments.output_buffer import Merged, OutputBuffer, append

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group id, as the kernel tells them of a local socket's other end."""


class Receiving:
    """One request's outputs, as they come."""

    def __init__(self) -> None:
        self.buffer = OutputBuffer()
        self.complete = asyncio.Event()
        """The last of them is in the buffer."""


class OutputReceiver:
    """Puts what engines send into the buffer of its request; outputs of requests that are not here are dropped."""

    def __init__(self) -> None:
        self.address = f"\0tvs-outputs-{uuid.uuid4().hex}"
        """An abstract socket: it has no file, and is gone with this process."""
        self._receiving: dict[str, Receiving] = {}
        self._decoder = msgspec.msgpack.Decoder(list[EngineOutput])
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listening = _new_socket()
        listening.bind(self.address)
        self._server = await asyncio.start_unix_server(self._read, sock=listening)

    @property
    def started(self) -> bool:
        return self._server is not None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @contextmanager
    def receiving(self, request_id: str) -> Iterator[Receiving]:
        """While this lasts the request's outputs are taken."""
        receiving = self._receiving[request_id] = Receiving()
        try:
            yield receiving
        finally:
            del self._receiving[request_id]

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_user = _is_own_user(writer.get_extra_info("socket"))
        try:
            while own_user:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                for output in self._decoder.decode(await reader.readexactly(length)):
                    if (receiving := self._receiving.get(output.request_id)) is not None:
                        receiving.buffer.put(output)
                        if output.finish_reason is not None:
                            receiving.complete.set()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the engine has gone; its requests' calls say so
        finally:
            writer.close()


class OutputSender:
    """Outputs that could not be sent yet are merged into one per request. Lives on the event loop that connected it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # `drain` returns when the kernel has everything
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._readable = asyncio.Event()
        self._unread: dict[str, deque[Merged]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self.closed = False
        """The other end has gone."""
        self._tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._watch(reader))]

    @classmethod
    async def connect(cls, address: str) -> "OutputSender":
        """Raises OSError where nobody listens, as on another node."""
        connection = _new_socket()
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
            if not _is_own_user(connection):
                raise PermissionError("the socket is another user's")
        except BaseException:
            connection.close()
            raise
        return cls(*await asyncio.open_unix_connection(sock=connection))

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
        """What is not sent yet is dropped."""
        with self._lock:
            self.closed = True
            self._unread = {}
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
                self._writer.write(_LENGTH.pack(len(message)) + message)
                await self._writer.drain()
            except OSError:
                self.close()
                return
            for output in outputs:
                end = self._ends.get(output.request_id) if output.finish_reason is not None else None
                if end is not None and not end.done():
                    end.set_result(None)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """The other end sends nothing: what can be read is its end."""
        with suppress(OSError):
            await reader.read(1)
        self.close()


class OutputSenders:
    """An engine's senders by address. Lives on one event loop."""

    def __init__(self) -> None:
        self._senders: dict[str, asyncio.Task[OutputSender]] = {}

    async def to(self, address: str | None) -> OutputSender | None:
        """The one to this address; None where nobody listens at it on this node."""
        if address is None:
            return None
        task = self._senders.get(address)
        if task is None or (task.done() and (task.exception() is not None or task.result().closed)):
            self._forget_closed()
            task = self._senders[address] = asyncio.ensure_future(OutputSender.connect(address))
        try:
            return await asyncio.shield(task)
        except OSError:
            return None

    def _forget_closed(self) -> None:
        for address, task in list(self._senders.items()):
            if task.done() and (task.exception() is not None or task.result().closed):
                del self._senders[address]


def _gone() -> ConnectionError:
    return ConnectionError("the Renderer has closed its socket")


def _new_socket() -> socket.socket:
    """To give to the event loop: uvloop itself knows no abstract addresses."""
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new.setblocking(False)
    return new


def _is_own_user(connection: Any) -> bool:
    """Whether the other end belongs to this process's user: an abstract socket has no file whose mode would say so."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:  # uvloop's own has no getsockopt
        credentials = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
