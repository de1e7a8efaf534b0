"""RankMetrics: what one rank exports. Gauges come from every rank, and are summed; counters from rank 0 alone."""

from collections.abc import Sequence

from actors.messages import EncoderCacheOccupancy
from actors.plan import bucket_size
from telemetry import metrics
from telemetry.recorder import Recorder

_COUNTERS = (
    metrics.DEVICE_ENCODER_CACHE_QUERIES,
    metrics.DEVICE_ENCODER_CACHE_MISSES,
    metrics.DEVICE_ENCODER_CACHE_EVICTIONS,
)


class RankMetrics:
    """Collects a step's counts in `counters`; `emit` exports them, once per step, after evictions and allocations."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.counters: dict[str, int] = {}
        """Metric name -> amount, of the step at hand."""
        self._recorder = recorder
        self._reports = rank == 0
        self._exported: EncoderCacheOccupancy | None = None
        if self._reports:
            for counter in _COUNTERS:
                recorder.add(counter, 0)

    def expect(self, bucket_names: Sequence[str]) -> None:
        """The graphs that there are: each has been compiled after the warm-up 0 times."""
        if self._reports:
            for name in bucket_names:
                self._recorder.add(metrics.NEW_SHAPES, 0, bucket_name=name)

    def count(self, metric: metrics.Metric, amount: int) -> None:
        self.counters[metric.name] = self.counters.get(metric.name, 0) + amount

    def executed(self, bucket_name: str, num_seqs: int | None, num_tokens: int) -> None:
        """A graph ran. `num_seqs`: sequences in a decode bucket; None for graphs whose bucket counts tokens alone."""
        if not self._reports:
            return
        self.ran(bucket_name)
        size = bucket_size(bucket_name)
        self._recorder.observe(metrics.NUM_BATCHED_TOKENS_PADDING, size - num_tokens, bucket_name=bucket_name)
        if num_seqs is not None:
            self._recorder.observe(metrics.NUM_SEQS_PADDING, size - num_seqs, bucket_name=bucket_name)

    def ran(self, bucket_name: str) -> None:
        """A graph ran, of which padding is not counted."""
        if self._reports:
            self._recorder.add(metrics.NEFF_EXECUTION_COUNT, 1, bucket_name=bucket_name)

    def met_new_shape(self, bucket_name: str) -> None:
        """A graph was compiled after the warm-up."""
        if self._reports:
            self._recorder.add(metrics.NEW_SHAPES, 1, bucket_name=bucket_name)

    def emit(self, occupancy: EncoderCacheOccupancy) -> None:
        if occupancy != self._exported:
            self._exported = occupancy
            for gauge, value in (
                (metrics.DEVICE_ENCODER_CACHE_ACTIVE_BLOCKS, occupancy.active_blocks),
                (metrics.DEVICE_ENCODER_CACHE_FREE_BLOCKS, occupancy.free_blocks),
                (metrics.DEVICE_ENCODER_CACHE_HELD_BLOCKS, occupancy.held_blocks),
                (metrics.DEVICE_ENCODER_CACHE_ACTIVE_REAL_TOKENS, occupancy.active_real_tokens),
            ):
                self._recorder.set(gauge, value)
        if self._reports:
            for counter in _COUNTERS:
                if amount := self.counters.get(counter.name, 0):
                    self._recorder.add(counter, amount)
        self.counters = {}
