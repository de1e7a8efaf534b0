"""Where a Renderer keeps processed pixels so that engines can have them: in memory that those on its node open, and for
others as objects of Ray's."""

import asyncio
import resource
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actors.messages import PixelFile
from actors.pixel_memory import PixelMemory

_SHARE_OF_DESCRIPTORS = 0.5
"""Of those that this process may have; pixels beyond them are Ray's objects."""


class StoredPixels:
    """One image's. `memory` is None where they are an object alone."""

    def __init__(self, pixels: np.ndarray, put: Callable[[np.ndarray], Any]) -> None:
        self._put = put
        self._reference: Any = None
        self.memory: PixelMemory | None = None
        memory = PixelMemory.create(pixels)
        if memory.descriptor < _SHARE_OF_DESCRIPTORS * resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            self.memory = memory
        else:
            self._reference = put(pixels)

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def reference(self) -> Any:
        """Ray's; the first call copies the pixels."""
        if self._reference is None:
            assert self.memory is not None
            self._reference = self._put(self.memory.array())
        return self._reference


def files_of(pixels: Mapping[str, Any]) -> dict[str, PixelFile] | None:
    """By mm_hash, for an engine on this node; None where some are Ray's objects alone."""
    files = {}
    for mm_hash, stored in pixels.items():
        if not isinstance(stored, StoredPixels) or stored.memory is None:
            return None
        files[mm_hash] = stored.memory.file
    return files


async def references_of(pixels: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's, by mm_hash, for an engine elsewhere."""
    fresh = [stored for stored in pixels.values() if isinstance(stored, StoredPixels) and not stored.has_reference]
    if fresh:  # copies them
        await asyncio.to_thread(lambda: [stored.reference() for stored in fresh])
    return {
        mm_hash: stored.reference() if isinstance(stored, StoredPixels) else stored
        for mm_hash, stored in pixels.items()
    }
