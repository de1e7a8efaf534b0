"""Stages: the spans of a step on the reporting rank, and the seconds that each stage took."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from actors.messages import SchedulerOutput
from telemetry import spans
from telemetry.span_notes import SpanNotes

_NOTHING: AbstractContextManager[None] = nullcontext()


class Stages:
    """Used as `with stages.step(...)`, and inside it `with stages("forward")`. Ranks that do not report do nothing."""

    def __init__(self, reports: bool) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage in the step at hand."""
        self._reports = reports
        self._spans: SpanNotes | None = None

    def step(self, output: SchedulerOutput, traces: Sequence[spans.Link | None]) -> AbstractContextManager[None]:
        """`traces`: of the requests scheduled. The span is in the first recorded one and links to all of them."""
        self.seconds = {}
        return self._step(output, traces) if self._reports and spans.seen() else _NOTHING

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._stage(name) if self._reports else _NOTHING

    @contextmanager
    def _step(self, output: SchedulerOutput, traces: Sequence[spans.Link | None]) -> Iterator[None]:
        total, prefill = output.total_num_scheduled_tokens, output.num_prefill_tokens
        counts = {"prefill": prefill, "decode": total - prefill, "total": total, "reqs": len(traces)}
        # The choices of one request share its span.
        links = list({link.context.span_id: link for link in traces if link is not None}.values())
        step = SpanNotes(links[0] if links else None, links)
        step.begin("step", {"step_id": output.step_id, "phase": output.phase})
        step.mark("step_meta: " + " ".join(f"{key}={value}" for key, value in counts.items()), counts)
        self._spans = step
        try:
            yield
        except BaseException as error:
            step.end(error)
            raise
        else:
            step.end()
        finally:
            self._spans = None

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        if self._spans is not None:
            self._spans.begin(name)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
            if self._spans is not None:
                self._spans.end(error)
