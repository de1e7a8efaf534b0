"""The whole request path in one process: Renderer -> Engine -> Scheduler -> one ModelRunner. No Ray, no Serve.

Used where a test wants real models and real caches but not real processes.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from actors.messages import Command, EngineOutput, EngineRequest, RankOutput, SchedulerOutput, WarmUp
from actors.model_runner import ModelRunner
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan, make_plan
from configs.engine import EngineConfig
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import StatsRecorder
from neuron.collectives import create_collectives
from telemetry.prometheus import Recorder


class LocalGang:
    """One rank in this process, spoken to in the same bytes as a gang of processes."""

    def __init__(self, plan: EnginePlan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder
        self.start()

    def start(self) -> None:
        self.pixels = PixelMailbox()
        collectives = create_collectives("shared_memory", 0, 1, "local", 5.0)
        self.runner = ModelRunner(self._plan, collectives, self.pixels, self._recorder)

    def warm_up(self) -> None:
        for index, name in enumerate(self._plan.bucket_names(), start=1):
            self.runner.warm_up(WarmUp(step_id=-index, bucket=name))

    def step(self, output: SchedulerOutput, pixels: dict[str, Any], items: list[tuple[str, int]]) -> RankOutput:
        for mm_hash, _ in items:
            self.pixels.put(mm_hash, pixels[mm_hash])
        command = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=Command)
        answer = self.runner.execute(command)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=RankOutput)

    def check(self) -> None:
        pass

    def restart(self) -> None:
        self.start()

    def shutdown(self) -> None:
        pass


class LocalEngineClient:
    """EngineClient over an Engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        return self.engine.stream(request)

    async def reset_prefix_cache(self) -> None:
        await asyncio.wrap_future(self.engine.call(lambda scheduler: scheduler.reset_prefix_cache()))

    async def reset_encoder_cache(self) -> None:
        await asyncio.wrap_future(self.engine.call(lambda scheduler: scheduler.reset_encoder_cache()))

    async def health(self) -> bool:
        return self.engine.healthy


def start_engine(config: EngineConfig) -> tuple[Engine, LocalGang, Scheduler]:
    """An engine of one rank in this process, its loop running with integrity checks after every step."""
    assert config.parallel.world_size == 1
    gang = LocalGang(make_plan(config), Recorder(config.model.name, "0"))
    scheduler = Scheduler(config)
    engine = Engine(scheduler, gang, StatsRecorder(Recorder(config.model.name, "0")), check_invariants=True)
    engine.start()
    return engine, gang, scheduler
