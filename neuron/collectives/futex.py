"""Sleep on a word of shared memory until another process wakes it: Linux's futex, and a short sleep elsewhere."""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 2**31 - 1
_POLL_S = 0.0001


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """One 32-bit word at `offset` bytes of a shared mapping.

    A sleeper wakes after `timeout_s` seconds at the latest, so a lost wake costs time and never the answer.
    """

    def __init__(self, memory: mmap.mmap, offset: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._syscall = _find_syscall()
        self._number = _SYSCALL_NUMBERS.get(platform.machine(), 0)
        if self._syscall is not None:
            # The ctypes object keeps the mapping alive, and with it the address.
            self._word = ctypes.c_uint32.from_buffer(memory, offset)
            self._address = ctypes.addressof(self._word)
            self._timespec = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
            self._timespec_address = ctypes.addressof(self._timespec)

    def sleep_while(self, value: int) -> None:
        """Sleep if the word is `value`. Returns when woken, at the timeout, on a signal, or without cause."""
        if self._syscall is None:
            time.sleep(min(_POLL_S, self._timeout_s))
        else:
            self._syscall(self._number, self._address, _FUTEX_WAIT, value & 0xFFFFFFFF, self._timespec_address, None, 0)

    def wake_all(self) -> None:
        """Wake every process that sleeps on the word."""
        if self._syscall is not None:
            self._syscall(self._number, self._address, _FUTEX_WAKE, _EVERYONE, None, None, 0)


def _find_syscall() -> Callable[..., int] | None:
    """libc's `syscall`, where this platform's number for futex is known."""
    if os.uname().sysname != "Linux" or platform.machine() not in _SYSCALL_NUMBERS:
        return None
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    )  # fmt: skip
    return syscall
