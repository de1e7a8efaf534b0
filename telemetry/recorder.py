"""Recorder: where a process counts. Every value goes to each exporter: Prometheus files, and Ray's metrics."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from configs.engine import ModelSettings
from telemetry.metrics import Metric

ENGINE = "0"
"""The label `engine`: one replica of the Scheduler deployment is one engine."""


class Exporter(Protocol):
    """Takes values of the metrics in DEFINITIONS. `labels` are those of the metric itself, beside the common ones."""

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None: ...

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None: ...

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None: ...


class Recorder:
    """What the rest of the application counts with."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = exporters

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Move a counter up by `amount`; 0 makes it appear."""
        for exporter in self._exporters:
            exporter.add(metric, amount, labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set this process's share of a gauge; the exported value is the sum over the living processes."""
        for exporter in self._exporters:
            exporter.set(metric, value, labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one value to a histogram."""
        for exporter in self._exporters:
            exporter.observe(metric, value, labels)


def create_recorder(model: ModelSettings, engine: str, ray_tags: Mapping[str, str] | None = None) -> Recorder:
    """This process's recorder; create one. `ray_tags`: deployment, replica and rank, in a process of a Ray cluster."""
    from telemetry.prometheus import PrometheusExporter

    common = {"model_name": model.name, "engine": engine}
    exporters: list[Exporter] = [PrometheusExporter(common, model.max_model_len)]
    if ray_tags is not None:
        from telemetry.ray_metrics import RayExporter

        exporters.append(RayExporter(common | dict(ray_tags), model.max_model_len))
    return Recorder(exporters)


def replica_tags() -> dict[str, str]:
    """Deployment and replica of this process, as Ray's metrics are tagged."""
    from ray import serve

    context = serve.get_replica_context()
    return {"deployment": context.deployment, "replica": context.replica_id.unique_id}
