"""From an RGB image to the pixels that the vision encoder takes, by the checkpoint's own image processor."""

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
        self._processor = image_processor
        self._merge_area = int(image_processor.merge_size) ** 2
        settings = json.dumps(image_processor.to_dict(), sort_keys=True, default=str)
        self.fingerprint = blake3.blake3(
            "\0".join((type(image_processor).__name__, settings, DECODING, model_id)).encode()
        ).digest()
        """Of everything beside the image's bytes that shapes the pixels: processor class and settings, model id."""

    def mm_hash(self, content: bytes) -> str:
        """The image's key in every cache, 64 hex digits: over its raw bytes, so that a hit decodes nothing."""
        hasher = blake3.blake3(self.fingerprint)
        hasher.update(b"image\0")
        hasher.update(content)
        return hasher.hexdigest()

    def process(self, image: Image.Image) -> ProcessedImage:
        """Resize, normalize and cut into patches. Slow (10 ms for 448x448): call it in a worker thread."""
        try:
            output = self._processor(images=[image], return_tensors="np")
        except ValueError as error:  # a shape that it refuses
            raise APIError(
                f"the model cannot take an image of {image.width} x {image.height} pixels: {error}",
                code="invalid_image_dimensions",
            ) from None
        t, h, w = (int(size) for size in output["image_grid_thw"][0])
        pixels = np.ascontiguousarray(output["pixel_values"], dtype=np.float32)
        return ProcessedImage(pixels, (t, h, w), t * h * w // self._merge_area)
