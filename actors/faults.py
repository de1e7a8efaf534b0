"""Faults on purpose, for tests: a file says what happens to which rank at which stage, once.

`debug.fault_dir` holds files `<stage>.<rank>`; a rank that comes to a stage takes its file away and does what it says.
Stages: load, warm_up, encode, prefill, decode.
"""

import os
import signal
import time
from pathlib import Path

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class InjectedError(RuntimeError):
    """Raised where a test asked for it."""


def check_fault(folder: str | None, stage: str, rank: int) -> None:
    """Does what a fault file for this stage and rank says: kill, stop, raise or memory; nothing where there is none.

    Raises ValueError for a file that says something else.
    """
    if folder is None:
        return
    file = Path(folder) / f"{stage}.{rank}"
    try:
        fault = file.read_text()
        file.unlink()
    except FileNotFoundError:
        return
    if fault == "memory":
        raise MemoryError(f"asked for in {stage}")
    if fault == "raise":
        raise InjectedError(f"asked for in {stage}")
    if fault not in SIGNALS:
        raise ValueError(f"{file.name}: {fault!r}; expected kill, stop, raise or memory")
    os.kill(os.getpid(), SIGNALS[fault])
    time.sleep(0.01)  # a stopped process goes on here
