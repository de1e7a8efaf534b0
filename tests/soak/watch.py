"""Reads what the application's processes hold, from outside."""

import json
import os
import re
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.soak.leaks import Holding, Quiet
from tests.support.application import Application

_NAMES = (
    ("ServeReplica:trn-vision-serve:Renderer", "Renderer"),
    ("ServeReplica:trn-vision-serve:Scheduler", "Scheduler"),
    ("RankActor", "RankActor"),
    ("Proxy", "Proxy"),
    ("ServeController", "Controller"),
    ("serve run", "serve run"),
    ("haproxy", "haproxy"),
    ("gcs_server", "gcs_server"),
    ("raylet/raylet", "raylet"),
    ("dashboard/agent.py", "dashboard agent"),
    ("runtime_env", "runtime env agent"),
    ("log_monitor", "log monitor"),
    ("dashboard", "dashboard"),
)
INTERVAL_S = 5.0


def tree(application: Application) -> dict[str, list[psutil.Process]]:
    """The application's living processes by name; those that come and go with Ray's jobs are left out."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    root = psutil.Process(application.pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            name = next((name for part, name in _NAMES if part in line), None)
            if name is not None and process.status() != psutil.STATUS_ZOMBIE:
                found[name].append(process)
    return found


def ranks(application: Application) -> list[psutil.Process]:
    return tree(application).get("RankActor", [])


def holdings(application: Application) -> dict[str, Holding]:
    """By name; several processes of one name are added up."""
    result = {}
    for name, processes in tree(application).items():
        memory, files, threads = 0.0, 0, 0
        for process in processes:
            with suppress(psutil.Error):
                memory += process.memory_full_info().uss / 1e6
                files += process.num_fds()
                threads += process.num_threads()
        result[name] = Holding(memory, files, threads)
    return result


def open_pixels(application: Application) -> dict[str, int]:
    """Descriptors of pixels in memory (`actors.pixel_memory`), by the name of the processes that hold them."""
    result = {}
    for name, processes in tree(application).items():
        links = []
        for process in processes:
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    links.append(os.readlink(file))
        if count := sum("tvs-pixels" in link for link in links):
            result[name] = count
    return result


def object_store_bytes(application: Application) -> float:
    """Bytes of all objects in shared memory or spilled, as Ray's own metrics say, which lag by their report interval.

    Smaller ones than 100 kB are in the memory of the process that made them: Serve's errors for those who left.
    """
    total = 0.0
    for job in json.loads(Path(application.ray_discovery).read_text()):
        for target in job["targets"]:
            with suppress(httpx.HTTPError):
                text = httpx.get(f"http://{target}/metrics", timeout=10).text
                for family in text_string_to_metric_families(text):
                    if family.name == "ray_object_store_memory":
                        stored = [each for each in family.samples if each.labels["Location"] != "WORKER_HEAP"]
                        total += sum(sample.value for sample in stored)
    return total


def quiet(application: Application, folder: Path, gauges: tuple[str, ...]) -> Quiet:
    values = application.metrics()
    return Quiet(
        holdings(application),
        object_store_bytes(application),
        sum(name.startswith("tvs-") for name in os.listdir("/dev/shm")),
        sum(name.startswith("tvs-") for name in os.listdir(folder)),
        {name: values[name] for name in gauges},
    )


class Watcher:
    """Samples the memory of every process on a thread of its own: seconds since the start, megabytes by name."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._stop = threading.Event()
        self._begin = time.monotonic()
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def now(self) -> float:
        return time.monotonic() - self._begin

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            with suppress(psutil.Error):
                memory = {name: holding.memory_mb for name, holding in holdings(self._application).items()}
                self.samples.append((self.now, memory))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def errors_in(log: str) -> list[str]:
    """Lines that no operator should find, other than those about ranks that were killed."""
    wrong = re.compile(r"\bERROR\b|Traceback|CRITICAL|never (awaited|retrieved)")
    expected = re.compile(r"restarting the gang|rank -?\d+|gang", re.IGNORECASE)
    return [line for line in log.splitlines() if wrong.search(line) and not expected.search(line)]
