"""Bytes to pixels: Pillow's odd cases equal the plain RGB image; everything else is a clear error."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from configs.engine import MultimodalSettings
from deployments.renderer import images
from deployments.renderer.errors import APIError
from tests.deployments.renderer.conftest import data_url, encoded, picture

SETTINGS = MultimodalSettings()


def decode(content: bytes, **settings) -> np.ndarray:
    image = images.decode_image(content, MultimodalSettings(**settings))
    assert image.mode == "RGB"
    return np.asarray(image)


def test_plain_rgb_is_unchanged():
    assert (decode(encoded(picture())) == np.asarray(picture())).all()


@pytest.mark.parametrize("kind", ["BMP", "WEBP"])
def test_lossless_formats_give_the_same_pixels(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert (decode(encoded(picture(), kind, **options)) == np.asarray(picture())).all()


def test_palette():
    palette = picture().quantize(16)
    assert (decode(encoded(palette)) == np.asarray(palette.convert("RGB"))).all()
    assert (decode(encoded(palette, "GIF")) == np.asarray(palette.convert("RGB"))).all()


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_becomes_three_equal_channels(mode):
    image = picture().convert(mode)
    assert (decode(encoded(image)) == np.asarray(image.convert("RGB"))).all()


def over_white(image: Image.Image) -> np.ndarray:
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_lies_over_white(mode):
    image = picture().convert(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    assert np.abs(decode(encoded(image)) - over_white(image)).max() <= 1
    opaque = picture().convert(mode)
    assert (decode(encoded(opaque)) == np.asarray(opaque.convert("RGB"))).all()


def test_transparent_palette_and_colour_key_lie_over_white():
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.paste(0, (0, 0, 32, 64))
    for kind in ("PNG", "GIF"):
        pixels = decode(encoded(palette, kind, transparency=0))
        assert (pixels[0, 0] == 255).all()
        assert (pixels[0, 40] == (10, 20, 30)).all()
    keyed = Image.new("RGB", (64, 64), (1, 2, 3))
    assert (decode(encoded(keyed, transparency=(1, 2, 3))) == 255).all()


def test_cmyk():
    image = picture().convert("CMYK")
    pixels = decode(encoded(image, "JPEG", quality=100))
    assert np.abs(pixels.astype(int) - np.asarray(picture()).astype(int)).mean() < 3


def test_16_bit_grey_is_scaled_not_clipped():
    grey = np.asarray(picture().convert("L"))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert deep.mode == "I;16"
    assert (decode(encoded(deep)) == np.asarray(Image.fromarray(grey).convert("RGB"))).all()


def test_16_bit_rgb():
    row = np.asarray(picture())
    deep = np.ascontiguousarray(row.astype(">u2") * 257)
    lines = b"".join(b"\0" + line.tobytes() for line in deep)
    assert (decode(png(row.shape[1], row.shape[0], lines, depth=16)) == row).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_rotation_is_applied(orientation, kind):
    upright = picture(96, 64)
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encoded(stored, kind, exif=exif, quality=100))
    assert pixels.shape == (64, 96, 3)
    assert np.abs(pixels.astype(int) - np.asarray(upright).astype(int)).mean() < 6


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame(kind):
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
    assert (decode(content) == (255, 0, 0)).all()


def test_photograph_with_a_second_picture_behind_it():
    content = encoded(picture(), "MPO", save_all=True, append_images=[picture(seed=1)], quality=100)
    assert (decode(content) == decode(encoded(picture(), "JPEG", quality=100))).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_truncated_at_any_place_is_an_error_never_a_crash(kind):
    content = encoded(picture(64, 64), kind)
    decode(content)
    refused = 0
    for length in range(0, len(content) - 1, max(1, len(content) // 60)):
        try:
            decode(content[:length])
        except APIError as error:
            refused += error.status == 400
    assert refused > 40
    with pytest.raises(APIError, match=r"truncated or corrupted|cut off"):
        decode(content[: len(content) * 2 // 3])


def png(width: int, height: int, lines: bytes, depth: int = 8) -> bytes:
    """A PNG by hand: RGB, its header as told."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (0, 10, "image"),
        (10, 0, "image"),
        (8000, 8000, "64,000,000 pixels: expected 1 to 50,000,000 pixels"),
        (60000, 60000, "too many pixels: expected 1 to 50,000,000"),
        (2**31 - 1, 2**31 - 1, "image"),
        (1, 100_000, "at most 200 times"),
        (201, 1, "at most 200 times"),
    ],
)
def test_dimensions_are_checked_by_the_header(width, height, message):
    with pytest.raises(APIError, match=message) as caught:
        decode(png(width, height, b""))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content", [b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"\x89PNG\r\n\x1a\n", b"\0" * 1000]
)
def test_what_is_not_an_image(content):
    with pytest.raises(APIError, match="expected one of PNG, JPEG, WEBP, GIF, BMP"):
        decode(content)


def test_formats_not_listed_are_not_opened():
    with pytest.raises(APIError, match="not an image in a known format"):
        decode(encoded(picture(), "TIFF"))


def test_data_url_forms():
    content = encoded(picture())
    plain = base64.b64encode(content).decode()
    wrapped = base64.encodebytes(content).decode()
    for url in (
        f"data:image/png;base64,{plain}",
        f"data:;base64,{plain}",
        f"DATA:image/png;charset=x;BASE64,{plain}",
        f"data:image/jpeg;base64,{wrapped}",
        f"data:image/png;base64,{plain.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
    ):
        assert images.load_data_url(url, SETTINGS) == content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,abc", "expected data:image/"),
        ("data:", "expected data:image/"),
        ("data:text/html;base64,aGVsbG8=", "'text/html' is not an image"),
        ("data:" + "x" * 1000, "1005 characters"),
    ],
)
def test_bad_data_urls(url, message):
    with pytest.raises(APIError, match=message):
        images.load_data_url(url, SETTINGS)


def test_byte_limit():
    settings = MultimodalSettings(max_image_bytes=100)
    assert images.load_data_url(data_url(b"x" * 100), settings) == b"x" * 100
    for size in (101, 10_000):
        with pytest.raises(APIError, match=r"at most 100 are accepted \(multimodal.max_image_bytes\)"):
            images.load_data_url(data_url(b"x" * size), settings)
