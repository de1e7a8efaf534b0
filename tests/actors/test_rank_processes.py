"""What is left of a gang that ended by force: nothing."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from actors import rank_processes
from actors.rank_processes import end_processes, remove_segments


def start(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", name], stdin=subprocess.PIPE)


def test_a_stopped_rank_is_killed_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_END_S", 0.3)
    stopped, ended, other = start("RankActor"), start("RankActor"), start("a process with a rank's old id")
    os.kill(stopped.pid, signal.SIGSTOP)
    ended.kill()  # and not reaped
    begin = time.monotonic()
    end_processes([stopped.pid, ended.pid, other.pid])
    assert time.monotonic() - begin < 5
    assert stopped.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    other.communicate()
    ended.wait()
    end_processes([stopped.pid, ended.pid, other.pid])


def test_shared_memory_with_a_name_goes_with_its_gang() -> None:
    name, another = f"tvs-{uuid.uuid4().hex[:12]}", f"tvs-{uuid.uuid4().hex[:12]}"
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    mine, theirs = folder / f"trn-vision-serve-{name}", folder / f"trn-vision-serve-{another}"
    mine.touch()
    theirs.touch()
    remove_segments(name)
    remove_segments("tcp://10.0.0.1:80")
    remove_segments("")
    assert (mine.exists(), theirs.exists()) == (False, True)
    theirs.unlink()
