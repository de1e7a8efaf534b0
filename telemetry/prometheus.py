"""Exports the definitions of `telemetry.metrics` through prometheus_client's multiprocess mode.

prometheus_client decides at import whether it writes to files, so `environment()` is put into the environment of every
process of the application before it starts, and prometheus_client is imported inside functions only.
"""

import os
import re
import struct
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from telemetry.metrics import DEFINITIONS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_METRIC_FILE = re.compile(r"(?:counter|gauge_[a-z]+|histogram|summary)_([0-9]+)\.db")
"""prometheus_client's names for its files, with the writer's process id."""
_READ_ATTEMPTS = 50


def environment(parent: str) -> dict[str, str]:
    """The variables that make processes share one new folder of metric files below `parent`."""
    return {METRICS_VARIABLE: str(Path(parent) / uuid.uuid4().hex[:12])}


def wipe_stale(parent: str) -> None:
    """Remove the folders that earlier applications left below `parent` on this node: those without a living writer.

    Only folders of metric files and nothing else: `parent` may hold what is not ours.
    """
    for folder in Path(parent).glob("*/"):
        with suppress(OSError):  # another user's
            files = list(folder.iterdir())
            writers = [_METRIC_FILE.fullmatch(file.name) for file in files]
            if files and not any(writer is None or Path("/proc", writer[1]).exists() for writer in writers):
                for file in files:
                    file.unlink()
                folder.rmdir()


def forget_process(pid: int) -> None:
    """Drop a dead process's gauges, so that its replacement is not counted beside it. Its counters stay."""
    for file in Path(os.environ[METRICS_VARIABLE]).glob(f"gauge_*_{pid}.db"):
        file.unlink(missing_ok=True)


def _forget_dead_processes(also: int | None = None) -> None:
    """Whatever died without a word, a rank or a replica, has no gauges any more, nor has the process `also`."""
    for file in Path(os.environ[METRICS_VARIABLE]).glob("gauge_*.db"):
        pid = file.stem.rpartition("_")[2]
        if pid == str(also) or not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)


class PrometheusExporter:
    """One process's files. `common`: the labels of every metric, model_name and engine. Create one per process."""

    def __init__(self, common: Mapping[str, str], max_model_len: int) -> None:
        if METRICS_VARIABLE in os.environ:
            Path(os.environ[METRICS_VARIABLE]).mkdir(parents=True, exist_ok=True)
            _forget_dead_processes(also=os.getpid())  # whatever this process replaces may have had its id
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        self._common = dict(common)
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for definition in DEFINITIONS:
            options: dict[str, Any] = {
                "name": definition.name,
                "documentation": definition.documentation,
                "labelnames": (*common, *definition.labels),
                "registry": registry,
            }
            if definition.kind == "counter":
                metric: Any = prometheus_client.Counter(**options)
            elif definition.kind == "gauge":
                metric = prometheus_client.Gauge(**options, multiprocess_mode="sum")
            else:
                metric = prometheus_client.Histogram(**options, buckets=definition.boundaries(max_model_len))
            self._metrics[definition.name] = metric

    def _child(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        key = (metric.name, *labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[metric.name].labels(**self._common, **labels)
        return child

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        self._child(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._child(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._child(metric, labels).observe(value)


def render() -> tuple[bytes, str]:
    """The Prometheus text of every process of this application on this node, and its content type."""
    import prometheus_client
    from prometheus_client import multiprocess

    _forget_dead_processes()
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    for attempt in range(1, _READ_ATTEMPTS + 1):
        try:
            return prometheus_client.generate_latest(registry), CONTENT_TYPE
        except (FileNotFoundError, struct.error):
            # A file went between the listing and its turn, with a process that was replaced; or one was just made and
            # has no content yet.
            if attempt == _READ_ATTEMPTS:
                raise
            time.sleep(0.002 * attempt)
    raise AssertionError("the last attempt returns or raises")
