"""Renderer and Engine of this process over a simulated rank, behind real HTTP: everything but Ray and the model."""

import asyncio
import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import uvicorn

from actors.messages import RankOutput, SchedulerOutput, TokenLogprobs
from configs.engine import EngineConfig
from deployments.renderer.checkpoint import Checkpoint
from deployments.renderer.routes import build_api
from deployments.renderer.serving import Renderer
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from telemetry.metrics import Metric
from telemetry.recorder import Recorder
from tests.deployments.scheduler.simulation import VOCABULARY, FakeRank
from tests.support.local_stack import LocalEngineClient

SEND_BUFFER = 16 * 1024
"""Bytes that the kernel takes for a client that does not read."""


class QuickRank(FakeRank):
    """Checks no KV, so that a step costs the same however long its requests are. The token tells its position."""

    def _compute(self, request_id: str, computed: int, count: int, _: set[tuple[int, int]]) -> TokenLogprobs | None:
        tokens = self.tokens[request_id]
        if computed + count < len(tokens):
            return None
        return TokenLogprobs(token_id=(len(tokens) * 7 + len(tokens) // 5) % VOCABULARY, logprob=-1.0)


class SimulatedGang:
    """`step_s`: what a step takes at least."""

    def __init__(self, config: EngineConfig, make_rank: type[FakeRank], step_s: float) -> None:
        self._config, self._make_rank, self._step_s = config, make_rank, step_s
        self.rank = make_rank(config)

    def step(
        self,
        output: SchedulerOutput,
        pixels: dict[str, Any],
        items: list[tuple[str, int]],
        meanwhile: Callable[[], None],
    ) -> RankOutput:
        meanwhile()
        assert set(pixels) == {mm_hash for mm_hash, _ in items}
        time.sleep(self._step_s)
        return RankOutput(step_id=output.step_id, rank=0, sampled=self.rank.run(output))

    def check(self) -> None: ...

    def restart(self) -> None:
        self.rank = self._make_rank(self._config)

    def shutdown(self) -> None: ...


class Gauges(Recorder):
    """Keeps gauges, and counters by their labels."""

    def __init__(self) -> None:
        super().__init__([])
        self.values: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def set(self, metric: Metric, value: float, **_: str) -> None:
        self.values[metric.name] = value

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        name = ",".join((metric.name, *labels.values()))
        self.counts[name] = self.counts.get(name, 0.0) + amount


class Pixels:
    """What `store` gives for an array: the object that references lead to."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class SimulatedStack:
    """Listens on `port` of this machine. Use as a context manager."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, make_rank: type[FakeRank] = FakeRank, step_s: float = 0.0
    ) -> None:
        """With `debug.check_invariants` the scheduler's bookkeeping is checked after every step."""
        self.recorder = Gauges()
        self.scheduler = Scheduler(config)
        self.gang = SimulatedGang(config, make_rank, step_s)
        stats = EngineStats(config, self.recorder, "0", time.monotonic())
        self.engine = Engine(self.scheduler, self.gang, stats, config.debug.check_invariants)
        self.pixels: weakref.WeakSet[Pixels] = weakref.WeakSet()
        """Those that somebody holds."""
        self.renderer = Renderer(config, checkpoint, LocalEngineClient(self.engine), self.recorder, self._store)
        api = build_api(self.renderer, config, lambda: (b"", "text/plain"))
        self._server = uvicorn.Server(uvicorn.Config(api, lifespan="off", log_level="error"))
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of the connections, too
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def __enter__(self) -> "SimulatedStack":
        self.engine.start()
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()
        self.renderer.close()
        self.engine.stop()
        assert self.engine.failure is None

    def tasks(self) -> int:
        """Unfinished tasks on the server's event loop."""
        return len(asyncio.all_tasks(self._loop))

    def connections(self) -> int:
        """Of the server, with open sockets: a socket is closed in the callback that forgets its connection."""

        async def count() -> int:
            return len(self._server.server_state.connections)

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(10)

    def reset_caches(self) -> None:
        """Give back what caches keep; what is still held then is held by somebody."""
        self._loop.call_soon_threadsafe(self.renderer.processor_cache.reset)
        self.engine.call(lambda scheduler: scheduler.reset_encoder_cache()).result(10)

    def held_pixels(self) -> int:
        gc.collect()
        return len(self.pixels)

    def _store(self, array: np.ndarray) -> Pixels:
        pixels = Pixels(array)
        self.pixels.add(pixels)
        return pixels

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())


def wait_until(condition: Callable[[], bool], seconds: float = 20.0, what: str = "the condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds:g} s"
        time.sleep(0.005)
