"""A real Prometheus and an OTLP collector watch one rank at work, while it is killed too."""

import math
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from configs import dialogues
from telemetry.metrics import DEFINITIONS, Metric
from tests.support.application import Application
from tests.support.clients import processes
from tests.support.otlp_receiver import Receiver
from tests.support.prometheus_server import Prometheus

MODEL = "digits-vl"
SUFFIX = {"counter": "_total", "gauge": "", "histogram": "_count"}

# What vLLM's own dashboard asks for, by panel.
VLLM_QUANTILES = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
VLLM_RATES = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
)
VLLM_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
VLLM_HEATMAPS = ("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket")


def ask(application: Application, seed: int, images: int = 2) -> str:
    talk = dialogues.conversation(np.random.default_rng(seed), sizes=((64, 64), (128, 64)), images=images, turns=1)
    answer = application.client.chat.completions.create(
        model=MODEL, messages=talk.messages(), temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content


def work(application: Application) -> None:
    """Traffic for a few scrapes: a rate needs two."""
    for seed in range(12):
        ask(application, seed)
        time.sleep(0.4)
    time.sleep(2)


def settles(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Scrapes and Ray's reports come once a second, later on a busy machine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture(scope="module")
def prometheus(one_rank: Application, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    address = one_rank.url.removeprefix("http://")
    jobs = [
        {"job_name": "application", "static_configs": [{"targets": [address]}]},
        {"job_name": "ray", "file_sd_configs": [{"files": [one_rank.ray_discovery], "refresh_interval": "1s"}]},
    ]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), jobs) as server:
        work(one_rank)
        yield server


def series(metric: Metric, ray: bool) -> str:
    """The Prometheus name of a metric's value; a histogram's is its number of observations."""
    name = "ray_" + metric.name.replace(":", "_") if ray else metric.name
    return name + SUFFIX[metric.kind]


def test_every_metric_is_in_both_with_the_same_value(prometheus: Prometheus) -> None:
    """Ray's values follow once a second: wait until nothing moves any more."""
    deadline = time.monotonic() + 60
    while True:
        values = {
            metric.name: (prometheus.total(series(metric, ray=False)), prometheus.total(series(metric, ray=True)))
            for metric in DEFINITIONS
        }
        wrong = {
            name: pair
            for name, pair in values.items()
            if None in pair or not math.isclose(pair[0], pair[1], rel_tol=1e-9)
        }
        if not wrong or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert not wrong
    assert values["vllm:request_success"][0] >= 12


def test_ray_tags_say_which_process(prometheus: Prometheus) -> None:
    [(labels, _)] = prometheus.query("ray_vllm_neuron_device_encoder_cache_free_blocks")
    assert (labels["deployment"], labels["rank"], labels["model_name"]) == ("Scheduler", "0", MODEL)
    assert labels["replica"]
    [(labels, _)] = prometheus.query("ray_vllm_mm_cache_queries_total")
    assert labels["deployment"] == "Renderer"


def test_a_dashboard_made_for_vllm_works(one_rank: Application, prometheus: Prometheus) -> None:
    work(one_rank)
    selector = f'{{model_name="{MODEL}"}}'
    for name in VLLM_QUANTILES:
        for quantile in (0.5, 0.9, 0.95, 0.99):
            expression = f"histogram_quantile({quantile}, sum by(le) (rate({name}_bucket{selector}[1m])))"
            [(_, value)] = prometheus.query(expression)
            assert value > 0, expression
        [(_, mean)] = prometheus.query(f"rate({name}_sum{selector}[1m]) / rate({name}_count{selector}[1m])")
        assert mean > 0, name
    for name in VLLM_RATES:
        assert len(prometheus.query(f"rate({name}{selector}[1m])")) == 1, name
    for name in VLLM_GAUGES:
        assert len(prometheus.query(f"{name}{selector}")) == 1, name
    for name in VLLM_HEATMAPS:
        assert prometheus.total(f"sum by(le) (increase({name}{selector}[1m]))"), name
    reasons = {labels["finished_reason"] for labels, _ in prometheus.query(
        f"sum by(finished_reason) (increase(vllm:request_success_total{selector}[1m]))"
    )}  # fmt: skip
    assert {"stop", "length", "abort", "error"} == reasons


def test_one_trace_runs_through_renderer_scheduler_and_rank(one_rank: Application, otlp: Receiver) -> None:
    ask(one_rank, 1000)
    deadline = time.monotonic() + 20
    complete: list[set[str]] = []
    while not complete and time.monotonic() < deadline:
        by_trace: dict[str, set[str]] = defaultdict(set)
        for span in list(otlp.spans):
            by_trace[span["trace_id"]].add(f"{span['process']}: {span['name'].partition(': prefill=')[0]}")
        complete = [
            names
            for names in by_trace.values()
            if {
                "renderer: request",
                "renderer: mm: hf_processor",
                "scheduler: scheduler: queue",
                "scheduler: scheduler: decode",
                "rank 0: step",
                "rank 0: step_meta",
                "rank 0: vit_forward",
                "rank 0: sample",
            }
            <= names
        ]
        time.sleep(0.2)
    assert complete, sorted({(span["process"], span["name"]) for span in otlp.spans})
    by_id = {span["span_id"]: span for span in list(otlp.spans)}
    for span in by_id.values():
        parent = by_id.get(span["parent_id"])
        if parent is not None and parent["name"] == "preprocess":
            assert parent["start_time"] <= span["start_time"] <= span["end_time"] <= parent["end_time"]


def test_the_log_says_what_the_engine_does(one_rank: Application) -> None:
    for seed in range(2000, 2012):
        ask(one_rank, seed)
    deadline = time.monotonic() + 20
    while "Engine 000: Avg prompt throughput" not in one_rank.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    log = one_rank.log.read_text()
    assert "Encoder cache blocks: " in log
    assert "step_tokens step=" in log
    probed = [line.partition("mm_cache_probe ")[2].split() for line in log.splitlines() if "mm_cache_probe " in line]
    assert {line[0] for line in probed} == {"layer=processor", "layer=scheduler", "layer=device"}
    assert {line[1] for line in probed if line[0] == "layer=device"} == {"result=MISS"}


def test_everything_stays_true_when_a_rank_is_replaced(one_rank: Application, prometheus: Prometheus) -> None:
    [rank] = processes(one_rank, "RankActor")
    stream = one_rank.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=300, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for number, _ in enumerate(stream):
        if number == 20:
            os.kill(rank.pid, signal.SIGKILL)
    blocks = one_rank.args["encoder_cache"]["num_blocks"] - 1
    states = "vllm_neuron:device_encoder_cache_(active|free|held)_blocks"
    settles(lambda: prometheus.total(f'{{__name__=~"{states}"}}') == blocks)
    # At no scrape while the rank was away were there more blocks than one rank has, nor did a counter go backwards.
    [(_, most)] = prometheus.query(f'max_over_time(sum({{__name__=~"{states}"}})[5m:1s])')
    assert most == blocks
    for metric in DEFINITIONS:
        if metric.kind != "gauge":
            assert not prometheus.total(f"resets({series(metric, ray=False)}[5m])"), metric.name
    ray = f'{{__name__=~"ray_{states.replace(":", "_")}"}}'
    settles(lambda: prometheus.total(ray) == blocks)


def test_rays_own_serve_dashboard_works(one_rank: Application, prometheus: Prometheus) -> None:
    """The panels that Ray generates for its Serve LLM view, those about metrics that this application has."""
    work(one_rank)
    from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

    ours = {
        f"ray_{metric.name.replace(':', '_')}{suffix}"
        for metric in DEFINITIONS
        for suffix in ("", "_total", "_bucket", "_count", "_sum")
    }
    variables = {"$vllm_model_name": MODEL, "$workerid": ".*", "$deployment": ".*", "$interval": "1m"}
    asked = []
    for panel in [panel for row in serve_llm_dashboard_config.rows for panel in row.panels]:
        for target in panel.targets:
            names = set(re.findall(r"ray_vllm_\w+", target.expr))
            if not names or not names <= ours:
                continue
            expression = target.expr.format(global_filters='SessionName=~".*"')
            for variable, value in variables.items():
                expression = expression.replace(variable, value)
            asked.append(expression)
    assert len(asked) > 15
    # One panel looks at whole minutes, one of which may have to begin: hence the last test.
    deadline = time.monotonic() + 90
    while (empty := [each for each in asked if not prometheus.query(each)]) and time.monotonic() < deadline:
        work(one_rank)
    assert not empty
