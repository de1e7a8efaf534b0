"""What happens where the kernels for AMX cannot run: torch's operators, and a line in the log that says why."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron.amx import library
from neuron.kernels import choose_kernels, load_kernels


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def chosen(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, logger="trn_vision_serve"):
        assert choose_kernels("per_sequence", "amx", "float32", "high") == load_kernels("per_sequence")
    return caplog.text


def test_a_cpu_without_amx(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    text = chosen(caplog)
    assert "model.matmul_precision = 'high' computes as 'highest' does" in text
    assert "lacks amx_bf16, amx_tile" in text


def test_no_compiler_when_it_was_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(library._NEEDED))
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert "not built when this project was installed" in chosen(caplog)
