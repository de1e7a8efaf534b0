"""Reports an engine's start stage by stage: a progress bar on a terminal, a line per finished stage elsewhere."""

import logging
import os
import sys
from typing import Any

from telemetry.logs import LOGGER_NAME

VARIABLE = "TRN_VISION_SERVE_PROGRESS"
"""`bar`: the driver's standard output is a terminal (`make serve` sets it); otherwise lines."""

_STAGES = {"placed": "gang placed", "loaded": "weights loaded", "warmed": "buckets warmed"}
_UNITS = {"placed": "ranks", "loaded": "ranks", "warmed": "graphs"}


class StartReport:
    """Called as (stage, done, total, seconds) by RankGroup; keeps what it reported in `seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._logger = logging.getLogger(LOGGER_NAME)
        self._bars = os.environ.get(VARIABLE) == "bar"
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int, seconds: float) -> None:
        if self._bars:
            self._draw(stage, done, total)
        if done == total:
            self.seconds[stage] = seconds
            self._logger.info("start: %s, %d %s in %.1f s", _STAGES[stage], total, _UNITS[stage], seconds)

    def _draw(self, stage: str, done: int, total: int) -> None:
        from ray.experimental import tqdm_ray

        # A bar's state travels to the driver as lines of the process's own standard output; in a replica, Serve
        # replaces `print` with its logger.
        tqdm_ray.print = _print_plainly  # type: ignore[attr-defined]
        if self._bar is None:
            self._bar = tqdm_ray.tqdm(desc=f"start: {_STAGES[stage]}", total=total, unit=_UNITS[stage])
        self._bar.update(1)
        if done == total:
            self._bar.close()
            self._bar = None


def _print_plainly(*objects: object, end: str = "\n") -> None:
    assert sys.__stdout__ is not None
    sys.__stdout__.write(" ".join(map(str, objects)) + end)
    sys.__stdout__.flush()
