"""Where a rank keeps the pixels that were sent ahead of the step that encodes them."""

import threading

import numpy as np


class PixelMailbox:
    """Pixels by mm_hash: put by the actor call that brings them, taken by the step that encodes them."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._pixels: dict[str, np.ndarray | None] = {}

    def put(self, mm_hash: str, pixels: np.ndarray | None) -> None:
        """`pixels` float32 [patches, patch_dim]; None: they were lost."""
        with self._arrived:
            self._pixels[mm_hash] = pixels
            self._arrived.notify_all()

    def take(self, mm_hash: str, timeout_s: float) -> np.ndarray | None:
        """Wait for an image's pixels and forget them. Raises TimeoutError when they do not come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: mm_hash in self._pixels, timeout_s):
                raise TimeoutError(f"the pixels of {mm_hash} did not arrive within {timeout_s:g} s")
            return self._pixels.pop(mm_hash)
