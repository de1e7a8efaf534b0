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
        # Here: transformers looks for torch when it is imported, and must not find it in a Renderer (checkpoint.py).
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        self._smart_resize = smart_resize
        # One frame: those of a still image are all the same, and half the pixels are half the work of every copy.
        self._processor = copy.copy(image_processor)
        self._processor.temporal_patch_size = 1
        self._merge_area = int(image_processor.merge_size) ** 2
        self._table = self._values_by_byte()
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
        """Resize, cut into patches and normalize. Slow (2 ms for 448x448): call it in a worker thread.

        The same values as the processor's, which takes three times as long: what it makes of a byte is looked up here.
        """
        of = self._processor
        if of.do_resize:
            size, factor = of.size, of.patch_size * of.merge_size
            try:
                height, width = self._smart_resize(
                    image.height, image.width, factor, min_pixels=size.shortest_edge, max_pixels=size.longest_edge
                )
            except ValueError as error:  # a shape that it refuses
                raise _refused(image.width, image.height, error) from None
            if (width, height) != image.size:
                image = image.resize((width, height), of.resample)
        channels = np.asarray(image).transpose(2, 0, 1)
        patches = self._cut(channels)
        pixels = np.empty((patches.shape[1], len(patches), patches.shape[2]), np.float32)
        for channel, values in enumerate(self._table):
            pixels[:, channel] = values.take(patches[channel])
        grid = (1, image.height // of.patch_size, image.width // of.patch_size)
        return ProcessedImage(pixels.reshape(len(pixels), -1), grid, len(pixels) // self._merge_area)

    def _cut(self, channels: np.ndarray) -> np.ndarray:
        """[channels, height, width] -> [channels, patches, patch * patch], a merge window's one behind the other."""
        patch, merge = self._processor.patch_size, self._processor.merge_size
        count, height, width = channels.shape
        rows, columns = height // (patch * merge), width // (patch * merge)
        windows = channels.reshape(count, rows, merge, patch, columns, merge, patch).transpose(0, 1, 4, 2, 5, 3, 6)
        return np.ascontiguousarray(windows).reshape(count, -1, patch * patch)

    def _values_by_byte(self) -> np.ndarray:
        """[channels, 256] float32: what the processor rescales and normalizes a byte to."""
        side = self._processor.patch_size * self._processor.merge_size
        picture = np.arange(side * side).astype(np.uint8).reshape(1, side, side).repeat(3, axis=0)
        output = self._processor(images=[picture.transpose(1, 2, 0)], do_resize=False, return_tensors="np")
        patches, table = self._cut(picture), np.zeros((3, 256), np.float32)
        values = output["pixel_values"].reshape(patches.shape[1], 3, -1)
        for channel in range(3):
            table[channel, patches[channel]] = values[:, channel]
        return table


def _refused(width: int, height: int, error: ValueError) -> APIError:
    return APIError(
        f"the model cannot take an image of {width} x {height} pixels: {error}", code="invalid_image_dimensions"
    )
