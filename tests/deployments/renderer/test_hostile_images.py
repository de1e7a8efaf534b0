"""Files that are made to cost: refused by what their header says, or in bounded time, and nothing else happens."""

import asyncio
import resource
import struct
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from configs.engine import MultimodalSettings
from deployments.renderer import images
from deployments.renderer.chat import ImageSource
from deployments.renderer.checkpoint import Checkpoint
from deployments.renderer.errors import APIError
from deployments.renderer.image_loader import ImageLoader
from deployments.renderer.processor import ImageProcessor
from deployments.renderer.processor_cache import ProcessorCache
from deployments.renderer.request_scope import RequestScope
from tests.deployments.renderer.conftest import data_url, encoded, picture
from tests.deployments.renderer.fake_engine import Counters
from tests.support.image_site import Names, network, serving

SETTINGS = MultimodalSettings()
SMALL = picture(64, 64)


def chunk(name: bytes, data: bytes = b"") -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header_of(kind: str, width: int, height: int) -> bytes:
    """A small file whose header claims so many pixels."""
    if kind == "PNG":
        content = bytearray(encoded(SMALL, "PNG"))
        content[8:33] = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    elif kind == "JPEG":
        content = bytearray(encoded(SMALL, "JPEG"))
        start = content.index(b"\xff\xc0") + 5
        content[start : start + 4] = struct.pack(">HH", height, width)
    elif kind == "GIF":
        content = bytearray(encoded(SMALL.quantize(16), "GIF"))
        content[6:10] = struct.pack("<HH", width, height)
    elif kind == "BMP":
        content = bytearray(encoded(SMALL, "BMP"))
        content[18:26] = struct.pack("<ii", width, height)
    elif min(width, height) < 64:  # a canvas smaller than its frames would be refused as such
        content = bytearray(encoded(Image.new("RGB", (width, height)), "WEBP"))
    else:
        frames = {"save_all": True, "append_images": [picture(64, 64, 1)]}
        content = bytearray(encoded(SMALL, "WEBP", lossless=True, **frames))
        start = content.index(b"VP8X") + 12
        content[start : start + 6] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(content)


