"""What a gang leaves on this node when its ranks end by force: processes that do not end, and shared memory."""

import logging
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("trn_vision_serve")

_END_S = 1.0
"""Ray's own way of ending a rank gets so long before the rank is killed here."""
_POLL_S = 0.02


def end_processes(pids: Sequence[int], name: str = "RankActor") -> None:
    """Wait until these processes have ended; kill those that take too long: Ray asks, and a stopped one never hears.

    `name` stands in their command lines: a process that has got the id of one that ended is left alone.
    """
    left = _running(pids, name)
    deadline = time.monotonic() + _END_S
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = _running(left, name)
    for pid in left:
        logger.warning("rank process %d did not end by itself and is killed", pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while _running(left, name) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def remove_segments(rendezvous: str) -> None:
    """Shared memory of a gang that ended while its ranks were joining: later it has no name any more."""
    if rendezvous.startswith("tvs-"):
        for folder in ("/dev/shm", tempfile.gettempdir()):
            for file in Path(folder).glob(f"*{rendezvous}"):
                file.unlink(missing_ok=True)


def _running(pids: Sequence[int], name: str) -> list[int]:
    """Those that are neither gone nor waiting to be reaped."""
    return [pid for pid in pids if name in _command_line(pid)]


def _command_line(pid: int) -> str:
    """Empty for a process that has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
