"""The dashboard and the Prometheus files: up to date, about metrics that exist, accepted by Prometheus's own tool."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.grafana import board
from telemetry.metrics import DEFINITIONS, Metric

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
NAME = re.compile(r"\b(?:ray_)?vllm(?:_neuron)?[:_]\w+")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def exported(metric: Metric) -> set[str]:
    """The names under which Prometheus finds a metric, from the application and from Ray."""
    forms = metric.name, "ray_" + metric.name.replace(":", "_")
    return {form + suffix for form in forms for suffix in SUFFIXES[metric.kind]}


def names_in(expr: str) -> set[str]:
    """The metrics that an expression reads; label values do not count."""
    return set(NAME.findall(re.sub(r'"[^"]*"', "", expr)))


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(board.OUTPUT.read_text())["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def board_exprs() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"] for rule in group["rules"]
    ]


def test_the_dashboard_on_disk_is_what_board_py_builds() -> None:
    assert board.OUTPUT.read_text() == board.text(), "run `python configs/grafana/board.py`"


def test_every_panel_says_what_it_shows() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("exprs", [board_exprs(), [rule["expr"] for rule in rules()]], ids=["board", "rules"])
def test_only_metrics_that_are_defined_are_read(exprs: list[str]) -> None:
    known = set().union(*(exported(metric) for metric in DEFINITIONS))
    assert set().union(*(names_in(expr) for expr in exprs)) <= known


@pytest.mark.parametrize("metric", DEFINITIONS, ids=lambda metric: metric.name)
def test_every_metric_is_on_the_board(metric: Metric) -> None:
    assert any(names_in(expr) & exported(metric) for expr in board_exprs())


def test_labels_read_from_a_metric_are_its_own() -> None:
    labels = {"le", "rank", "model_name", "engine", *(label for metric in DEFINITIONS for label in metric.labels)}
    for panel in panels():
        for target in panel["targets"]:
            grouped = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(", ")}
            assert grouped <= labels
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, panel["title"]


def test_alerts_read_recorded_series_that_exist_and_say_what_to_do() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert set(re.findall(r"\b(?:engine|rank):\w+:\w+", rule["expr"])) <= recorded
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description"}


def test_every_alert_has_a_unit_test_that_fires_and_one_that_does_not() -> None:
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in yaml.safe_load((PROMETHEUS / "rules_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(cases) == {(alert, fires) for alert in alerts for fires in (True, False)}


@pytest.mark.parametrize(
    "command",
    [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml"), ("check", "config", "prometheus.yaml")],
)
def test_promtool_accepts(command: tuple[str, ...]) -> None:
    assert shutil.which("promtool"), "promtool is missing: apt-get install prometheus"
    result = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
