"""Stages: the spans of a step on the reporting rank, and the seconds that each stage took."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from actors.messages import SchedulerOutput
from telemetry import spans

_NOTHING: AbstractContextManager[None] = nullcontext()


class Stages:
    """Used as `with stages.step(...)`, and inside it `with stages("forward")`. Ranks that do not report do nothing."""

    def __init__(self, reports: bool) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage in the step at hand."""
        self._reports = reports
        self._contexts: list[spans.Context] = [None]

    def step(self, output: SchedulerOutput, contexts: Sequence[spans.Context]) -> AbstractContextManager[None]:
        """`contexts`: of the requests scheduled. The span is in the first sampled trace and links to all of them."""
        self.seconds = {}
        return self._step(output, contexts) if self._reports else _NOTHING

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._stage(name) if self._reports else _NOTHING

    @contextmanager
    def _step(self, output: SchedulerOutput, contexts: Sequence[spans.Context]) -> Iterator[None]:
        links = spans.links_to(contexts) if spans.recording() else []
        attributes: dict[str, Any] = {"step_id": output.step_id, "phase": output.phase} if links else {}
        opened = spans.open_span("step", spans.parent_of(links), attributes, links)
        self._contexts = [opened.context if opened else None]
        if opened:
            total, prefill = output.total_num_scheduled_tokens, output.num_prefill_tokens
            counts = {"prefill": prefill, "decode": total - prefill, "total": total, "reqs": len(contexts)}
            name = "step_meta: " + " ".join(f"{key}={value}" for key, value in counts.items())
            spans.mark(name, self._contexts[-1], counts)
        try:
            yield
        finally:
            if opened:
                opened.end()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        with spans.span(name, self._contexts[-1]) as opened:
            self._contexts.append(opened.context if opened else None)
            try:
                yield
            finally:
                self._contexts.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