def peak_memory() -> int:
    """Bytes that this process has had resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("kind", images.FORMATS)
@pytest.mark.parametrize(
    ("width", "height", "message"),
    [(12_000, 12_000, "pixels: expected 1 to 50,000,000"), (1, 16_000, "at most 200 times"), (16_000, 1, "200 times")],
)
def test_a_bomb_is_known_by_its_header(kind, width, height, message):
    content = header_of(kind, width, height)
    assert len(content) < 20_000
    begin, before = time.monotonic(), peak_memory()
    for look in (images.decode_image, images.read_dimensions):
        with pytest.raises(APIError, match=message) as raised:
            look(content, SETTINGS)
        assert raised.value.code == "invalid_image_dimensions"
    assert peak_memory() - before < 20_000_000  # its pixels would take 432 MB
    assert time.monotonic() - begin < 1


def test_the_header_tells_the_dimensions_that_are_decoded():
    for kind in images.FORMATS:
        content = header_of(kind, 64, 64)
        assert images.read_dimensions(content, SETTINGS) == images.decode_image(content, SETTINGS).size == (64, 64)


PNG, JPEG = encoded(SMALL, "PNG"), encoded(SMALL, "JPEG")
GIF = encoded(SMALL.quantize(16), "GIF")
GIF_IMAGE = GIF.index(b",\0\0\0\0")
MANY = 2_000_000
"""Bytes of pieces; a file may have sixteen times as many."""


def repeated(piece: bytes) -> bytes:
    return piece * (MANY // len(piece))


PIECES = {
    "PNG chunks": PNG[:33] + repeated(chunk(b"aaAa")) + PNG[33:],
    "PNG chunks behind the pixels": PNG[:-12] + repeated(chunk(b"aaAa")) + PNG[-12:],
    "JPEG comments": JPEG[:2] + repeated(b"\xff\xfe\0\2") + JPEG[2:],
    "JPEG padding": JPEG[:2] + repeated(b"\xff") + JPEG[2:],
    "GIF comments": GIF[:GIF_IMAGE] + repeated(b"!\xfe\0") + GIF[GIF_IMAGE:],
    "GIF comment": GIF[:GIF_IMAGE] + b"!\xfe" + repeated(b"\1a") + b"\0" + GIF[GIF_IMAGE:],
    "GIF junk": GIF[:GIF_IMAGE] + bytes(MANY) + GIF[GIF_IMAGE:],
}


@pytest.mark.parametrize("name", PIECES)
def test_a_file_of_too_many_pieces(name):
    begin = time.process_time()
    with pytest.raises(APIError, match=r"far too many pieces") as raised:
        images.decode_image(PIECES[name], SETTINGS)
    assert raised.value.code == "invalid_image"
    # The work ends behind MAX_READS reads, whatever the file's size.
    assert time.process_time() - begin < 4


def progressive(size: int, scans: int, extra: bytes = b"") -> bytes:
    """A JPEG that says its last scan over and over."""
    content = encoded(Image.new("L", (size, size), 128), "JPEG", progressive=True, quality=30)
    start = content.rindex(b"\xff\xda")
    own = content.count(b"\xff\xda")
    return content[:-2] + content[start:-2] * (scans - own) + content[-2:] + extra


def test_a_progressive_jpeg_of_too_many_scans():
    """A megabyte of them would keep a core busy for a quarter of an hour."""
    assert images.decode_image(progressive(64, images.MAX_JPEG_SCANS), SETTINGS).size == (64, 64)
    begin = time.process_time()
    for scans in (images.MAX_JPEG_SCANS + 1, 10_000):
        with pytest.raises(APIError, match="at most 50 scans are accepted"):
            images.decode_image(progressive(4000, scans), SETTINGS)
    assert time.process_time() - begin < 2


def test_what_looks_like_scans_elsewhere_does_not_count():
    many = b"\xff\xda\0\2" * 1000
    exif = Image.Exif()
    exif[0x010E] = "thumbnails"
    photo = encoded(SMALL, "JPEG", exif=exif, comment=many, quality=95)
    assert photo.count(b"\xff\xda") > 1000
    assert images.decode_image(photo + b"a film behind it" + many, SETTINGS).size == (64, 64)
    assert images.decode_image(encoded(picture(800, 600), "JPEG", progressive=True), SETTINGS).size == (800, 600)


@pytest.mark.parametrize(
    "inner",
    [
        PNG[:33] + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(50_000_000))) + PNG[33:],
        PNG[:33] + chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(50_000_000))) + PNG[33:],
        PNG[:33] + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1_000_000))) * 200 + PNG[33:],
    ],
)
def test_compressed_metadata_is_not_unpacked(inner):
    before = peak_memory()
    with pytest.raises(APIError):
        images.decode_image(inner, SETTINGS)
    assert peak_memory() - before < 100_000_000


POLYGLOTS = {
    "zip behind it": PNG + b"PK\3\4" + b"x" * 1000,
    "script behind it": JPEG + b"<script>alert(1)</script>",
    "another image behind it": PNG + JPEG,
}


@pytest.mark.parametrize("name", POLYGLOTS)
def test_a_polyglot_is_the_image_that_it_begins_with(name):
    content = POLYGLOTS[name]
    plain = JPEG if content.startswith(b"\xff\xd8") else PNG
    assert images.decode_image(content, SETTINGS).tobytes() == images.decode_image(plain, SETTINGS).tobytes()


@pytest.mark.parametrize(
    "content",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><image href='file:///etc/passwd'/></svg>",
        b"<?xml version='1.0'?><!DOCTYPE svg [<!ENTITY a 'aaaa'>]><svg>&a;</svg>",
        b"GIF89a/*\0\0*/=1;alert(1)",
        b"%PDF-1.7\n" + PNG,
        b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + PNG,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"#define a_width 8\n#define a_height 8\nstatic char a[] = {0};",
        b"\0\0\0\x1cftypavif" + bytes(100),
        b"RIFF\x10\0\0\0WEBPjunk",
        b"II*\0\x08\0\0\0",
    ],
)
def test_what_is_no_picture_here(content):
    for media_type in ("image/png", "image/svg+xml"):
        data = images.load_data_url(data_url(content, media_type), SETTINGS)
        with pytest.raises(APIError, match=r"not an image in a known format|truncated or corrupted") as raised:
            images.decode_image(data, SETTINGS)
        assert raised.value.status == 400


def test_a_large_data_url_is_measured_before_it_is_decoded(monkeypatch):
    def never(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr("binascii.a2b_base64", never)
    for data in ("A" * 50_000_000, "A" * 45_000_000 + "\n" * 1000, "A" * 70_000_000):
        with pytest.raises(APIError, match=r"at most 33,554,432 are accepted \(multimodal.max_image_bytes\)"):
            images.load_data_url(f"data:image/png;base64,{data}", SETTINGS)


def test_rubbish_in_a_data_url_costs_little():
    """A general percent decoding would take a minute and gigabytes for these."""
    begin = time.process_time()
    for data in ("%41" * 13_000_000, "%" * 20_000_000, "\n" * 20_000_000, "é" * 20_000_000, "=" * 20_000_000):
        with pytest.raises(APIError, match=r"not valid base64|empty"):
            images.load_data_url(f"data:image/png;base64,{data}", SETTINGS)
    assert time.process_time() - begin < 6


class Loading:
    """An ImageLoader, and what it did."""

    def __init__(self, checkpoint: Checkpoint, **settings) -> None:
        self.counters = Counters()
        self.executor = ThreadPoolExecutor(2)
        self.cache = ProcessorCache(10**9, self.counters, self.executor)
        self.settings = MultimodalSettings(**settings)
        self.processor = ImageProcessor(checkpoint.image_processor, "m")
        self.network = None

    def load(self, *urls: str, salt: str | None = None, limit: int = 10**9) -> list:
        def check(num_embeddings: int) -> None:
            if num_embeddings > limit:
                raise APIError(f"{num_embeddings} is too long")

        async def run() -> list:
            loader = ImageLoader(self.settings, self.processor, self.cache, self.executor, self.network)
            sources = [ImageSource(url, f"images[{index}]") for index, url in enumerate(urls)]
            return await loader.load(sources, RequestScope("r"), salt, check)

        return asyncio.run(run())


def test_nothing_is_decoded_where_the_images_have_too_many_embeddings(checkpoint: Checkpoint, monkeypatch):
    loading = Loading(checkpoint)
    urls = [data_url(encoded(picture(*size))) for size in ((640, 640), (96, 64), (448, 224))]
    expected = [image.num_embeddings for image in loading.load(*urls)]
    assert expected == [361, 6, 98]
    loading.cache.reset()
    monkeypatch.setattr(images, "decode_image", None)
    with pytest.raises(APIError, match="465 is too long"):
        loading.load(*urls, limit=464)


def test_one_bad_header_is_found_before_another_image_is_decoded(checkpoint: Checkpoint, monkeypatch):
    loading = Loading(checkpoint)
    monkeypatch.setattr(images, "decode_image", None)
    with pytest.raises(APIError, match=r"images\[1\]: the image has 12000 x 12000"):
        loading.load(data_url(PNG), data_url(header_of("PNG", 12_000, 12_000)))


def test_the_images_of_a_request_have_a_limit_together(checkpoint: Checkpoint):
    limit = 2 * len(PNG) + 10
    loading = Loading(checkpoint, max_total_image_bytes=limit)
    assert len(loading.load(data_url(PNG), data_url(PNG))) == 2
    with pytest.raises(APIError, match=rf"images\[2\]: with it the images of this request have more than {limit:,}"):
        loading.load(*[data_url(PNG)] * 3)
    with serving("images.test") as site:
        site.answers["/a.png"] = (200, {}, PNG)
        host = {"allowed_url_hosts": (site.netloc,), "allow_http_urls": True}
        loading = Loading(checkpoint, max_total_image_bytes=limit, **host)
        loading.network = network(Names({"images.test": [["127.0.0.1"]]}))
        url = f"http://{site.netloc}/a.png"
        assert len(loading.load(url, data_url(PNG))) == 2
        with pytest.raises(APIError, match=r"multimodal\.max_total_image_bytes"):
            loading.load(*[url] * 3)


def test_the_first_error_ends_the_fetches_of_the_others(checkpoint: Checkpoint):
    ended: list[str] = []

    async def lookup(host: str, port: int) -> list[str]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(host)
            raise
        return []

    loading = Loading(checkpoint, allowed_url_hosts=("a.test",))
    loading.network = network(lookup)  # type: ignore[arg-type]
    begin = time.monotonic()
    with pytest.raises(APIError, match=r"images\[1\]: .*not valid base64"):
        loading.load("https://a.test/x.png", "data:image/png;base64,#")
    assert time.monotonic() - begin < 5
    assert ended == ["a.test"]


def test_salted_images_are_kept_apart(checkpoint: Checkpoint):
    loading = Loading(checkpoint)
    keys = [loading.load(data_url(PNG), salt=salt)[0].mm_hash for salt in (None, "a", "b", "a")]
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]
    assert loading.counters.values == (4, 1)


def test_large_images_are_processed_two_at_a_time(checkpoint: Checkpoint, monkeypatch):
    """However many worker threads there are; smaller ones pass by."""
    monkeypatch.setattr("deployments.renderer.image_loader.LARGE_PIXELS", 64 * 64)
    loading = Loading(checkpoint)
    loading.executor = loading.cache._executor = ThreadPoolExecutor(8)
    lock, running, most, seen = threading.Lock(), Counter(), Counter(), threading.Event()
    decode = images.decode_image

    def counting(content: bytes, settings: MultimodalSettings) -> Image.Image:
        image = decode(content, settings)
        kind = "large" if image.width > 64 else "small"
        with lock:
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
            if most["small"] >= 3:
                seen.set()
        seen.wait(5)
        with lock:
            running[kind] -= 1
        return image

    monkeypatch.setattr(images, "decode_image", counting)
    pictures = [picture(96, 64, seed) for seed in range(4)] + [picture(64, 64, seed) for seed in range(3)]
    assert len(loading.load(*[data_url(encoded(each)) for each in pictures])) == 7
    assert seen.is_set()
    assert most["large"] == 2
