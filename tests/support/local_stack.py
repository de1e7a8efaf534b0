"""The whole request path in one process: Renderer -> Engine -> Scheduler -> ModelRunners. No Ray, no Serve.

Used where a test wants real models and real caches but not real processes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from actors.messages import Command, EngineOutput, EngineRequest, RankOutput, SchedulerOutput, WarmUp
from actors.model_runner import ModelRunner
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan, make_plan
from configs.engine import EngineConfig
from deployments.renderer.checkpoint import load_checkpoint
from deployments.renderer.routes import build_api
from deployments.renderer.serving import Renderer
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from neuron.vision_packing import pack
from telemetry.metrics import DEVICE_ENCODER_CACHE_EVICTIONS
from telemetry.recorder import ENGINE, Recorder, create_recorder
from tests.neuron.models.gang import Meeting, ThreadCollectives


class LocalGang:
    """The ranks as threads of this process, spoken to in the same bytes as a gang of processes."""

    def __init__(self, plan: EnginePlan, recorder: Recorder) -> None:
        self.plan = plan
        self._recorder = recorder
        self.start()

    def start(self) -> None:
        world_size = self.plan.config.parallel.world_size
        self._threads = ThreadPoolExecutor(world_size)
        self.pixels = [PixelMailbox() for _ in range(world_size)]
        meeting = Meeting(world_size)
        self.runners = [
            ModelRunner(self.plan, ThreadCollectives(meeting, rank, world_size), mailbox, self._recorder)
            for rank, mailbox in enumerate(self.pixels)
        ]
        self.runner = self.runners[0]

    def on_every_rank(self, call: Callable[[ModelRunner], RankOutput]) -> RankOutput:
        """Rank 0's answer; a rank of one runs on the calling thread."""
        if len(self.runners) == 1:
            return call(self.runner)
        first, *_ = self._threads.map(call, self.runners)
        return first

    def warm_up(self) -> None:
        for index, name in enumerate(self.plan.bucket_names(), start=1):
            command = WarmUp(step_id=-index, bucket=name)
            self.on_every_rank(lambda runner, command=command: runner.warm_up(command))  # type: ignore[misc]

    def step(
        self,
        output: SchedulerOutput,
        pixels: dict[str, Any],
        items: list[tuple[str, int]],
        meanwhile: Callable[[], None],
    ) -> RankOutput:
        meanwhile()
        rounds = pack(items, self.plan.vision_patches, len(self.runners), self.plan.merge_area)
        for vision_round in rounds:
            for mailbox, block in zip(self.pixels, vision_round.blocks, strict=True):
                for image in block:
                    mailbox.put(image.mm_hash, pixels.get(image.mm_hash))
        command = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=Command)
        answer = self.on_every_rank(lambda runner: runner.execute(command))
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


class Stack:
    """Renderer, engine and ranks in this process, spoken to over HTTP's own interface (ASGI).

    `counts` says what happened inside; the engine checks its invariants after every step unless told otherwise.
    """

    def __init__(
        self,
        config: EngineConfig,
        check_invariants: bool = True,
        make_gang: type[LocalGang] = LocalGang,
        find_lost: Callable[[dict[str, Any]], list[str]] = lambda pixels: [],
    ) -> None:
        recorder = create_recorder(config.model, ENGINE)
        plan = make_plan(config)
        config = plan.config
        self.gang = make_gang(plan, recorder)
        self.scheduler = Scheduler(config)
        self.counts: Counter[str] = Counter()
        self._count_stats()
        stats = EngineStats(config, recorder, ENGINE, time.monotonic())
        self.engine = Engine(self.scheduler, self.gang, stats, check_invariants, find_lost)
        self.engine.start()
        self.renderer = Renderer(config, load_checkpoint(config), LocalEngineClient(self.engine), recorder)
        self.api = build_api(self.renderer, config, lambda: (b"", "text/plain"))
        transport = httpx.ASGITransport(self.api)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://stack", timeout=300)

    def _count_stats(self) -> None:
        take_stats, step = self.scheduler.take_stats, self.gang.step

        def counting_take_stats() -> Any:
            stats = take_stats()
            self.counts["preemptions"] += stats.num_preemptions
            self.counts["prefix_hits"] += stats.prefix_hits
            self.counts["encoder_hits"] += stats.encoder.hits
            return stats

        def counting_step(*arguments: Any) -> RankOutput:
            answer = step(*arguments)
            self.counts["evicted_blocks"] += answer.counters.get(DEVICE_ENCODER_CACHE_EVICTIONS.name, 0)
            return answer

        self.scheduler.take_stats = counting_take_stats  # type: ignore[method-assign]
        self.gang.step = counting_step  # type: ignore[method-assign]

    async def answer(self, messages: list[dict[str, Any]], max_tokens: int = 24, min_tokens: int = 0) -> str:
        """The greedy answer to a chat."""
        body = {"model": "digits-vl", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        body["min_tokens"] = min_tokens
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def close(self) -> None:
        self.renderer.close()
        self.engine.stop()
