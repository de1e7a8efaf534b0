"""An application finds ports that nobody has, and says where it can't."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import ports, run

FREE = ports.is_free


@pytest.fixture
def shared() -> Iterator[int]:
    """A port that somebody listens on and would share, as Serve's proxies do."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ports.HAPROXY, ports.FALLBACK):
        monkeypatch.delenv(name, raising=False)


def test_a_port_that_would_be_shared_is_not_free(shared: int) -> None:
    assert not ports.is_free(shared)


def test_haproxy_has_its_usual_ports_where_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port: port != 9101)
    chosen = ports.of_haproxy()
    assert chosen["RAY_SERVE_HAPROXY_STATS_PORT"] == "8404"
    assert chosen["RAY_SERVE_HAPROXY_METRICS_PORT"] != "9101"
    assert chosen[ports.FALLBACK] != "8500"
    assert all(FREE(int(chosen[name])) for name in ("RAY_SERVE_HAPROXY_METRICS_PORT", ports.FALLBACK))


def test_ports_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "1234")
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in ports.of_haproxy()


def test_an_http_port_in_use_is_refused(shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    config = tmp_path / "config.yaml"
    config.write_text(f"http_options:\n  port: {shared}\napplications:\n  - name: any\n")
    with pytest.raises(SystemExit, match=f"port {shared} is in use.*http_options.port"):
        run.main([str(config)])


def test_serves_own_port_is_the_default(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: []\n")
    assert ports.http_port(config) == 8000
