"""Images as clients send them: from an `image_url` to bytes, and from bytes to an RGB image.

Every limit is checked before the work that it bounds: bytes before decoding base64, the header's dimensions before
decoding pixels. Whatever is wrong with a client's bytes ends as an APIError that says what would be accepted; the
caller adds which field it was (`APIError.at`).
"""

import asyncio
import binascii
import io
import re
import urllib.parse
import warnings

import numpy as np
from PIL import Image, ImageOps

from configs.engine import MultimodalSettings
from deployments.renderer.errors import APIError, shorten

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of the formats that are opened: a plugin that is not listed never sees a client's bytes."""

DECODING = "rgb8;exif-transposed;alpha-over-white;first-frame;16-bit-truncated"
"""How `decode_image` turns bytes into pixels: part of the processor's fingerprint, since it shapes the pixels."""

FETCH_TIMEOUT_S = 10.0
"""For a remote image, from the connection to its last byte."""

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
        raise _too_many_bytes(f"more than {len(data) * 3 // 4:,}", settings)
    if "%" in data:
        data = urllib.parse.unquote(data)
    if any(character in data for character in " \t\r\n"):
        data = data.translate(_WHITESPACE)
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
        raise _too_many_bytes(f"{len(content):,}", settings)
    return content


def _too_many_bytes(size: str, settings: MultimodalSettings) -> APIError:
    return APIError(
        f"the image has {size} bytes: at most {settings.max_image_bytes:,} are accepted (multimodal.max_image_bytes)",
        code="image_too_large",
    )


async def fetch(url: str, settings: MultimodalSettings) -> bytes:
    """The bytes behind an http(s) URL, whose host must be listed in multimodal.allowed_url_hosts.

    Redirects are not followed and proxies of the environment not used: the host that was checked is the one asked.
    """
    _check_url(url, settings)
    import httpx  # needed by few, and 0.1 s to import

    body = bytearray()
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            async with (
                httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=FETCH_TIMEOUT_S) as client,
                client.stream("GET", url, headers={"Accept": "image/*", "Accept-Encoding": "identity"}) as response,
            ):
                if response.status_code != 200:
                    hint = " (redirects are not followed)" if response.is_redirect else ""
                    raise APIError(
                        f"the server of {shorten(url)} answered {response.status_code}{hint}: expected 200",
                        code="image_fetch_failed",
                    )
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > settings.max_image_bytes:
                        raise _too_many_bytes(f"more than {settings.max_image_bytes:,}", settings)
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        reason = (
            f"no answer within {FETCH_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else type(error).__name__
        )
        raise APIError(f"{shorten(url)} could not be fetched: {reason}", code="image_fetch_failed") from None
    return check_size(bytes(body), settings)


def _check_url(url: str, settings: MultimodalSettings) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        host, scheme = (parts.hostname or "").lower(), parts.scheme.lower()
        userinfo = parts.username is not None or parts.password is not None
    except ValueError:
        raise APIError(f"{shorten(url)}: not a URL", code="invalid_image_url") from None
    if scheme not in ("http", "https"):
        raise APIError(
            f"{shorten(url)}: scheme {shorten(scheme)} is not supported: expected a data: URL"
            + (", or http(s) to an allowed host" if settings.allowed_url_hosts else ""),
            code="invalid_image_url",
        )
    if not settings.allowed_url_hosts:
        raise APIError(
            f"{shorten(url)}: this server does not fetch images: send a data: URL, or list the host in the "
            "setting multimodal.allowed_url_hosts",
            code="image_url_not_allowed",
        )
    if userinfo or host not in {allowed.lower() for allowed in settings.allowed_url_hosts}:
        raise APIError(
            f"{shorten(url)}: host {shorten(host)} is not allowed: expected one of "
            f"{', '.join(settings.allowed_url_hosts)} (multimodal.allowed_url_hosts), without user name or password",
            code="image_url_not_allowed",
        )


def decode_image(content: bytes, settings: MultimodalSettings) -> Image.Image:
    """An RGB image, eight bits a channel, turned upright; of an animation the first frame.

    Slow: call it in a worker thread. A decoder may fail on bad bytes with nearly any exception; each is the client's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about what is checked here
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit, 178,956,970 pixels
        raise _bad_dimensions("the image has far too many pixels", settings) from None
    except Exception:
        raise APIError(
            f"not an image in a known format, or cut off in its header: expected one of {', '.join(FORMATS)}",
            code="invalid_image_format",
        ) from None
    _check_dimensions(image, settings)
    try:
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:
        raise APIError(
            f"the {image.format} image is truncated or corrupted ({type(error).__name__}: {shorten(str(error))})",
            code="invalid_image",
        ) from None


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
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits: the upper eight. Pillow's own conversion clips, so that all but the darkest becomes white."""
    grey = np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
