"""EngineStats: moves what the engine did into the metrics, the stats line and the step's log line."""

import logging

from actors.messages import EngineOutput, EngineRequest, RankOutput, SchedulerOutput
from actors.step_channel import FAILURE_KINDS, RankFailure
from configs.engine import EngineConfig
from deployments.scheduler.scheduler import Scheduler, SchedulerStats
from deployments.scheduler.timeline import Timeline
from telemetry import metrics
from telemetry.recorder import Recorder
from telemetry.stat_logger import LoggingStatLogger

logger = logging.getLogger("trn_vision_serve")

STEP_LOG_EVERY = 50
"""Every so many steps, `step_tokens` is logged at INFO instead of DEBUG."""
EC_CONNECTOR_TIERS = ("host", "shared")

_COUNTERS = (
    metrics.PREFIX_CACHE_QUERIES,
    metrics.PREFIX_CACHE_HITS,
    metrics.SCHEDULER_ENCODER_CACHE_QUERIES,
    metrics.SCHEDULER_ENCODER_CACHE_HITS,
    metrics.ENCODER_CACHE_QUERIES,
    metrics.ENCODER_CACHE_HITS,
    metrics.NUM_PREEMPTIONS,
    metrics.PROMPT_TOKENS,
    metrics.PROMPT_TOKENS_CACHED,
    metrics.GENERATION_TOKENS,
)
_CONNECTOR_COUNTERS = (
    metrics.EC_CONNECTOR_QUERIES,
    metrics.EC_CONNECTOR_HITS,
    metrics.EC_CONNECTOR_LOADS,
    metrics.EC_CONNECTOR_SAVES,
    metrics.EC_CONNECTOR_LOAD_BYTES,
    metrics.EC_CONNECTOR_SAVE_BYTES,
)


class EngineStats:
    """Owned by the engine's thread. Times are monotonic seconds."""

    def __init__(self, config: EngineConfig, recorder: Recorder, engine: str, now: float) -> None:
        self._recorder = recorder
        self._lines = LoggingStatLogger(engine, config.telemetry.stats_interval_s, now)
        self._gauges: dict[str, float] = {}
        for counter in _COUNTERS:
            recorder.add(counter, 0)
        for kind in FAILURE_KINDS:
            recorder.add(metrics.RANK_RESTARTS, 0, reason=kind)
        for counter in _CONNECTOR_COUNTERS:  # no connector is there yet, so none of them moves
            for tier in EC_CONNECTOR_TIERS:
                recorder.add(counter, 0, tier=tier)
        recorder.set(
            metrics.CACHE_CONFIG_INFO,
            1,
            block_size=str(config.kv_cache.block_size),
            num_gpu_blocks=str(config.kv_cache.planned_num_blocks),
            enable_prefix_caching=str(config.kv_cache.enable_prefix_caching),
            encoder_cache_block_size=str(config.encoder_cache.block_size),
            encoder_cache_num_blocks=str(config.encoder_cache.num_blocks),
            world_size=str(config.parallel.world_size),
        )

    def record_start(
        self, seconds: float, load_seconds: float, load_bytes: float, compile_seconds: dict[str, float]
    ) -> None:
        """What a start of the engine took; see the metrics of these names."""
        self._recorder.set(metrics.STARTUP_TIME, seconds)
        self._recorder.set(metrics.MODEL_LOAD_TIME, load_seconds)
        self._recorder.set(metrics.MODEL_LOAD_SIZE, load_bytes)
        for bucket, took in compile_seconds.items():
            self._recorder.set(metrics.COMPILATION_TIME, took, bucket_name=bucket)

    def record_step(self, output: SchedulerOutput, answer: RankOutput, stats: SchedulerStats) -> None:
        """Called for each step, before its tokens go out, with what the scheduler counted until its end."""
        self._record(stats)
        if answer.occupancy is not None:
            self._lines.state.active_blocks = answer.occupancy.active_blocks
            self._lines.state.free_blocks = answer.occupancy.free_blocks
            self._lines.state.held_blocks = answer.occupancy.held_blocks
        total = output.total_num_scheduled_tokens
        if total:
            self._recorder.observe(metrics.ITERATION_TOKENS, total)
            logger.log(
                logging.INFO if output.step_id % STEP_LOG_EVERY == 0 else logging.DEBUG,
                "step_tokens step=%d prefill=%d decode=%d total=%d num_reqs=%d",
                output.step_id,
                output.num_prefill_tokens,
                total - output.num_prefill_tokens,
                total,
                len(output.num_scheduled_tokens),
            )

    def record_idle(self, scheduler: Scheduler) -> None:
        """No step was run: aborts and deferred lookups have changed the figures all the same."""
        self._record(scheduler.take_stats())

    def record_arrival(self, request: EngineRequest) -> None:
        self._lines.traffic.mm_queries += request.mm_cache_queries
        self._lines.traffic.mm_hits += request.mm_cache_hits

    def record_end(self, timeline: Timeline, at: float, counts: bool = True) -> None:
        """`counts`: whether its times do, because it does not go on elsewhere."""
        timeline.on_end(at, self._recorder if counts else None)

    def record_restart(self, failure: RankFailure) -> None:
        """The gang is started anew because of `failure`."""
        self._recorder.add(metrics.RANK_RESTARTS, 1, reason=failure.kind)

    def log_if_due(self, now: float) -> None:
        self._lines.log_if_due(now)

    def _record(self, stats: SchedulerStats) -> None:
        for counter, amount in zip(_COUNTERS, _amounts(stats), strict=True):
            if amount:
                self._recorder.add(counter, amount)
        for gauge, value in (
            (metrics.NUM_REQUESTS_RUNNING, stats.num_running),
            (metrics.NUM_REQUESTS_WAITING, stats.num_waiting),
            (metrics.KV_CACHE_USAGE, stats.kv_usage),
        ):
            if self._gauges.get(gauge.name) != value:
                self._gauges[gauge.name] = value
                self._recorder.set(gauge, value)
        traffic, state = self._lines.traffic, self._lines.state
        traffic.prompt_tokens += stats.prompt_tokens
        traffic.generation_tokens += stats.generation_tokens
        traffic.prefix_queries += stats.prefix_queries
        traffic.prefix_hits += stats.prefix_hits
        traffic.encoder_queries += stats.encoder.queries
        traffic.encoder_hits += stats.encoder.hits
        state.num_running, state.num_waiting, state.kv_usage = stats.num_running, stats.num_waiting, stats.kv_usage


def _amounts(stats: SchedulerStats) -> tuple[int, ...]:
    """In the order of _COUNTERS."""
    return (
        stats.prefix_queries,
        stats.prefix_hits,
        stats.encoder.scheduler_queries,
        stats.encoder.scheduler_hits,
        stats.encoder.queries,
        stats.encoder.hits,
        stats.num_preemptions,
        stats.prompt_tokens,
        stats.prompt_tokens_cached,
        stats.generation_tokens,
    )


def has_token(output: EngineOutput) -> bool:
    """Whether a token was sampled for it, the one that ended it included."""
    return bool(output.token_ids) or output.stop_token_id is not None
