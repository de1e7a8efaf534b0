"""A real Prometheus (Debian's package) for tests: scrapes every second, answers queries."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.application import free_port

RULES = Path(__file__).resolve().parents[2] / "configs" / "prometheus" / "rules.yaml"


class Prometheus:
    """Use as a context manager. `jobs`: scrape configs beside their interval."""

    def __init__(self, folder: Path, jobs: list[dict[str, Any]]) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            raise RuntimeError("these tests need Prometheus: apt-get install prometheus")
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": jobs,
            "rule_files": [str(RULES)],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        self._command = [
            binary,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]

    def __enter__(self) -> "Prometheus":
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)
        for _ in range(100):
            try:
                if httpx.get(f"{self.url}/-/ready").status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"Prometheus did not start: see {self._log.name}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of every series that `expression` yields now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        answer.raise_for_status()
        return [(each["metric"], float(each["value"][1])) for each in answer.json()["data"]["result"]]

    def total(self, expression: str) -> float | None:
        """The sum over the series of `expression`; None when there is none."""
        found = self.query(f"sum({expression})")
        return found[0][1] if found else None
