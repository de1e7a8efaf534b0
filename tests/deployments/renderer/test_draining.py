"""A Renderer that is to end: what it has is finished, what comes is told to go elsewhere."""

import asyncio
from typing import Any

import httpx

from deployments.renderer.draining import Drain, DrainMiddleware


class App:
    """Answers when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/metrics":
            await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


def test_what_runs_is_finished_and_what_comes_is_refused() -> None:
    async def check() -> None:
        app, drain = App(), Drain()
        transport = httpx.ASGITransport(DrainMiddleware(app, drain))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            running = asyncio.create_task(http.post("/v1/completions"))
            await asyncio.sleep(0.01)
            finishing = asyncio.create_task(drain.finish(30))
            await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "shutting_down"
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/metrics")).status_code == 200
            assert not finishing.done()
            app.may.set()
            assert (await running).text == "done"
            assert await finishing == 0

    asyncio.run(asyncio.wait_for(check(), 10))


def test_it_waits_no_longer_than_it_is_told() -> None:
    async def check() -> None:
        app, drain = App(), Drain()
        transport = httpx.ASGITransport(DrainMiddleware(app, drain))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            running = asyncio.create_task(http.get("/v1/models"))
            await asyncio.sleep(0.01)
            assert await drain.finish(0.05) == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert await drain.finish(1) == 0

    asyncio.run(asyncio.wait_for(check(), 10))
