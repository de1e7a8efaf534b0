"""The file in shared memory where the ranks of one gang on one host meet.

Layout, in bytes; int64 words except the tensors:

    0     magic (written last), world_size, slot_bytes
    64    generation: sequence number of the last meeting that every rank reached; sleepers: the last one slept for
    128   pids[world_size]       0 until the rank has joined
    ...   statuses[world_size]   Status
    ...   blames[world_size]     of a failed rank: bit r set = it found rank r missing
    ...   arrivals[world_size]   sequence number << 16 | signature of the rank's last meeting
    ...   slots[2][world_size][slot_bytes], results[2][slot_bytes]

Each word has one writer, except generation, where all writers of a moment write the same value, and sleepers, which may
fall back by one.
"""

import contextlib
import errno
import mmap
import os
import re
import select
import tempfile
import time
from enum import IntEnum

import numpy as np
import torch

from neuron.collectives.interface import CollectiveError

_MAGIC = 0x74767331
_LINE = 64
"""Bytes: words of different use sit on different cache lines."""
_PAGE = 4096
_WORD = 8
GENERATION_OFFSET = _LINE
MAX_WORLD_SIZE = 63
"""Ranks in one blame word."""


class Status(IntEnum):
    """What a rank says of itself."""

    JOINED = 0
    LEFT = 1
    FAILED = 2


