"""What happens to a request whose client has left: its work is cancelled, and with it the engine's."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.renderer.generation import close

T = TypeVar("T")


class ReceiveMiddleware:
    """Where the server's `receive` fails, the client has left: Ray Serve's raises when it has cancelled the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_left() -> Message:
            try:
                return await receive()
            except Exception:
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_left, send)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects; then raises ClientDisconnect.

    The request's body must have been read: what comes behind it can only be the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, closed with the connection."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_chain(first, rest), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Starlette drops a body that it could not send whole, and leaves closing it to the garbage collector.
            await close(self.body_iterator, self._rest)  # type: ignore[arg-type]  # generators, both


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk
