"""From an RGB image to the pixels that the vision encoder takes, by the checkpoint's own image processor."""

import copy
import json
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np
from PIL import Image

from deployments.renderer.errors import APIError
from deployments.renderer.images import DECODING


@dataclass(frozen=True)
class ProcessedImage:
    """One image, ready for the encoder."""

    pixels: np.ndarray
    """float32 [patches, patch_dim], patches in the encoder's order (grouped by merge window)."""
    grid: tuple[int, int, int]
    """(t, h, w) in patches, before merging."""
    num_embeddings: int
    """Rows that the encoder yields: t * h * w / merge_size^2."""


class ImageProcessor:
    """transformers' Pillow-backed image processor behind the two things that the Renderer needs of it."""

    def __init__(self, image_processor: Any, model_id: str) -> None:
        # One frame: those of a still image are all the same, and half the pixels are half the work of every copy.
        self._processor = copy.copy(image_processor)
        self._processor.temporal_patch_size = 1
        self._merge_area = int(image_processor.merge_size) ** 2
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        self.fingerprint = blake3.blake3(
            "\0".join((type(image_processor).__name__, settings, DECODING, model_id)).encode()
        ).digest()
        """Of everything beside the image's bytes that shapes the pixels: processor class and settings, model id."""

    def mm_hash(self, content: bytes, salt: str | None = None) -> str:
        """The image's key in every cache, 64 hex digits: over its raw bytes, so that a hit decodes nothing.

        Under different salts one image is different ones, in every cache.
        """
        hasher = blake3.blake3(self.fingerprint)
        if salt is not None:
            hasher.update(b"salt\0" + blake3.blake3(salt.encode(errors="surrogatepass")).digest())
        hasher.update(b"image\0")
        hasher.update(content)
        return hasher.hexdigest()

    def num_embeddings(self, width: int, height: int) -> int:
        """Of an image of so many pixels, without having it. Raises APIError for a shape that the model cannot take."""
        try:
            return int(self._processor.get_number_of_image_patches(height, width)) // self._merge_area
        except ValueError as error:
            raise _refused(width, height, error) from None

    def process(self, image: Image.Image) -> ProcessedImage:
        """Resize, normalize and cut into patches. Slow (10 ms for 448x448): call it in a worker thread."""
        try:
            output = self._processor(images=[image], return_tensors="np")
        except ValueError as error:  # a shape that it refuses
            raise _refused(image.width, image.height, error) from None
        t, h, w = (int(size) for size in output["image_grid_thw"][0])
        pixels = np.ascontiguousarray(output["pixel_values"], dtype=np.float32)
        return ProcessedImage(pixels, (t, h, w), t * h * w // self._merge_area)


def _refused(width: int, height: int, error: ValueError) -> APIError:
    return APIError(
        f"the model cannot take an image of {width} x {height} pixels: {error}", code="invalid_image_dimensions"
    )
