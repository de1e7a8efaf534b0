"""The engines that are measured: this project's, a peer that a command starts, or whatever answers at a URL."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from tests.support.application import Application, behind_haproxy, free_port

START_LIMIT = 900  # seconds

RUN = (sys.executable, "-m", "deployments.run")
"""What `make serve` calls."""


@dataclass
class Running:
    """An engine that answers. pid: of the process whose descendants it is; None when unknown."""

    url: str
    model: str
    start_seconds: float | None = None
    pid: int | None = None


@contextmanager
def ours(checkpoint: Path, log: Path, max_model_len: int) -> Iterator[Running]:
    """`configs/laptop.yaml` with this checkpoint in fp32, behind HAProxy as `make serve` runs it."""
    changes = {
        "model": {"path": str(checkpoint), "served_name": "bench", "dtype": "float32", "max_model_len": max_model_len},
        "telemetry": {"stats_interval_s": 3600},
    }
    with Application("configs/laptop.yaml", changes, log, behind_haproxy(), command=RUN) as application:
        yield Running(application.url, "bench", application.start_seconds, application.pid)


@contextmanager
def peer(command: str, checkpoint: Path, log: Path) -> Iterator[Running]:
    """What `command` starts, with {checkpoint} and {port} filled in."""
    port = free_port()
    words = [word.format(checkpoint=checkpoint, port=port) for word in shlex.split(command)]
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not (model := model_at(url)):
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended:\n{log.read_text()[-3000:]}")
            if time.monotonic() - begin > START_LIMIT:
                raise TimeoutError(f"{command}: not ready within {START_LIMIT} s:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)
        yield Running(url, model, time.monotonic() - begin, process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def at_url(url: str) -> Iterator[Running]:
    """A server that somebody else started. Raises RuntimeError when nothing answers there."""
    model = model_at(url)
    if model is None:
        raise RuntimeError(f"{url}/v1/models does not answer with a model")
    yield Running(url, model)


def model_at(url: str) -> str | None:
    """The first model that is served there; None when nothing answers (yet)."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, LookupError):
        return None


def memory_of(root: int) -> int:
    """Bytes that a process and its descendants hold, pages shared among processes counted in parts."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    total = 0
    for pid in family:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
