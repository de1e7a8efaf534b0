"""Exports the definitions of `telemetry.metrics` through `ray.util.metrics`: Ray's dashboard, and its own endpoint.

Ray keeps no colons: `vllm:mm_cache_hits` is `vllm_mm_cache_hits` here, and `ray_vllm_mm_cache_hits_total` in its text.
Every series is tagged with deployment, replica and, on ranks, `rank`; nothing is summed over processes.
"""

import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from telemetry.metrics import DEFINITIONS, Metric

TAGS = ("deployment", "replica", "rank")


def ray_name(metric: Metric) -> str:
    """The name given to Ray, which prefixes it with `ray_`."""
    return metric.name.replace(":", "_")


class RayExporter:
    """One process's series. `common`: model_name, engine and those of TAGS that apply; the others are empty."""

    def __init__(self, common: Mapping[str, str], max_model_len: int) -> None:
        self._gauges: dict[tuple[str, ...], tuple[Any, float, dict[str, str]]] = {}
        """(metric, its labels) -> Ray's metric, its value and the labels, as last set."""
        self._setting = threading.Lock()
        self._common = dict.fromkeys(TAGS, "") | dict(common)
        self._metrics: dict[str, Any] = {}
        for definition in DEFINITIONS:
            name, documentation = ray_name(definition), definition.documentation
            keys = ("model_name", "engine", *TAGS, *definition.labels)
            if definition.kind == "counter":
                metric: Any = ray_metrics.Counter(name, documentation, keys)
            elif definition.kind == "gauge":
                metric = ray_metrics.Gauge(name, documentation, keys)
            else:
                bounds = list(definition.boundaries(max_model_len))
                metric = ray_metrics.Histogram(name, documentation, bounds, keys)
            metric.set_default_tags(self._common)
            self._metrics[definition.name] = metric
        threading.Thread(target=self._keep_gauges, name="ray gauges", daemon=True).start()

    def _keep_gauges(self) -> None:
        """Ray forgets a gauge that was not set since its last report: set each again, twice per report."""
        wait = threading.Event().wait
        while not wait(max(1000, ray._config.metrics_report_interval_ms()) / 2000):
            with self._setting:
                for gauge, value, labels in self._gauges.values():
                    gauge.set(value, labels)

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        if amount > 0:
            self._metrics[metric.name].inc(amount, dict(labels))
        else:
            # `inc` refuses 0, and a counter that has not moved should be seen.
            self._metrics[metric.name]._record(0, dict(labels))

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        gauge = self._metrics[metric.name]
        with self._setting:
            self._gauges[metric.name, *labels.values()] = gauge, value, dict(labels)
            gauge.set(value, dict(labels))

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._metrics[metric.name].observe(value, dict(labels))
