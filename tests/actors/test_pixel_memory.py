"""Pixels that processes of one node open from each other: what they hold, and for how long."""

import gc
import multiprocessing
import os
from collections import Counter

import numpy as np
import pytest

from actors.messages import PixelFile
from actors.pixel_memory import PixelMemory

PIXELS = np.random.default_rng(0).standard_normal((784, 768), dtype=np.float32)


def descriptors() -> int:
    """To memory of this kind."""
    gc.collect()
    links = Counter(os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum(count for link, count in links.items() if "tvs-pixels" in link)


def read(file: PixelFile, answers: "multiprocessing.Queue[float]") -> None:
    answers.put(float(PixelMemory.open(file).array().sum(dtype=np.float64)))


def test_another_process_reads_them() -> None:
    memory = PixelMemory.create(PIXELS)
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[float] = context.Queue()
    process = context.Process(target=read, args=(memory.file, answers))
    process.start()
    assert answers.get(timeout=60) == float(PIXELS.sum(dtype=np.float64))
    process.join()


def test_who_has_opened_them_holds_them() -> None:
    memory = PixelMemory.create(PIXELS)
    opened = PixelMemory.open(memory.file)
    file = memory.file
    del memory
    array = opened.array()
    assert opened.file.name == file.name
    del opened
    assert np.array_equal(array, PIXELS)
    assert not array.flags.writeable
    del array
    with pytest.raises(FileNotFoundError):
        PixelMemory.open(file)


def test_another_file_under_the_same_number_is_not_taken_for_them() -> None:
    memory = PixelMemory.create(PIXELS)
    file = memory.file
    del memory
    gc.collect()
    others = [PixelMemory.create(PIXELS) for _ in range(2)]
    assert file.descriptor in [other.descriptor for other in others]
    with pytest.raises(FileNotFoundError, match="has dropped"):
        PixelMemory.open(file)


def test_nothing_stays_open() -> None:
    before = descriptors()
    memory = PixelMemory.create(PIXELS)
    opened = PixelMemory.open(memory.file)
    array = opened.array()
    assert descriptors() > before + 1
    del memory, opened, array
    assert descriptors() == before
