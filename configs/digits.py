"""Images of handwritten digits, for the demo checkpoint, tests and benchmarks.

The scans are the 1,797 real ones of scikit-learn's `load_digits` (8x8 pixels, 16 grey levels), split once and for all
into 1,437 for training and 360 held out. `strip` draws one to six of them in a row, `sheet` as many as fit.
Everything is a function of the given random generator.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_DIGITS = 6
CELLS = (64, 32)  # pixels, side of the square that one scan is drawn into: the first that fits

# (width, height) in pixels. An image takes (width / 32) x (height / 32) embeddings, after rounding to multiples of 32.
SMALL_SIZES = (
    (64, 64),
    (96, 64),
    (128, 64),
    (160, 64),
    (192, 64),
    (96, 96),
    (128, 96),
    (128, 128),
    (150, 70),
    (100, 90),
)
MEDIUM_SIZES = ((224, 64), (256, 64), (256, 96), (192, 128), (224, 128), (224, 224), (320, 96), (256, 160), (200, 100))
LARGE_SIZES = ((448, 224), (320, 320), (448, 448), (640, 160), (500, 300), (896, 224), (896, 448), (300, 400))
SIZES = SMALL_SIZES + MEDIUM_SIZES + LARGE_SIZES


@dataclass(frozen=True)
class Style:
    """How scenes are drawn; the default is how they are drawn for measuring.

    augment: distort each scan and add noise (for training); jitter: how much the digits differ in size and
    place inside their cells, from 0 to 1.
    """

    augment: bool = False
    jitter: float = 1.0


PLAIN = Style()


@functools.cache
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """All scans and their labels: uint8 [1797, 8, 8] with 0 = paper and 255 = ink, and int64 [1797]."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.round(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)


@functools.cache
def split(name: str) -> np.ndarray:
    """Scan indices of the split `train` (1,437) or `held_out` (360), stratified by label; always the same."""
    from sklearn.model_selection import train_test_split

    _, labels = load_scans()
    train, held_out = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=labels)
    import numpy as np

    return np.sort(np.array({"train": train, "held_out": held_out}[name]))


def scans_of(labels: Sequence[int], rng: np.random.Generator, split_name: str = "held_out") -> list[int]:
    """For each label, the index of a random scan of that digit."""
    _, all_labels = load_scans()
    indices = split(split_name)
    return [int(rng.choice(indices[all_labels[indices] == label])) for label in labels]


def labels_of(scans: Sequence[int]) -> list[int]:
    """The digits that the scans show."""
    return [int(label) for label in load_scans()[1][list(scans)]]