def segment_path(token: str) -> str:
    """Path of the gang's file; in memory where the system has /dev/shm."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", token):
        raise ValueError(f"rendezvous {token!r}: expected 1 to 200 letters, digits, '.', '_' or '-'")
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(folder, f"trn-vision-serve-{token}")


class Segment:
    """The joined gang's memory, and who of the gang still lives.

    Rank 0 creates the file, replacing one that a killed gang of the same token left, and unlinks it once all have
    joined: from then on nothing can leak, however the ranks end.
    """

    def __init__(self, rank: int, world_size: int, token: str, slot_bytes: int, timeout_s: float) -> None:
        if world_size > MAX_WORLD_SIZE:
            raise ValueError(f"world_size {world_size}: shared memory takes at most {MAX_WORLD_SIZE} ranks")
        if slot_bytes < _PAGE or slot_bytes % _LINE:
            raise ValueError(f"slot_bytes {slot_bytes}: expected a multiple of {_LINE}, at least {_PAGE}")
        self.rank = rank
        self.world_size = world_size
        self.slot_bytes = slot_bytes
        self._path = segment_path(token)
        self._vectors = [2 * _LINE + i * _round_up(world_size * _WORD, _LINE) for i in range(4)]
        self._header_bytes = _round_up(self._vectors[-1] + world_size * _WORD, _PAGE)
        self._bytes = self._header_bytes + (2 * world_size + 2) * slot_bytes
        self._poll: select.poll | None = None
        self._rank_of_fd: dict[int, int] = {}
        self._watch: dict[int, int] = {}
        """rank -> pid, where there is no pidfd."""
        self._join(time.monotonic() + timeout_s, timeout_s)

    # Joining

    def _join(self, deadline: float, timeout_s: float) -> None:
        reason = f"rank 0 has not made {self._path}"
        missing: list[int] = [0]
        while True:
            inode = self._create() if self.rank == 0 else self._attach()
            if inode is not None:
                complete, reason, missing = self._wait_for_all(inode, deadline)
                if complete:
                    break
                self._unmap()
                if self.rank == 0:
                    self._unlink(inode)
                    raise CollectiveError("join", reason, missing)
            if time.monotonic() > deadline:
                raise CollectiveError("join", f"{reason} after {timeout_s:g} s", missing)
            time.sleep(0.002)
        if self.rank == 0:
            self._unlink(inode)

    def _create(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            self._reserve(fd)
            self._map(fd)
            self._words[1], self._words[2] = self.world_size, self.slot_bytes
            self.pids[0] = os.getpid()
            self._words[0] = _MAGIC
            return os.fstat(fd).st_ino
        except BaseException:
            os.unlink(self._path)
            raise
        finally:
            os.close(fd)

    def _reserve(self, fd: int) -> None:
        """Take the memory now: a full /dev/shm is an error here and would be SIGBUS at some later store."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, self._bytes)
            else:
                os.ftruncate(fd, self._bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            folder = os.path.dirname(self._path)
            raise CollectiveError(
                "join", f"{folder} has no room for {self._bytes >> 20} MiB ({self.world_size} ranks): enlarge it"
            ) from error

    def _attach(self) -> int | None:
        """The file's inode, or None while there is none that this rank can join."""
        try:
            fd = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != self._bytes:
                return None
            self._map(fd)
            if self._words[0] != _MAGIC or self.pids[self.rank]:
                # Not ready, or another gang's: its rank of this number has joined it.
                self._unmap()
                return None
            if (self._words[1], self._words[2]) != (self.world_size, self.slot_bytes):
                self._unmap()
                return None
            self.pids[self.rank] = os.getpid()
            return status.st_ino
        finally:
            os.close(fd)

    def _wait_for_all(self, inode: int, deadline: float) -> tuple[bool, str, list[int]]:
        """(every rank has joined and lives, what is wrong otherwise, the ranks missing)."""
        watched = {self.rank}
        while True:
            joined = {rank for rank in range(self.world_size) if self.pids[rank]}
            for rank in joined - watched:
                if not self._watch_peer(rank, self.pids[rank]):
                    return False, f"rank {rank} (pid {self.pids[rank]}) died while joining", [rank]
            watched |= joined
            dead = self.dead_ranks()
            if dead:
                return False, f"rank {dead[0]} (pid {self.pids[dead[0]]}) died while joining", dead
            if len(joined) == self.world_size:
                return True, "", []
            missing = sorted(set(range(self.world_size)) - joined)
            if time.monotonic() > deadline:
                return False, f"ranks {missing} did not join in time", missing
            if self.rank != 0 and not self._is_current(inode):
                return False, f"rank 0 gave up on {self._path}", missing
            time.sleep(0.002)

    def _is_current(self, inode: int) -> bool:
        try:
            return os.stat(self._path).st_ino == inode
        except FileNotFoundError:
            return all(self.pids)

    def _unlink(self, inode: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == inode:
                os.unlink(self._path)

    # Memory

    def _map(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, self._bytes)
        view = memoryview(self.memory)
        words = view[: self._header_bytes].cast("Q")
        self._words = words
        self.generation = words[_LINE // _WORD : _LINE // _WORD + 1]
        self.sleepers = words[_LINE // _WORD + 1 : _LINE // _WORD + 2]
        self.pids, self.statuses, self.blames, self.arrivals = (
            words[start // _WORD : start // _WORD + self.world_size] for start in self._vectors
        )
        with torch.inference_mode(False):
            tensors = torch.from_numpy(np.frombuffer(self.memory, np.uint8)[self._header_bytes :])
            slots = 2 * self.world_size * self.slot_bytes
            self.slots = tensors[:slots].view(2, self.world_size, self.slot_bytes)
            """uint8 [2, world_size, slot_bytes]"""
            self.results = tensors[slots:].view(2, self.slot_bytes)
            """uint8 [2, slot_bytes]"""

    def _unmap(self) -> None:
        """Drop this object's views; the mapping goes with the last of them."""
        for name in (
            "memory", "_words", "generation", "sleepers", "pids", "statuses", "blames", "arrivals", "slots", "results",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        for fd in self._rank_of_fd:
            os.close(fd)
        self._poll, self._rank_of_fd, self._watch = None, {}, {}

    # The living

    def _watch_peer(self, rank: int, pid: int) -> bool:
        """Whether the process lives; from now on `dead_ranks` looks at it."""
        if hasattr(os, "pidfd_open"):
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return False
            except OSError:
                pass
            else:
                if self._poll is None:
                    self._poll = select.poll()
                self._poll.register(fd, select.POLLIN)
                self._rank_of_fd[fd] = rank
                return True
        self._watch[rank] = pid
        return _lives(pid)

    def dead_ranks(self) -> list[int]:
        """Ranks whose process has ended, reaped or not."""
        dead = [] if self._poll is None else [self._rank_of_fd[fd] for fd, _ in self._poll.poll(0)]
        dead += [rank for rank, pid in self._watch.items() if not _lives(pid)]
        return sorted(dead)

    def close(self) -> None:
        """Tell the peers that this rank has left, and drop the mapping."""
        if "statuses" in self.__dict__:
            if self.statuses[self.rank] == Status.JOINED:
                self.statuses[self.rank] = Status.LEFT
            self._unmap()


def _lives(pid: int) -> bool:
    """Without pidfds a process that ended counts as living until its parent has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
