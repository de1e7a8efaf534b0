"""The Scheduler deployment: one replica is one engine with one gang of ranks. A thin shell over Engine."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial

from actors.messages import EngineOutput, EngineRequest
from actors.plan import make_plan
from configs.engine import EngineConfig
from deployments.scheduler.local_renderers import LocalRenderers
from telemetry import spans
from telemetry.logs import configure
from telemetry.recorder import ENGINE, create_recorder, replica_tags
from telemetry.start_report import StartReport


class SchedulerDeployment:
    """Starts the gang in its constructor, so that a replica is ready when its engine is."""

    def __init__(self, config: EngineConfig) -> None:
        import ray

        from actors.rank_group import RankGroup
        from actors.step_channel import RankFailure
        from deployments.scheduler.crash_loop import start_patiently
        from deployments.scheduler.engine import Engine
        from deployments.scheduler.readers import Readers, find_lost
        from deployments.scheduler.scheduler import Scheduler
        from deployments.scheduler.stats import EngineStats

        begin = time.monotonic()
        logger = configure()
        spans.configure("scheduler", config.telemetry.spans_file)
        plan = make_plan(config, neuron_cores=int(ray.cluster_resources().get("neuron_cores", 0)))
        config = plan.config
        logger.info("plan: %s", ", ".join(f"{key}={value}" for key, value in plan.describe().items()))
        for line in plan.memory.table():
            logger.info("%s", line)
        tags = replica_tags()
        group = RankGroup(
            plan, StartReport(), ENGINE, placement_group=ray.util.get_current_placement_group(), ray_tags=tags
        )
        stats = EngineStats(config, create_recorder(config.model, ENGINE, tags), ENGINE, time.monotonic())

        def on_failure(failure: RankFailure) -> None:
            logger.error("%s; starting the gang again", failure)
            stats.record_restart(failure)
            group.shutdown()

        try:
            start_patiently(group.start, on_failure)
        except BaseException:
            group.shutdown()
            raise
        figures = group.start_figures
        stats.record_start(time.monotonic() - begin, figures.load_seconds, figures.load_bytes, figures.compile_seconds)
        self._engine = Engine(Scheduler(config), group, stats, config.debug.check_invariants, find_lost)
        self._engine.start()
        self._readers = Readers(self._engine.drop)
        self._renderers = LocalRenderers(self._engine)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Compute a request, which a consumer that goes away, or dies, aborts. Its tokens go out as they are sampled:
        to the socket that it names, or as items of this stream where that is not on this node."""
        with self._readers.reading(request):
            renderer = await self._renderers.to(request.outputs_to)
            if renderer is None:
                async for output in self._engine.stream(request):
                    yield output
                return
            try:
                await renderer.carry(request.request_id, partial(self._engine.submit, request, renderer.put))
                return
            except ConnectionError as error:
                lost = str(error)
            finally:
                self._engine.abort(request.request_id)
            yield EngineOutput(request_id=request.request_id, finish_reason="error", error=lost, error_status=503)

    async def reset_prefix_cache(self) -> None:
        """Forget every KV block that no running request holds."""
        await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.reset_prefix_cache()))

    async def reset_encoder_cache(self) -> None:
        """Forget every cached image that no running request holds, here and on the ranks."""
        await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.reset_encoder_cache()))

    async def ready(self, outputs_to: str | None = None) -> int:
        """The replica's process id, while the engine runs. It connects to the Renderer that listens at `outputs_to`."""
        self.check_health()
        await self._renderers.to(outputs_to)
        return os.getpid()

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._engine.healthy:
            raise RuntimeError(f"the engine stopped: {self._engine.failure!r}")

    def __del__(self) -> None:
        """Serve calls this when it stops the replica."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
        spans.shutdown()
