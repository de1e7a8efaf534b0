"""Faults that tests ask for come true, once, at their stage and on their rank only."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.faults import InjectedError, check_fault
from tests.support.faults import Faults

ROOT = Path(__file__).resolve().parents[2]
MEET = "import sys; from actors.faults import check_fault; check_fault(sys.argv[1], 'decode', 2); print('met')"


@pytest.mark.parametrize(("fault", "error"), [("raise", InjectedError), ("memory", MemoryError)])
def test_errors_are_raised_once(tmp_path: Path, fault: str, error: type[Exception]) -> None:
    (tmp_path / "encode.1").write_text(fault)
    check_fault(None, "encode", 1)
    check_fault(str(tmp_path), "encode", 0)
    check_fault(str(tmp_path), "prefill", 1)
    with pytest.raises(error):
        check_fault(str(tmp_path), "encode", 1)
    check_fault(str(tmp_path), "encode", 1)


def test_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", MEET, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)

    (tmp_path / "decode.2").write_text("kill")
    assert start().wait(20) == -signal.SIGKILL
    (tmp_path / "decode.2").write_text("stop")
    stopped = start()
    _, status = os.waitpid(stopped.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.communicate()[0] == b"met\n"


def test_a_fault_is_never_read_before_it_is_written(tmp_path: Path) -> None:
    """A rank looks every few milliseconds while a test asks."""
    faults, met = Faults(tmp_path), 0

    def ask() -> None:
        for _ in range(2000):
            faults.ask("decode.0", "raise")

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive() or faults.left():
        try:
            check_fault(str(tmp_path), "decode", 0)
        except InjectedError:
            met += 1
    assert met > 0


def test_what_is_no_fault_is_told_apart(tmp_path: Path) -> None:
    Faults(tmp_path).ask("decode.0", "")
    with pytest.raises(ValueError, match=r"decode\.0: ''; expected kill, stop"):
        check_fault(str(tmp_path), "decode", 0)