def max_digits(size: tuple[int, int]) -> int:
    """How many digits fit side by side into an image of `size` (width, height)."""
    return max(1, min(MAX_DIGITS, size[0] // CELLS[-1]))


def strip(scans: Sequence[int], size: tuple[int, int], rng: np.random.Generator, style: Style = PLAIN) -> Image.Image:
    """Draw scans in a row, left to right, on a plain canvas.

    Args:
        scans: one to six indices into `load_scans()`.
        size: (width, height) of the image in pixels.
        rng: decides brightness, digit size and placement.
        style: brightness and distortion (rotation, shear, scale, stroke, noise).
    Returns:
        an RGB image of exactly `size`.
    """
    return _row(scans, size, rng, style)[0]


def _row(
    scans: Sequence[int], size: tuple[int, int], rng: np.random.Generator, style: Style
) -> tuple[Image.Image, int, int, int]:
    """A strip, the side of its digits' squares, and the left and upper edge of the first, all in pixels."""
    import numpy as np

    width, height = size
    if not 1 <= len(scans) <= max_digits(size):
        raise ValueError(f"{len(scans)} digits do not fit into {width}x{height}: 1 to {max_digits(size)} do")
    images, _ = load_scans()
    cell = next((c for c in CELLS if c <= height and c * len(scans) <= width), CELLS[-1])
    left, top = (32 * int(rng.integers(free // 32 + 1)) for free in (width - cell * len(scans), height - cell))

    ink = np.zeros((height, width), np.float32)
    for i, scan in enumerate(scans):
        _write(ink, images[scan], (left + i * cell, top), cell, rng, style)
    return _photograph(ink, rng, style), cell, left, top


@dataclass
class Squares:
    """An image, and what each of its squares of 32 pixels shows: arrays of int64 [height / 32, width / 32].

    shown: 0 is paper, else 1 + 5 x digit + part, of the parts 0 for a whole digit and 1 to 4 for the quarters of a
    larger one. place: which digit of the strip it is, from 1 on. count: digits in the strip. Both are 0 on paper, and
    everywhere when the digits do not form a strip.
    """

    image: Image.Image
    shown: np.ndarray
    place: np.ndarray
    count: np.ndarray


def _parts(cell: int) -> np.ndarray:
    import numpy as np

    return np.array([[1, 2], [3, 4]]) if cell == 64 else np.array([[0]])


def labelled_strip(size: tuple[int, int], rng: np.random.Generator, split_name: str = "train") -> Squares:
    """A strip of distorted scans; width and height of `size` are multiples of 32 pixels."""
    import numpy as np

    scans = [int(s) for s in rng.choice(split(split_name), int(rng.integers(1, max_digits(size) + 1)))]
    image, cell, left, top = _row(scans, size, rng, Style(augment=True))
    shown, place, count = np.zeros((3, size[1] // 32, size[0] // 32), np.int64)
    side = cell // 32
    for i, label in enumerate(labels_of(scans)):
        y, x = top // 32, left // 32 + i * side
        square = slice(y, y + side), slice(x, x + side)
        shown[square], place[square], count[square] = 1 + 5 * label + _parts(cell), i + 1, len(scans)
    return Squares(image, shown, place, count)


def sheet(size: tuple[int, int], rng: np.random.Generator, split_name: str = "train") -> Squares:
    """Distorted scans everywhere, half of them of 64 pixels, the others of 32; sides are multiples of 32 pixels."""
    import numpy as np

    images, labels = load_scans()
    ink = np.zeros((size[1], size[0]), np.float32)
    shown = np.zeros((size[1] // 32, size[0] // 32), np.int64)
    full = rng.uniform(0.3, 1)
    for _ in range(shown.size):
        side = 2 if rng.random() < 0.5 else 1
        y, x = (int(rng.integers(n - side + 1)) for n in shown.shape)
        if shown[y : y + side, x : x + side].any() or np.count_nonzero(shown) > full * shown.size:
            continue
        scan = int(rng.choice(split(split_name)))
        shown[y : y + side, x : x + side] = 1 + 5 * labels[scan] + _parts(32 * side)
        _write(ink, images[scan], (32 * x, 32 * y), 32 * side, rng, Style(augment=True))
    nothing = np.zeros_like(shown)
    return Squares(_photograph(ink, rng, Style(augment=True)), shown, nothing, nothing)


def _write(
    ink: np.ndarray, scan: np.ndarray, corner: tuple[int, int], cell: int, rng: np.random.Generator, style: Style
) -> None:
    """Draw a scan into `ink` (0 to 1, [height, width]), somewhere in the square of `cell` pixels at `corner` (x, y)."""
    import numpy as np
    from PIL import Image

    side = round(cell * (1 - rng.uniform(0, 0.15) * style.jitter))
    tile = Image.fromarray(scan).resize((side, side), Image.Resampling.BICUBIC)
    if style.augment:
        tile = _distort(tile, rng)
    shift_x, shift_y = (int((cell - side) * (0.5 + rng.uniform(-0.5, 0.5) * style.jitter)) for _ in "xy")
    x, y = corner[0] + shift_x, corner[1] + shift_y
    area = ink[y : y + side, x : x + side]
    np.maximum(area, np.asarray(tile, np.float32) / 255, out=area)


def _photograph(ink: np.ndarray, rng: np.random.Generator, style: Style) -> Image.Image:
    """The image of an inked sheet, with random brightness of paper and pen, and noise where `style` says so."""
    import numpy as np
    from PIL import Image

    paper, pen = rng.uniform(150, 255), rng.uniform(0, 90)
    if style.augment:
        ink = ink ** rng.uniform(0.7, 1.4)
    canvas = paper + ink * (pen - paper)
    if style.augment and rng.random() < 0.5:
        canvas += rng.standard_normal(canvas.shape, np.float32) * rng.uniform(0, 12)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)).convert("RGB")


def _distort(tile: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Rotate (about 12 degrees), scale, shear and shift one scan inside its own tile."""
    import numpy as np
    from PIL import Image

    side = tile.size[0]
    angle = np.deg2rad(np.clip(rng.normal(0, 6), -12, 12))
    rotate = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shear = np.array([[1, rng.normal(0, 0.08)], [0, 1]])
    inverse = rotate @ shear @ np.diag(rng.uniform(0.95, 1.2, 2))
    offset = side / 2 - inverse @ np.full(2, side / 2) + side * rng.uniform(-0.05, 0.05, 2)
    matrix = (*inverse[0], offset[0], *inverse[1], offset[1])
    return tile.transform(tile.size, Image.Transform.AFFINE, tuple(map(float, matrix)), Image.Resampling.BILINEAR)


@dataclass
class Scene:
    """One image and what it shows."""

    image: Image.Image
    labels: list[int]

    @property
    def text(self) -> str:
        return " ".join(map(str, self.labels))


def png(image: Image.Image) -> bytes:
    """The image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    """The image as a `data:image/png;base64,` URL."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def scene(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = SIZES,
    split_name: str = "held_out",
    style: Style = PLAIN,
    count: int | None = None,
) -> Scene:
    """A random strip: random size, number of digits (or `count`) and scans of the split."""
    if count is not None:
        sizes = [s for s in sizes if max_digits(s) >= count]
    size = sizes[int(rng.integers(len(sizes)))]
    count = count or int(rng.integers(1, max_digits(size) + 1))
    scans = [int(s) for s in rng.choice(split(split_name), count)]
    return Scene(strip(scans, size, rng, style), labels_of(scans))
