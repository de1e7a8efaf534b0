"""The Renderer deployment: the HTTP ingress. A thin shell over `serving.Renderer` and its FastAPI routes."""

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from actors.messages import EngineOutput, EngineRequest
from configs.engine import EngineConfig
from deployments.renderer.announce import announce
from telemetry import metrics, prometheus
from telemetry.logs import configure


class ServeEngineClient:
    """EngineClient over the Scheduler deployment's handle."""

    def __init__(self, handle: Any) -> None:
        # Pixels travel as object references inside the request, so requests go by actor call, not by Serve's gRPC.
        self._handle = handle.options(_by_reference=True)
        self._stream = handle.options(stream=True, _by_reference=True)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        response = self._stream.generate.remote(request)
        try:
            async for output in response:
                yield output
        finally:
            response.cancel()

    async def reset_prefix_cache(self) -> None:
        await self._handle.reset_prefix_cache.remote()

    async def reset_encoder_cache(self) -> None:
        await self._handle.reset_encoder_cache.remote()

    async def health(self) -> bool:
        return bool(await self._handle.ready.remote())


@dataclass(frozen=True)
class _Counter:
    recorder: prometheus.Recorder
    metric: metrics.Metric

    def inc(self, amount: float = 1) -> None:
        self.recorder.add(self.metric, amount)


class ProcessorCacheCounters:
    """What the processor cache counts with."""

    def __init__(self, recorder: prometheus.Recorder) -> None:
        self.mm_cache_queries = _Counter(recorder, metrics.MM_CACHE_QUERIES)
        self.mm_cache_hits = _Counter(recorder, metrics.MM_CACHE_HITS)
        self.mm_cache_queries.inc(0)
        self.mm_cache_hits.inc(0)


class RendererDeployment:
    """Waits for the engine in its constructor, so that the ingress is ready only when it can answer."""

    async def __init__(self, config: EngineConfig, scheduler: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        import ray

        from deployments.renderer.checkpoint import load_checkpoint
        from deployments.renderer.routes import build_api
        from deployments.renderer.serving import Renderer

        configure()
        checkpoint = load_checkpoint(config, hide_torch=True)
        engine = ServeEngineClient(scheduler)
        counters = ProcessorCacheCounters(prometheus.Recorder(config.model.name, "0"))
        self._renderer = Renderer(config, checkpoint, engine, counters, store=ray.put)
        self._api = build_api(self._renderer, config, prometheus.render)
        await engine.health()
        threading.Thread(target=announce, args=(config.model.name,), name="announce", daemon=True).start()

    def __serve_build_asgi_app__(self) -> Any:
        return self._api

    def __del__(self) -> None:
        """Serve calls this when it stops the replica."""
        renderer = getattr(self, "_renderer", None)
        if renderer is not None:
            renderer.close()
