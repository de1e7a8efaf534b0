"""Zeros that take no memory before they are written: on the CPU the kernel gives pages as they are first touched."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As torch.zeros, which writes every page. On other devices it is that."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)  # a fault for 2 MB, not for 4 KB
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
