"""Runs the application as a user does, `serve run` on a config file, and reads its metrics."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deployments.ports import FALLBACK, HAPROXY

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def behind_haproxy() -> dict[str, str]:
    """The environment that `make serve` gives `serve run`, with ports that nobody has."""
    ports = {name: str(free_port()) for name in (*HAPROXY, FALLBACK)}
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"} | ports


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with nested `changes` laid over it."""
    result = dict(tree)
    for key, value in changes.items():
        result[key] = merge(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


class Application:
    """One `serve run`, with its own Ray cluster, port and metric folder. Use as a context manager.

    `replicas`: how many of a deployment. `command`: another than `serve run`, before the config file. `api_key`: one of
    those that the configuration asks for.
    """

    def __init__(
        self,
        config: str,
        changes: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
        replicas: Mapping[str, int] | None = None,
        command: Sequence[str] = (str(Path(sys.executable).parent / "serve"), "run"),
        api_key: str = "none",
    ) -> None:
        tree = yaml.safe_load((ROOT / config).read_text())
        self._command = command
        self._api_key = api_key
        if replicas is not None:
            tree["applications"][0]["deployments"] = [
                {"name": name, "num_replicas": number} for name, number in replicas.items()
            ]
        self.port = free_port()
        tree["http_options"]["port"] = self.port
        self._folder = tempfile.TemporaryDirectory(prefix="tvs-e2e-")
        application = tree["applications"][0]
        defaults = {"telemetry": {"multiproc_dir": f"{self._folder.name}/metrics"}}
        application["args"] = merge(merge(application.get("args", {}), defaults), changes)
        self.args = application["args"]
        self._config = Path(self._folder.name) / "config.yaml"
        self._config.write_text(yaml.safe_dump(tree))
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.start_seconds = 0.0

    def __enter__(self) -> "Application":
        drop = {"RAY_ADDRESS", "PROMETHEUS_MULTIPROC_DIR"}
        environment = {key: value for key, value in os.environ.items() if key not in drop}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": self._folder.name}
        environment |= self._environment
        begin = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, str(self._config)],
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                # A shell that runs this in the background has SIGINT ignored, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"serve run ended:\n{self.log.read_text()[-6000:]}")
            if time.monotonic() - begin > 240:
                self.__exit__()
                raise TimeoutError(f"not ready within 240 s:\n{self.log.read_text()[-6000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        self.start_seconds = time.monotonic() - begin
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()

    def wait(self, timeout_s: float) -> int:
        """Until `serve run` has ended by itself; its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @property
    def pid(self) -> int:
        """Of `serve run`, whose descendants are the whole application."""
        assert self._process is not None
        return self._process.pid

    @property
    def ray_discovery(self) -> str:
        """The file in which this application's Ray cluster names its metric endpoints to Prometheus."""
        return f"{self._folder.name}/ray/prom_metrics_service_discovery.json"

    @property
    def ray_logs(self) -> Path:
        """Where every process of this application's Ray cluster writes its logs."""
        return Path(self._folder.name) / "ray" / "session_latest" / "logs"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self._api_key, timeout=300, max_retries=0)

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, summed over its labels, without the `_total` of counters."""
        headers = {"Authorization": f"Bearer {self._api_key}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=30).raise_for_status().text
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                values[name] = values.get(name, 0.0) + sample.value
        return values
