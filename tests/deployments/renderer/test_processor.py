"""The Renderer's pixels against the checkpoint's own image processor, whose rescaling and normalizing it replaces."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.engine import parse_config
from deployments.renderer.checkpoint import load_checkpoint
from deployments.renderer.errors import APIError
from deployments.renderer.processor import ImageProcessor


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_checkpoint(parse_config({})).image_processor


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "size", [(448, 448), (64, 32), (96, 64), (450, 301), (33, 700), (1, 150), (2000, 1000)], ids=str
)
def test_pixels_are_the_processors(theirs: Any, size: tuple[int, int], changes: dict[str, Any]) -> None:
    processor = copy.copy(theirs)
    for name, value in changes.items():
        setattr(processor, name, value)
    image = picture(*size)
    got = ImageProcessor(processor, "m").process(image)
    expected = processor(images=[image], return_tensors="np")
    assert got.grid == tuple(expected["image_grid_thw"][0])
    pixels = expected["pixel_values"].reshape(len(got.pixels), 3, 2, -1)
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 1]), "both frames of a still image are the same"
    assert got.pixels.dtype == np.float32
    assert got.pixels.flags["C_CONTIGUOUS"]
    assert np.array_equal(got.pixels, pixels[:, :, 0].reshape(got.pixels.shape))
    assert got.num_embeddings == len(got.pixels) // 4


def test_settings_that_shape_the_pixels_are_in_the_hash(theirs: Any) -> None:
    hashes = set()
    for name, value in (
        ("do_rescale", True),
        ("do_rescale", False),
        ("do_normalize", False),
        ("image_mean", [0.1] * 3),
    ):
        processor = copy.copy(theirs)
        setattr(processor, name, value)
        hashes.add(ImageProcessor(processor, "m").mm_hash(b"image"))
    assert len(hashes) == 4


def test_a_shape_that_it_refuses_is_the_clients_error(theirs: Any) -> None:
    with pytest.raises(APIError, match="cannot take an image of 400 x 1 pixels"):
        ImageProcessor(theirs, "m").process(picture(400, 1))
