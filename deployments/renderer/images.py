"""Images as clients send them: from a data URL to bytes, and from bytes to an RGB image.

Every limit is checked before the work that it bounds: bytes before decoding base64, the header's dimensions before
decoding pixels. Whatever is wrong with a client's bytes ends as an APIError that says what would be accepted; the
caller adds which field it was (`APIError.at`).
"""

import binascii
import io
import re
import warnings

import numpy as np
from PIL import Image, ImageOps

from configs.engine import MultimodalSettings
from deployments.renderer.errors import APIError, shorten

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of the formats that are opened: a plugin that is not listed never sees a client's bytes."""

DECODING = "rgb8;exif-transposed;alpha-over-white;first-frame;16-bit-truncated"
"""How `decode_image` turns bytes into pixels: part of the processor's fingerprint, since it shapes the pixels."""

MAX_READS = 200_000
"""Of a file, while Pillow looks for its pixels: it reads every chunk or marker in Python, a microsecond and more each,
and a file of 32 MB can hold eight million. Encoders write a few thousand."""

MAX_JPEG_SCANS = 50
"""Each scan of a progressive JPEG goes over the whole picture again, and 75 bytes make one. Encoders write 10 or so."""

_MAX_JPEG_SEGMENTS = 10_000
_JPEG_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")  # neither a stuffed zero nor a restart within a scan

_PERCENT = tuple((code, chr(int(code[1:], 16))) for code in ("%2B", "%2b", "%2F", "%2f", "%3D", "%3d"))
_WHITESPACE = str.maketrans("", "", " \t\r\n")
_DATA_URL = re.compile(r"data:([^,]{0,200}?)(;base64)?,", re.IGNORECASE)


def load_data_url(url: str, settings: MultimodalSettings) -> bytes:
    """The bytes in `data:image/...;base64,...`."""
    match = _DATA_URL.match(url)
    if match is None or match.group(2) is None:
        raise APIError(f"{shorten(url)}: expected data:image/<format>;base64,<data>", code="invalid_image_url")
    media_type = match.group(1).partition(";")[0].strip().lower()
    if media_type and not media_type.startswith("image/") and media_type != "application/octet-stream":
        raise APIError(
            f"media type {shorten(media_type)} is not an image: expected image/png, image/jpeg, image/webp, "
            "image/gif or image/bmp",
            code="invalid_image_format",
        )
    data = url[match.end() :]
    if len(data) > settings.max_image_bytes * 2:  # base64 takes 4/3, with line breaks a little more
        raise too_many_bytes(f"more than {settings.max_image_bytes:,}", settings)
    if "%" in data:  # only what base64 has: a general unquoting takes seconds and gigabytes for 20 MB of %41
        for code, character in _PERCENT:
            data = data.replace(code, character)
    if any(character in data for character in " \t\r\n"):
        data = data.translate(_WHITESPACE)
    size = len(data) * 3 // 4 - data[-2:].count("=")
    if size > settings.max_image_bytes:
        raise too_many_bytes(f"{size:,}", settings)
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise APIError(f"the data is not valid base64 ({error})", code="invalid_base64") from None
    return check_size(content, settings)


def check_size(content: bytes, settings: MultimodalSettings) -> bytes:
    """The same bytes, if there are some and not too many."""
    if not content:
        raise APIError("the image is empty", code="invalid_image")
    if len(content) > settings.max_image_bytes:
        raise too_many_bytes(f"{len(content):,}", settings)
    return content


def too_many_bytes(size: str, settings: MultimodalSettings) -> APIError:
    return APIError(
        f"the image has {size} bytes: at most {settings.max_image_bytes:,} are accepted (multimodal.max_image_bytes)",
        code="image_too_large",
    )


def decode_image(content: bytes, settings: MultimodalSettings) -> Image.Image:
    """An RGB image, eight bits a channel, turned upright; of an animation the first frame.

    Slow: call it in a worker thread. A decoder may fail on bad bytes with nearly any exception; each is the client's.
    """
    image = _open(content, settings)
    if image.format in ("JPEG", "MPO"):
        _check_scans(content)
    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)
    except APIError:
        raise
    except Exception as error:
        raise APIError(
            f"the {image.format} image is truncated or corrupted ({type(error).__name__}: {shorten(str(error))})",
            code="invalid_image",
        ) from None


def read_dimensions(content: bytes, settings: MultimodalSettings) -> tuple[int, int]:
    """(width, height) as the header says, if they are accepted. Slow for a hostile file: call it in a worker thread."""
    return _open(content, settings).size


class _BoundedReader(io.BytesIO):
    """A file that ends with an error behind MAX_READS reads."""

    _reads_left = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise APIError("the image consists of far too many pieces", code="invalid_image")
        return super().read(size)


def _open(content: bytes, settings: MultimodalSettings) -> Image.Image:
    """The image's header, nothing decoded, its dimensions checked."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about what is checked here
            image = Image.open(_BoundedReader(content), formats=FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit, 178,956,970 pixels
        raise _bad_dimensions("the image has far too many pixels", settings) from None
    except APIError:
        raise
    except Exception:
        raise APIError(
            f"not an image in a known format, or cut off in its header: expected one of {', '.join(FORMATS)}",
            code="invalid_image_format",
        ) from None
    _check_dimensions(image, settings)
    return image


def _check_scans(content: bytes) -> None:
    """Of the first picture in a JPEG file; thumbnails in its metadata, and what lies behind its end, do not count."""
    scans, position = 0, 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        match = _JPEG_MARKER.search(content, position)
        if match is None or match[0][-1] == 0xD9:  # end of image
            return
        position = match.end()
        if match[0][-1] in (0x01, 0xD8):  # markers without a length
            continue
        scans += match[0][-1] == 0xDA
        if scans > MAX_JPEG_SCANS:
            break
        position += max(2, int.from_bytes(content[position : position + 2]))
    raise APIError(
        f"the JPEG image consists of far too many pieces: at most {MAX_JPEG_SCANS} scans are accepted",
        code="invalid_image",
    )


def _check_dimensions(image: Image.Image, settings: MultimodalSettings) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise _bad_dimensions(f"the image has {width} x {height} pixels", settings)
    if width * height > settings.max_image_pixels:
        raise _bad_dimensions(f"the image has {width} x {height} = {width * height:,} pixels", settings)
    if max(width, height) > settings.max_aspect_ratio * min(width, height):
        raise APIError(
            f"the image has {width} x {height} pixels: the longer side may be at most "
            f"{settings.max_aspect_ratio:g} times the shorter one (multimodal.max_aspect_ratio)",
            code="invalid_image_dimensions",
        )


def _bad_dimensions(what: str, settings: MultimodalSettings) -> APIError:
    return APIError(
        f"{what}: expected 1 to {settings.max_image_pixels:,} pixels (multimodal.max_image_pixels)",
        code="invalid_image_dimensions",
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _from_16_bit(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits: the upper eight. Pillow's own conversion clips, so that all but the darkest becomes white."""
    grey = np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
