"""Moves the scheduler's counts into the metrics, once per step."""

from actors.messages import SchedulerOutput
from deployments.scheduler.scheduler import Scheduler
from telemetry import metrics
from telemetry.prometheus import Recorder


class StatsRecorder:
    """Owned by the engine's thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
