"""Engines on a Renderer's node: requests go to them, and come back as tokens, over local sockets.

    LocalEngines  listens; an engine connects with the first call that Serve brings it from here
    LocalEngine   one connection: requests and their ends one way, each step's tokens of all requests the other way

By a call of Serve a request is 3 ms on its way, of some 15 to a short one's first token. It stays the way to an engine
that is not connected, or has as many requests from here as it runs at once: Serve then chooses among all of them.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from actors.messages import Abort, EngineOutput, EngineRequest, PixelFile, Submit
from deployments.local_socket import framed, is_own_user, new_socket, read_message
from deployments.output_buffer import OutputBuffer


class Receiving:
    """One request's outputs, as they come."""

    def __init__(self) -> None:
        self.buffer = OutputBuffer()
        self.complete = asyncio.Event()
        """The last of them is in the buffer."""

    def put(self, output: EngineOutput) -> None:
        self.buffer.put(output)
        if output.finish_reason is not None:
            self.complete.set()


class LocalEngines:
    """Puts what engines send into the buffer of its request; outputs of requests that are not here are dropped."""

    def __init__(self) -> None:
        self.address = f"\0tvs-outputs-{uuid.uuid4().hex}"
        """An abstract socket: it has no file, and is gone with this process."""
        self._engines: set[LocalEngine] = set()
        self._receiving: dict[str, Receiving] = {}
        self._decoder = msgspec.msgpack.Decoder(list[EngineOutput])
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listening = new_socket()
        listening.bind(self.address)
        self._server = await asyncio.start_unix_server(self._read, sock=listening)

    @property
    def started(self) -> bool:
        return self._server is not None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def choose(self, max_requests: int, with_pixels: bool = False) -> "LocalEngine | None":
        """The one with the fewest requests from here; None where each has `max_requests` of them."""
        engines = [engine for engine in self._engines if engine.opens_pixels or not with_pixels]
        engine = min(engines, key=len, default=None)
        return engine if engine is not None and len(engine) < max_requests else None

    @contextmanager
    def receiving(self, request_id: str) -> Iterator[Receiving]:
        """While this lasts the request's outputs are taken."""
        receiving = self._receiving[request_id] = Receiving()
        try:
            yield receiving
        finally:
            del self._receiving[request_id]

    async def generate(
        self, engine: "LocalEngine", request: EngineRequest, files: Mapping[str, PixelFile]
    ) -> AsyncGenerator[EngineOutput, None]:
        """The request's outputs. Where the engine is lost, the last says so with status 503."""
        with self.receiving(request.request_id) as receiving:
            engine.submit(request, files)
            try:
                while (output := await receiving.buffer.get()) is not None:
                    engine.opens_pixels &= not output.lost_mm_hashes
                    yield output
                    if output.finish_reason is not None:
                        return
            finally:
                engine.end(request.request_id, aborted=not receiving.complete.is_set())

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_own_user(writer.get_extra_info("socket")):
            writer.close()
            return
        engine = LocalEngine(writer)
        self._engines.add(engine)
        try:
            while True:
                for output in self._decoder.decode(await read_message(reader)):
                    self._put(output)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the engine has gone; of the requests that Serve brought it the calls say so
        finally:
            self._engines.discard(engine)
            writer.close()
            for request_id in engine.requests:
                lost = "the engine has closed its socket"
                self._put(EngineOutput(request_id=request_id, finish_reason="error", error=lost, error_status=503))

    def _put(self, output: EngineOutput) -> None:
        if (receiving := self._receiving.get(output.request_id)) is not None:
            receiving.put(output)


class LocalEngine:
    """One that has connected. `len`: requests that it has from here, over this socket."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self.requests: set[str] = set()
        self.opens_pixels = True
        """Until some that are here were not there for it: its container may have a /proc of its own."""

    def __len__(self) -> int:
        return len(self.requests)

    def submit(self, request: EngineRequest, files: Mapping[str, PixelFile]) -> None:
        """`files`: the pixels of its images, which must stay where they are until the request has ended."""
        self.requests.add(request.request_id)
        self._send(Submit(request=msgspec.structs.replace(request, pixels={}), pixel_files=dict(files)))

    def end(self, request_id: str, aborted: bool) -> None:
        """Nobody takes its outputs any more; `aborted`: before the last of them was there."""
        self.requests.discard(request_id)
        if aborted:
            self._send(Abort(request_id=request_id))

    def _send(self, message: Submit | Abort) -> None:
        self._writer.write(framed(self._encoder.encode(message)))
