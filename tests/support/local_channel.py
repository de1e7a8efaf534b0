"""Both ends of the socket between a Renderer and an engine, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from actors.messages import EngineOutput, EngineRequest
from deployments.renderer.local_engines import LocalEngines
from deployments.scheduler.local_renderers import LocalRenderer, LocalRenderers

Run = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine on one kind of event loop."""


def token(request_id: str, number: int, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=request_id, token_ids=(number,), **fields)


class Requests:
    """An engine that does nothing with them."""

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[EngineRequest, Callable[[EngineOutput], None]]] = {}
        self.aborted: list[str] = []
        self.healthy = True
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
