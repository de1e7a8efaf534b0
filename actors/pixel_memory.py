"""Pixels in memory that the processes of one user on one node open from each other: no copy, and no name to clean up.

The kernel frees it when the last process that holds it drops it, or dies.
"""

import mmap
import os
import uuid

import numpy as np

from actors.messages import PixelFile


class PixelMemory:
    """One image's pixels, float32 [patches, patch_dim]: written once, then only read. Linux (memfd)."""

    def __init__(self, descriptor: int, name: str, shape: tuple[int, int]) -> None:
        """Owns the descriptor."""
        self.descriptor = descriptor
        self.name = name
        self.shape = shape
        self._mapped: np.ndarray | None = None

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def create(cls, pixels: np.ndarray) -> "PixelMemory":
        """Copies them. It stays mapped here, so that it counts as this process's memory. Raises OSError."""
        name = f"tvs-pixels-{uuid.uuid4().hex}"
        memory = cls(os.memfd_create(name), name, pixels.shape)
        os.ftruncate(memory.descriptor, pixels.nbytes)
        memory._mapped = _map(memory.descriptor, pixels.shape, mmap.PROT_READ | mmap.PROT_WRITE)
        np.copyto(memory._mapped, pixels)
        return memory

    @classmethod
    def open(cls, file: PixelFile) -> "PixelMemory":
        """That of another process. Raises OSError when that has dropped it."""
        memory = cls(os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY), file.name, file.shape)
        # The number may be another file's by now.
        if os.readlink(f"/proc/self/fd/{memory.descriptor}") != f"/memfd:{file.name} (deleted)":
            raise FileNotFoundError(f"process {file.pid} has dropped {file.name}")
        return memory

    @property
    def file(self) -> PixelFile:
        """How other processes find it, while this object lives."""
        return PixelFile(pid=os.getpid(), descriptor=self.descriptor, name=self.name, shape=self.shape)

    def array(self) -> np.ndarray:
        """Not to be written to; it may outlive this object."""
        return _map(self.descriptor, self.shape, mmap.PROT_READ) if self._mapped is None else self._mapped


def _map(descriptor: int, shape: tuple[int, int], protection: int) -> np.ndarray:
    memory = mmap.mmap(descriptor, 4 * shape[0] * shape[1], mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
    return np.frombuffer(memory, np.float32).reshape(shape)
