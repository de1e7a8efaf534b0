"""The end of a Renderer: it takes no more requests, and those that it has come to theirs."""

import asyncio
import json

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.renderer.errors import APIError

_ALWAYS = ("/metrics", "/version")
"""Answered until the end, and waited for by nobody."""


class Drain:
    """Counts the requests at hand. Lives on one event loop."""

    def __init__(self) -> None:
        self.started = False
        self.num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.num_requests += 1
        self._idle.clear()

    def end(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._idle.set()

    async def finish(self, timeout_s: float) -> int:
        """From now on new requests get 503. Returns how many of the old ones are left after at most `timeout_s`."""
        self.started = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.num_requests


class DrainMiddleware:
    """Keeps a Drain informed and new requests out once it has started; /health fails then, for load balancers."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
        elif self._drain.started:
            await _refuse(send)
        else:
            self._drain.begin()
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.end()


async def _refuse(send: Send) -> None:
    error = APIError("the server is shutting down", status=503, code="shutting_down", retry_after=5)
    headers = {"Content-Type": "application/json", "Connection": "close", **error.headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})
