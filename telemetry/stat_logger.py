"""LoggingStatLogger: the line that says, every few seconds, how an engine that works is doing."""

import logging
from dataclasses import dataclass

from telemetry.logs import LOGGER_NAME


@dataclass
class Traffic:
    """What happened since the last line."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Tokens."""
    prefix_hits: int = 0
    mm_queries: int = 0
    """Items in the processor cache, of the requests that reached this engine."""
    mm_hits: int = 0
    encoder_queries: int = 0
    """Items, once per request."""
    encoder_hits: int = 0

    def __bool__(self) -> bool:
        return any(vars(self).values())


@dataclass
class State:
    """How things stand when the line is written."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share, 0 to 1."""
    active_blocks: int = 0
    """Of one rank's encoder cache; the ranks are alike."""
    free_blocks: int = 0
    held_blocks: int = 0


class LoggingStatLogger:
    """Owned by the engine's thread, which adds to `traffic`, keeps `state` up to date and calls `log_if_due`."""

    def __init__(self, engine: str, interval_s: float, now: float) -> None:
        self.traffic = Traffic()
        self.state = State()
        self._engine = engine
        self._interval_s = interval_s
        self._last = now
        self._was_working = False
        self._logger = logging.getLogger(LOGGER_NAME)

    def due(self, now: float) -> float:
        """Seconds until the next line may be written, not below 0."""
        return max(0.0, self._last + self._interval_s - now)

    def log_if_due(self, now: float) -> None:
        """`now`: monotonic seconds. An engine without work since the last line writes one more, to show it idle."""
        if now - self._last < self._interval_s:
            return
        working = bool(self.traffic) or self.state.num_running + self.state.num_waiting > 0
        if working or self._was_working:
            self._logger.info("%s", self._line(now - self._last))
        self._was_working = working
        self.traffic = Traffic()
        self._last = now

    def _line(self, seconds: float) -> str:
        traffic, state = self.traffic, self.state
        parts = [
            f"Avg prompt throughput: {traffic.prompt_tokens / seconds:.1f} tokens/s",
            f"Avg generation throughput: {traffic.generation_tokens / seconds:.1f} tokens/s",
            f"Running: {state.num_running} reqs",
            f"Waiting: {state.num_waiting} reqs",
            f"KV cache usage: {100 * state.kv_usage:.1f}%",
        ]
        for name, hits, queries in (
            ("Prefix cache", traffic.prefix_hits, traffic.prefix_queries),
            ("MM cache", traffic.mm_hits, traffic.mm_queries),
            ("Encoder cache", traffic.encoder_hits, traffic.encoder_queries),
        ):
            if queries:
                parts.append(f"{name} hit rate: {100 * hits / queries:.1f}%")
        parts.append(
            f"Encoder cache blocks: {state.active_blocks} active / {state.free_blocks} free / {state.held_blocks} held"
        )
        return f"Engine {self._engine:0>3}: {', '.join(parts)}"
