"""The metrics of a request as its client sees it: latencies from its arrival, tokens, and how it ended."""

import time
from dataclasses import dataclass, field

from telemetry import metrics
from telemetry.recorder import Recorder

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass
class Siblings:
    """The choices drawn from one prompt."""

    number: int
    generated: list[int] = field(default_factory=list)
    """Tokens of those that have ended."""


class RequestMetrics:
    """Of one engine request: one choice of a client's. `clock` values are time.perf_counter's."""

    def __init__(self, recorder: Recorder, arrival_clock: float, prompt_tokens: int, siblings: Siblings) -> None:
        self._recorder = recorder
        self._siblings = siblings
        self._arrival = arrival_clock
        self._prompt_tokens = prompt_tokens
        self._first_token: float | None = None
        self._last_token = arrival_clock
        self._ended = False

    def on_tokens(self, number: int) -> None:
        """The engine sent `number` tokens."""
        if not number:
            return
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now
            self._recorder.observe(metrics.TIME_TO_FIRST_TOKEN, now - self._arrival)
        else:
            for _ in range(number):
                self._recorder.observe(metrics.INTER_TOKEN_LATENCY, (now - self._last_token) / number)
        self._last_token = now

    def on_end(self, reason: str, completion_tokens: int = 0) -> None:
        """The output ended for `reason`, one of FINISH_REASONS; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._recorder.add(metrics.REQUEST_SUCCESS, 1, finished_reason=reason)
        if reason not in ("stop", "length"):
            return
        self._recorder.observe(metrics.REQUEST_PROMPT_TOKENS, self._prompt_tokens)
        self._recorder.observe(metrics.REQUEST_GENERATION_TOKENS, completion_tokens)
        self._siblings.generated.append(completion_tokens)
        if len(self._siblings.generated) == self._siblings.number:
            self._recorder.observe(metrics.REQUEST_MAX_NUM_GENERATION_TOKENS, max(self._siblings.generated))
        self._recorder.observe(metrics.E2E_REQUEST_LATENCY, self._last_token - self._arrival)
        if self._first_token is not None and completion_tokens > 1:
            mean = (self._last_token - self._first_token) / (completion_tokens - 1)
            self._recorder.observe(metrics.REQUEST_TIME_PER_OUTPUT_TOKEN, mean)


def show_counters(recorder: Recorder) -> None:
    """Make the Renderer's counters appear before anything has moved them."""
    for counter in (metrics.MM_CACHE_QUERIES, metrics.MM_CACHE_HITS):
        recorder.add(counter, 0)
    for reason in FINISH_REASONS:
        recorder.add(metrics.REQUEST_SUCCESS, 0, finished_reason=reason)
