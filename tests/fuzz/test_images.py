"""Image files with bytes changed, cut out and put in: an RGB image or a refusal, and nothing else."""

import random
import struct
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from configs.engine import MultimodalSettings
from deployments.renderer import images
from deployments.renderer.errors import APIError
from tests.deployments.renderer.conftest import encoded, picture
from tests.fuzz.conftest import cases

pytestmark = pytest.mark.timeout(900)

SETTINGS = MultimodalSettings(max_image_bytes=1_000_000, max_image_pixels=1_000_000)
BASE = picture(40, 30)
FRAMES = {"save_all": True, "append_images": [picture(40, 30, 1), picture(40, 30, 2)]}
EXIF = Image.Exif()
EXIF[0x0112] = 6
FILES = [
    encoded(BASE, "PNG"),
    encoded(BASE.quantize(16), "PNG", transparency=0),
    encoded(BASE.convert("RGBA"), "PNG", exif=EXIF),
    encoded(BASE.convert("L").convert("I;16"), "PNG"),
    encoded(BASE, "PNG", **FRAMES),
    encoded(BASE, "JPEG", exif=EXIF),
    encoded(BASE, "JPEG", progressive=True, icc_profile=b"profile" * 9),
    encoded(BASE.convert("CMYK"), "JPEG"),
    encoded(BASE, "MPO", save_all=True, append_images=[picture(40, 30, 1)]),
    encoded(BASE, "WEBP"),
    encoded(BASE.convert("RGBA"), "WEBP", lossless=True, exif=EXIF),
    encoded(BASE, "WEBP", lossless=True, **FRAMES),
    encoded(BASE.quantize(16), "GIF", comment=b"a comment", transparency=1),
    encoded(BASE, "GIF", **FRAMES),
    encoded(BASE, "BMP"),
    encoded(BASE.quantize(16), "BMP"),
    encoded(BASE.convert("1"), "BMP"),
]
MAGIC = [content[:16] for content in FILES] + [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM"]
NUMBERS = [struct.pack(form, n) for form in (">I", "<I", ">H", "<H") for n in (0, 1, 0x7FFF, 0xFFFF)] + [
    b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xd9", b"\xff\xda", b"\xff\xc4", b"IDAT", b"IEND",
    b"fcTL", b"VP8X", b"ANMF", b"!\xf9", b",", b";",
]  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid file with a few edits, or rubbish behind a valid beginning."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(MAGIC)) + draw(st.binary(max_size=200))
    content = bytearray(draw(st.sampled_from(FILES)))
    place = random.Random(draw(st.integers(0, 2**32)))  # quicker than drawing each position
    for _ in range(draw(st.integers(0, 5))):
        # Headers come first, so early positions come more often.
        position = int(len(content) * place.random() ** draw(st.sampled_from([1, 3])))
        match draw(st.integers(0, 5)):
            case 0:
                content[position : position + 1] = bytes([place.randrange(256)])
            case 1:
                new = place.choice(NUMBERS)
                content[position : position + len(new)] = new
            case 2:
                content[position:position] = place.randbytes(place.randrange(20))
            case 3:
                del content[position : position + place.randrange(60)]
            case 4:
                content[position:position] = content[position : position + place.randrange(200)] * place.randrange(9)
            case _:
                del content[position:]
    return bytes(content)


def decode(content: bytes) -> str:
    """What became of it; a refusal has to be one that a client is told."""
    begin = time.monotonic()
    try:
        image = images.decode_image(content, SETTINGS)
    except APIError as error:
        return "refused" if error.status == 400 and 0 < len(error.message) < 500 else f"{error.status} {error}"
    assert image.mode == "RGB"
    width, height = image.size
    assert 0 < width * height <= SETTINGS.max_image_pixels
    assert len(image.tobytes()) == width * height * 3
    assert images.read_dimensions(content, SETTINGS) in ((width, height), (height, width))
    assert time.monotonic() - begin < 10
    return "image"


def test_image_files() -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=cases(0.25), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(files())
    def run(content: bytes) -> None:
        outcome = decode(content)
        outcomes[outcome] += 1
        assert outcome in ("image", "refused")

    run()
    assert min(outcomes["image"], outcomes["refused"]) > cases(0.25) / 20, outcomes
