"""Exports the definitions of `telemetry.metrics` through prometheus_client's multiprocess mode.

prometheus_client decides at import whether it writes to files, so `environment()` is put into the environment of every
process of the application before it starts, and prometheus_client is imported inside functions only.
"""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from telemetry.metrics import DEFINITIONS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def environment(parent: str) -> dict[str, str]:
    """The variables that make processes share one new folder of metric files below `parent`."""
    return {METRICS_VARIABLE: str(Path(parent) / uuid.uuid4().hex[:12])}


def wipe_stale(parent: str) -> None:
    """Remove the folders that earlier applications left below `parent` on this node: those without a living writer."""
    for folder in Path(parent).glob("*"):
        writers = {file.stem.rpartition("_")[2] for file in folder.glob("*.db")}
        if not any(pid.isdigit() and Path("/proc", pid).exists() for pid in writers):
            shutil.rmtree(folder, ignore_errors=True)


def forget_process(pid: int) -> None:
    """Drop a dead process's gauges, so that its replacement is not counted beside it. Its counters stay."""
    for file in Path(os.environ[METRICS_VARIABLE]).glob(f"gauge_*_{pid}.db"):
        file.unlink(missing_ok=True)


class Recorder:
    """Where one process of the application counts. Create one per (model, engine) and process."""

    def __init__(self, model_name: str, engine: str) -> None:
        if METRICS_VARIABLE in os.environ:
            Path(os.environ[METRICS_VARIABLE]).mkdir(parents=True, exist_ok=True)
        import prometheus_client

        self._base = {"model_name": model_name, "engine": engine}
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for definition in DEFINITIONS:
            labels = ("model_name", "engine", *definition.labels)
            if definition.kind == "counter":
                metric: Any = prometheus_client.Counter(
                    definition.name, definition.documentation, labels, registry=self._registry
                )
            else:
                metric = prometheus_client.Gauge(
                    definition.name, definition.documentation, labels, registry=self._registry, multiprocess_mode="sum"
                )
            self._metrics[definition.name] = metric

    def _child(self, metric: Metric, labels: dict[str, str]) -> Any:
        return self._metrics[metric.name].labels(**self._base, **labels)

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Move a counter up by `amount`; 0 makes it appear."""
        self._child(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set this process's share of a gauge; the exported value is the sum over the living processes."""
        self._child(metric, labels).set(value)


def render() -> tuple[bytes, str]:
    """The Prometheus text of every process of this application on this node, and its content type."""
    import prometheus_client
    from prometheus_client import multiprocess

    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return prometheus_client.generate_latest(registry), CONTENT_TYPE
