"""A request's spans and its metrics tell the same times, however late the engine tells the timeline of them."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from deployments.scheduler.timeline import Timeline
from telemetry import metrics, spans
from telemetry.recorder import Recorder
from tests.deployments.scheduler.simulation import make_request, text

TRACE, ROOT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Observed(Recorder):
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def observe(self, metric: metrics.Metric, value: float, **_: str) -> None:
        self.seconds[metric.name].append(value)


def test_phases_last_in_spans_as_in_metrics(tmp_path: Path) -> None:
    file, recorder = tmp_path / "spans.jsonl", Observed()
    spans.configure("scheduler", str(file))
    try:
        request = make_request("r", *text(3), trace_context={"traceparent": f"00-{TRACE}-{ROOT}-01"})
        timeline = Timeline(request, 100.0)
        timeline.on_scheduled(102.0)
        timeline.on_token(105.0)
        timeline.on_token(111.0)
        timeline.on_end(111.0, recorder)
        timeline.on_end(120.0, None)
    finally:
        spans.shutdown()
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    lasted = {each["name"]: (each["end_time"] - each["start_time"]) / 1e9 for each in recorded}
    assert {(each["trace_id"], each["parent_id"]) for each in recorded} == {(TRACE, ROOT)}
    assert len(recorded) == 3
    for name, metric, seconds in (
        ("scheduler: queue", metrics.REQUEST_QUEUE_TIME, 2.0),
        ("scheduler: prefill", metrics.REQUEST_PREFILL_TIME, 3.0),
        ("scheduler: decode", metrics.REQUEST_DECODE_TIME, 6.0),
    ):
        assert recorder.seconds[metric.name] == [seconds]
        assert lasted[name] == pytest.approx(seconds, abs=0.05)
