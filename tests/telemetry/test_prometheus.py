"""The exporter over several processes, one of which dies and is replaced."""

import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry import prometheus

ROOT = Path(__file__).resolve().parents[2]

PROCESS = """
from configs.engine import ModelSettings
from telemetry import metrics
from telemetry.recorder import create_recorder
import sys
recorder = create_recorder(ModelSettings(served_name="m"), "0")
recorder.add(metrics.MM_CACHE_QUERIES, 2)
recorder.set(metrics.DEVICE_ENCODER_CACHE_FREE_BLOCKS, 7)
recorder.observe(metrics.TIME_TO_FIRST_TOKEN, 0.05)
print("counted", flush=True)
sys.stdin.read()
"""
RENDER = "from telemetry.prometheus import render; print(render()[0].decode())"
QUERIES, FREE = "vllm:mm_cache_queries_total", "vllm_neuron:device_encoder_cache_free_blocks"


def test_counters_add_up_and_a_replaced_process_loses_its_gauges(tmp_path: Path) -> None:
    environment = os.environ | prometheus.environment(str(tmp_path))

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS], env=environment, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        return process

    def values() -> dict[str, float]:
        command = [sys.executable, "-c", RENDER]
        text = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        return {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }

    processes = [start() for _ in range(3)]
    assert (values()[QUERIES], values()[FREE]) == (6, 21)
    processes[0].kill()
    processes[0].wait()
    assert (values()[QUERIES], values()[FREE]) == (6, 14)  # before anything has replaced it
    processes.append(start())
    after = values()
    assert (after[QUERIES], after[FREE]) == (8, 21)
    assert after["vllm:time_to_first_token_seconds_count"] == 4
    for process in processes[1:]:
        process.communicate()


@pytest.mark.parametrize("change", [Path.unlink, lambda file: os.truncate(file, 0)], ids=["gone", "just made"])
def test_a_scrape_while_processes_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change) -> None:
    environment = prometheus.environment(str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-c", PROCESS], env=os.environ | environment, cwd=ROOT, text=True, check=True, input="",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout == "counted\n"
    monkeypatch.setenv(*next(iter(environment.items())))
    (written,) = Path(environment[prometheus.METRICS_VARIABLE]).glob("gauge_*.db")
    gauges = written.rename(written.with_name(f"gauge_sum_{os.getppid()}.db"))  # of a process that lives
    content, listings = gauges.read_bytes(), []
    list_files = glob.glob

    def list_and_change(pattern: str) -> list[str]:
        files = list_files(pattern)
        listings.append(files)
        if len(listings) == 1:
            change(gauges)
        elif gauges.exists():
            gauges.write_bytes(content)
        return files

    monkeypatch.setattr("prometheus_client.multiprocess.glob.glob", list_and_change)
    assert b"vllm:mm_cache_queries_total" in prometheus.render()[0]
    assert len(listings) == 2


def test_a_process_with_a_dead_ones_id_does_not_take_its_gauges_over(tmp_path: Path) -> None:
    environment = os.environ | prometheus.environment(str(tmp_path))
    dies = PROCESS + "import os; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"  # it keeps the id
    command = [sys.executable, "-c", dies, PROCESS.replace("recorder.set", "0 and recorder.set")]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, input=b"", stdout=subprocess.PIPE)
    command = [sys.executable, "-c", RENDER]
    text = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert f'{QUERIES}{{engine="0",model_name="m"}} 4.0' in text
    assert f"{FREE}{{" not in text


def test_only_folders_of_metrics_are_wiped(tmp_path: Path) -> None:
    """An operator may have named a folder that holds other things."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "counter_4194999.db").touch()
    (tmp_path / "mixed" / "users.db").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    prometheus.wipe_stale(str(tmp_path))
    assert len(list(tmp_path.rglob("*"))) == 7


def test_folders_without_a_living_writer_are_wiped(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "counter_4194999.db").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"counter_{os.getpid()}.db").touch()
    prometheus.wipe_stale(str(tmp_path))
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]
