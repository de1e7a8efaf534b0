"""The drawn board, against a small HTTP server that answers like Prometheus."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from PIL import Image

from configs.grafana.draw import BOARD, panels, readable, variable_values

ROOT = Path(__file__).resolve().parents[2]


class FakePrometheus(BaseHTTPRequestHandler):
    """The ranks' series for every query, those of few with a gap, and keeps the queries."""

    queries: list[str]
    ranks: tuple[int, ...] = (10, 2)
    error = ""

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.queries.append(form["query"][0])
        start, step = float(form["start"][0]), float(form["step"][0])
        result = [
            {
                "metric": {"model_name": "m", "rank": str(rank), "bucket_name": f"decode_{rank}"},
                "values": [[start + i * step, "NaN" if i == rank else str(i)] for i in range(5)],
            }
            for rank in self.ranks
        ]
        answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
        if self.error:
            answer = {"status": "error", "error": self.error}
        body = json.dumps(answer).encode()
        self.send_response(400 if self.error else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def prometheus() -> Iterator[tuple[str, type[FakePrometheus]]]:
    """Its address, and its handler."""
    handler = type("Handler", (FakePrometheus,), {"queries": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def draw(url: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "configs/grafana/draw.py", "--prometheus", url, "--last", "10m", "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_query_is_sent_and_drawn(prometheus: tuple[str, type[FakePrometheus]], tmp_path: Path) -> None:
    url, handler = prometheus
    result = draw(url, tmp_path / "images" / "board.png")
    assert result.returncode == 0, result.stderr
    targets = [target for panel in panels(json.loads(BOARD.read_text())) for target in panel.get("targets", ())]
    assert len(handler.queries) == len(targets)
    assert not [query for query in handler.queries if "$" in query]
    assert any("[60s]" in query for query in handler.queries)
    with Image.open(tmp_path / "images" / "board.png") as image:
        assert image.width > 1500
        assert image.height > 2000


def test_a_panel_holds_more_series_than_its_legend(
    prometheus: tuple[str, type[FakePrometheus]], tmp_path: Path
) -> None:
    url, handler = prometheus
    handler.ranks = tuple(range(200))
    result = draw(url, tmp_path / "board.png")
    assert result.returncode == 0, result.stderr


def test_errors_name_the_address_and_the_reason(prometheus: tuple[str, type[FakePrometheus]], tmp_path: Path) -> None:
    url, handler = prometheus
    handler.error = "parse error"
    for address, says in ((url, "parse error"), ("http://127.0.0.1:9", "no Prometheus answers at http://127.0.0.1:9")):
        result = draw(address, tmp_path / "board.png")
        assert result.returncode == 1
        assert says in result.stderr
        assert "Traceback" not in result.stderr


def test_the_rate_interval_grows_with_the_range() -> None:
    board = json.loads(BOARD.read_text())
    assert variable_values(board, 600)["rate_interval"] == "60s"
    assert variable_values(board, 6 * 3600)["rate_interval"] == "720s"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25 %"),
        (0.0025, "s", "2.5 ms"),
        (90, "s", "90 s"),
        (3 * 1024**2, "bytes", "3 MiB"),
        (512, "Bps", "512 B/s"),
        (2, "suffix:tokens/s", "2 tokens/s"),
        (7, "short", "7"),
    ],
)
def test_values_are_readable(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text
