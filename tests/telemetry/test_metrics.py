"""The metrics are those that operators were promised, in both exporters, with vLLM's boundaries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry import metrics
from telemetry.metrics import DEFINITIONS

ROOT = Path(__file__).resolve().parents[2]

COUNTERS = """
    vllm:mm_cache_queries vllm:mm_cache_hits vllm:prefix_cache_queries vllm:prefix_cache_hits
    vllm_neuron:scheduler_encoder_cache_queries vllm_neuron:scheduler_encoder_cache_hits
    vllm:encoder_cache_queries vllm:encoder_cache_hits
    vllm_neuron:device_encoder_cache_queries vllm_neuron:device_encoder_cache_misses
    vllm_neuron:device_encoder_cache_evictions
    vllm:num_preemptions vllm:prompt_tokens vllm:prompt_tokens_cached vllm:generation_tokens
    vllm:request_success{finished_reason} vllm_neuron:neff_execution_count{bucket_name}
    vllm_neuron:graphs_compiled_after_warm_up{bucket_name} vllm_neuron:rank_restarts{reason}
    vllm_neuron:ec_connector_queries{tier} vllm_neuron:ec_connector_hits{tier}
    vllm_neuron:ec_connector_loads{tier} vllm_neuron:ec_connector_saves{tier}
    vllm_neuron:ec_connector_load_bytes{tier} vllm_neuron:ec_connector_save_bytes{tier}
"""
GAUGES = """
    vllm_neuron:device_encoder_cache_active_blocks vllm_neuron:device_encoder_cache_free_blocks
    vllm_neuron:device_encoder_cache_held_blocks vllm_neuron:device_encoder_cache_active_real_tokens
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
    vllm_neuron:startup_time_seconds vllm_neuron:compilation_time_seconds{bucket_name}
    vllm_neuron:model_load_time_seconds vllm_neuron:model_load_size_bytes
"""
HISTOGRAMS = """
    vllm:request_prompt_tokens vllm:request_generation_tokens vllm:iteration_tokens_total
    vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:request_time_per_output_token_seconds
    vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
    vllm:request_decode_time_seconds vllm:request_inference_time_seconds
    vllm:request_max_num_generation_tokens
    vllm_neuron:num_seqs_padding{bucket_name} vllm_neuron:num_batched_tokens_padding{bucket_name}
"""
LIST_BOTH = """
import json
from telemetry.metrics import DEFINITIONS
from telemetry.prometheus import PrometheusExporter
from telemetry.ray_metrics import RayExporter
common = {"model_name": "m", "engine": "0"}
prometheus, ray = PrometheusExporter(common, 4096), RayExporter(common, 4096)
print(json.dumps([
    [[name, type(metric).__name__, list(metric._labelnames)] for name, metric in prometheus._metrics.items()],
    [[metric.info["name"], type(metric).__name__, list(metric.info["tag_keys"])] for metric in ray._metrics.values()],
]))
"""


@pytest.mark.parametrize(("kind", "promised"), [("counter", COUNTERS), ("gauge", GAUGES), ("histogram", HISTOGRAMS)])
def test_all_that_were_promised_are_defined_and_no_others(kind: str, promised: str) -> None:
    defined = {
        definition.name + (f"{{{','.join(definition.labels)}}}" if definition.labels else "")
        for definition in DEFINITIONS
        if definition.kind == kind and definition is not metrics.CACHE_CONFIG_INFO
    }
    assert defined == set(promised.split())


def test_both_exporters_have_every_metric(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", LIST_BOTH]
    output = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    prometheus, ray = json.loads(output)
    tags = ["deployment", "replica", "rank"]
    renamed = [[name.replace(":", "_"), kind, [*labels[:2], *tags, *labels[2:]]] for name, kind, labels in prometheus]
    assert renamed == ray
    assert len(ray) == len({name for name, _, _ in ray}) == len(DEFINITIONS) == 51


def test_boundaries_are_vllms() -> None:
    assert metrics.REQUEST_PROMPT_TOKENS.boundaries(4096)[-3:] == (500.0, 1000.0, 2000.0)
    assert metrics.REQUEST_PROMPT_TOKENS.boundaries(100) == (1, 2, 5, 10, 20, 50, 100)
    assert metrics.ITERATION_TOKENS.boundaries(1) == (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    first = metrics.TIME_TO_FIRST_TOKEN.boundaries(1)
    assert (len(first), first[0], first[-1]) == (22, 0.001, 2560.0)
    token = metrics.INTER_TOKEN_LATENCY.boundaries(1)
    assert (len(token), token[0], token[-1]) == (19, 0.01, 80.0)
    request = metrics.E2E_REQUEST_LATENCY.boundaries(1)
    assert (len(request), request[0], request[-1]) == (21, 0.3, 7680.0)
