"""An engine that says what a test tells it to, and remembers what it was asked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from actors.messages import EngineOutput, EngineRequest
from telemetry import metrics
from telemetry.recorder import Recorder

Script = Callable[[EngineRequest], list]
"""Of a request: EngineOutputs to give, seconds to wait, exceptions to raise, in order."""


class FakeEngine:
    """EngineClient by script. `aborted` holds the requests whose iterator was closed before its end."""

    def __init__(self) -> None:
        self.script: Script = lambda request: [finish(request)]
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.abort_seen = threading.Event()
        self.healthy = True
        self.resets: list[str] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        finished = False
        try:
            for step in self.script(request):
                if isinstance(step, BaseException):
                    finished = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                await asyncio.sleep(0)  # as any engine behind a connection would
                finished = step.finish_reason is not None
                yield step
            finished = True
        finally:
            if not finished:
                self.aborted.append(request.request_id)
                self.abort_seen.set()

    async def reset_prefix_cache(self) -> None:
        self.resets.append("prefix")

    async def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")

    async def health(self) -> bool:
        return self.healthy


class Counters(Recorder):
    """Keeps the counters in memory and drops everything else."""

    def __init__(self) -> None:
        super().__init__([])
        self.counts: dict[str, float] = {}

    def add(self, metric: metrics.Metric, amount: float = 1, **labels: str) -> None:
        key = ",".join((metric.name, *labels.values()))
        self.counts[key] = self.counts.get(key, 0) + amount

    @property
    def values(self) -> tuple[float, float]:
        """(queries, hits) of the processor cache."""
        return self.counts.get(metrics.MM_CACHE_QUERIES.name, 0), self.counts.get(metrics.MM_CACHE_HITS.name, 0)


def tokens(request: EngineRequest, *token_ids: int, **fields) -> EngineOutput:
    return EngineOutput(request_id=request.request_id, token_ids=token_ids, **fields)


def finish(request: EngineRequest, reason: str = "stop", **fields) -> EngineOutput:
    return EngineOutput(request_id=request.request_id, finish_reason=reason, **fields)


def say(token_ids: list[int], *, per_output: int = 1, reason: str = "stop", eos: int | None = 507, **fields) -> Script:
    """A script that gives these tokens, `per_output` at a time, and ends."""

    def script(request: EngineRequest) -> list:
        steps = [
            tokens(request, *token_ids[i : i + per_output], **fields) for i in range(0, len(token_ids), per_output)
        ]
        return [*steps, finish(request, reason, stop_token_id=eos if reason == "stop" else None, **fields)]

    return script
