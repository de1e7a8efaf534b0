"""Timeline: when a request was queued, scheduled first and given its tokens; as metrics, and as spans."""

from actors.messages import EngineRequest
from telemetry import metrics, spans
from telemetry.recorder import Recorder
from telemetry.span_notes import SpanNotes


class Timeline:
    """Of one request, on the engine's clock (monotonic seconds). A recomputation changes nothing that was noted."""

    def __init__(self, request: EngineRequest, now: float) -> None:
        self.queued = now
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._spans = SpanNotes(spans.link_to(request.trace_context)) if spans.seen() else None
        if self._spans is not None:
            self._spans.begin("scheduler: queue", {"request_id": request.request_id}, now)

    def on_scheduled(self, at: float) -> None:
        if self.scheduled is None:
            self.scheduled = at
            self._next_span("scheduler: prefill", at)

    def on_token(self, at: float) -> None:
        if self.first_token is None:
            self.first_token = at
            self._next_span("scheduler: decode", at)
        self.last_token = at

    def on_end(self, at: float, recorder: Recorder | None) -> None:
        """The request is finished or aborted: its phases count if it got a token and there is a recorder."""
        if self._spans is not None:
            self._spans.end(at=at)
        if recorder is None or self.scheduled is None or self.first_token is None or self.last_token is None:
            return
        for histogram, seconds in (
            (metrics.REQUEST_QUEUE_TIME, self.scheduled - self.queued),
            (metrics.REQUEST_PREFILL_TIME, self.first_token - self.scheduled),
            (metrics.REQUEST_DECODE_TIME, self.last_token - self.first_token),
            (metrics.REQUEST_INFERENCE_TIME, self.last_token - self.scheduled),
        ):
            recorder.observe(histogram, seconds)

    def _next_span(self, name: str, at: float) -> None:
        if self._spans is not None:
            self._spans.end(at=at)
            self._spans.begin(name, at=at)
