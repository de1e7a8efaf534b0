"""How a process which computes with large arrays has its memory: variables before it starts, and what it gives back."""

import ctypes
import sys

KEEPS_BUFFERS = {
    # glibc keeps freed buffers: giving them back each time costs page faults (52 ms a token instead of 22).
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}

COMPUTES = KEEPS_BUFFERS | {
    # Idle OpenMP threads sleep: spinning ones take the cores from the other ranks (540 ms a token instead of 3), and at
    # one rank from the Renderer and the client (18 ms a token of 16 streams instead of 14).
    "OMP_WAIT_POLICY": "passive",
}


def give_back_memory() -> None:
    """To the system, what was freed: `KEEPS_BUFFERS` keeps as much as a start ever needed. Of glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
