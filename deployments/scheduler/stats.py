"""Moves the scheduler's counts into the metrics, once per step."""

from deployments.scheduler.scheduler import Scheduler
from telemetry import metrics
from telemetry.prometheus import Recorder


class StatsRecorder:
    """Owned by the engine's thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for metric in _COUNTERS:
            recorder.add(metric, 0)

    def record_step(self, scheduler: Scheduler) -> None:
        """Called after each step, before its tokens go out, so that a client that has its answer finds it counted."""
        stats = scheduler.take_stats()
        for metric, amount in (
            (metrics.PREFIX_CACHE_QUERIES, stats.prefix_queries),
            (metrics.PREFIX_CACHE_HITS, stats.prefix_hits),
            (metrics.SCHEDULER_ENCODER_CACHE_QUERIES, stats.encoder.scheduler_queries),
            (metrics.SCHEDULER_ENCODER_CACHE_HITS, stats.encoder.scheduler_hits),
            (metrics.ENCODER_CACHE_QUERIES, stats.encoder.queries),
            (metrics.ENCODER_CACHE_HITS, stats.encoder.hits),
        ):
            if amount:
                self._recorder.add(metric, amount)


_COUNTERS = (
    metrics.PREFIX_CACHE_QUERIES,
    metrics.PREFIX_CACHE_HITS,
    metrics.SCHEDULER_ENCODER_CACHE_QUERIES,
    metrics.SCHEDULER_ENCODER_CACHE_HITS,
    metrics.ENCODER_CACHE_QUERIES,
    metrics.ENCODER_CACHE_HITS,
)
