"""The exporter over several processes, one of which dies and is replaced."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from telemetry import prometheus

ROOT = Path(__file__).resolve().parents[2]

PROCESS = """
from telemetry import metrics
from telemetry.recorder import create_recorder
from configs.engine import ModelSettings
import os
recorder = create_recorder(ModelSettings(served_name="m"), "0")
recorder.add(metrics.MM_CACHE_QUERIES, 2)
recorder.set(metrics.DEVICE_ENCODER_CACHE_FREE_BLOCKS, 7)
print(os.getpid())
"""


def test_counters_add_up_and_a_dead_process_loses_its_gauges(tmp_path: Path) -> None:
    environment = os.environ | prometheus.environment(str(tmp_path))
    pids = [
        int(
            subprocess.run(
                [sys.executable, "-c", PROCESS], env=environment, cwd=ROOT, capture_output=True, check=True
            ).stdout
        )
        for _ in range(3)
    ]
    render = (
        "import sys; from telemetry.prometheus import forget_process, render; "
        "[forget_process(int(pid)) for pid in sys.argv[1:]]; print(render()[0].decode())"
    )

    def values(*forget: int) -> dict[str, float]:
        command = [sys.executable, "-c", render, *map(str, forget)]
        text = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        return {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }

    assert values()["vllm:mm_cache_queries_total"] == 6
    assert values()["vllm_neuron:device_encoder_cache_free_blocks"] == 21
    assert values(pids[0])["vllm:mm_cache_queries_total"] == 6
    assert values(pids[0])["vllm_neuron:device_encoder_cache_free_blocks"] == 14


def test_folders_without_a_living_writer_are_wiped(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "counter_4194999.db").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"counter_{os.getpid()}.db").touch()
    prometheus.wipe_stale(str(tmp_path))
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]
