"""Which Ray cluster `python -m deployments.run` joins, and when it starts its own."""

import socket
from pathlib import Path

import pytest

from deployments.run import joins_a_cluster


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` names its cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    return file


def test_a_cluster_that_answers_is_joined(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        named.write_text(address)
        assert joins_a_cluster()
    assert address in capsys.readouterr().out


@pytest.mark.parametrize("address", ["127.0.0.1:{free}", "127.0.0.1:123456", "", "nonsense"])
def test_one_that_does_not_is_said_and_left_alone(
    named: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    named.write_text(address.format(free=free))
    assert not joins_a_cluster()
    said = capsys.readouterr().out
    assert str(named) in said
    assert "nobody answers" in said


def test_what_ray_address_says_holds(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named.write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not joins_a_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # Ray itself says what is wrong with it
    assert joins_a_cluster()
    named.unlink()
    monkeypatch.delenv("RAY_ADDRESS")
    assert not joins_a_cluster()
