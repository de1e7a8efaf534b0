"""From the images of a request to their processed pixels: cheap checks of all of them before one is decoded."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from configs.engine import MultimodalSettings
from deployments.renderer import images
from deployments.renderer.chat import ImageSource
from deployments.renderer.errors import APIError
from deployments.renderer.fetch import ImageFetcher
from deployments.renderer.network import Network
from deployments.renderer.processor import ImageProcessor, ProcessedImage
from deployments.renderer.processor_cache import CachedImage, ProcessorCache
from deployments.renderer.request_scope import RequestScope
from telemetry import spans
from telemetry.probe import mm_cache_probe

T = TypeVar("T")

INLINE_URL = 262_144
"""Characters of a data URL that is short enough for the event loop."""
INLINE_HEADER = 16_384
"""Bytes of a file whose header is: a hostile one costs a microsecond a byte."""

LARGE_PIXELS = 8_000_000
_LARGE_AT_A_TIME = 2
"""A larger image is decoded and processed beside one other at most: it takes up to 20 bytes a pixel meanwhile."""


@dataclass(frozen=True)
class _Loaded:
    source: ImageSource
    content: bytes
    mm_hash: str


class ImageLoader:
    """Of one Renderer: in front of its processor cache."""

    def __init__(
        self,
        settings: MultimodalSettings,
        processor: ImageProcessor,
        cache: ProcessorCache,
        executor: Executor,
        network: Network | None = None,
    ) -> None:
        self._settings = settings
        self._processor = processor
        self._cache = cache
        self._executor = executor
        self._large = threading.BoundedSemaphore(_LARGE_AT_A_TIME)
        self._fetcher = ImageFetcher(settings, network)
        self._probe = mm_cache_probe("processor")

    async def load(
        self, sources: Sequence[ImageSource], scope: RequestScope, salt: str | None, check: Callable[[int], None]
    ) -> list[CachedImage]:
        """The processed images in order. Raises APIError, as does `check`, which is told how many embeddings they
        will have, as their headers say, before any is decoded. The first error ends the work for the others."""
        if not sources:
            return []
        budget = _Budget(self._settings)
        loaded = await _all(self._load(source, scope, salt, budget) for source in sources)
        check(sum(await _all(map(self._num_embeddings, loaded))))
        return await _all(self._processed(image, scope) for image in loaded)

    async def _load(self, source: ImageSource, scope: RequestScope, salt: str | None, budget: "_Budget") -> _Loaded:
        with _named(source), spans.span("mm: hash", scope.context):
            if source.url[:5].lower() == "data:":
                load = partial(images.load_data_url, source.url, self._settings)
                content = await self._slowly(load, inline=len(source.url) < INLINE_URL)
                budget.take(len(content))
            else:
                content = images.check_size(await self._fetcher.fetch(source.url, budget.take), self._settings)
            hashing = partial(self._processor.mm_hash, content, salt)
            return _Loaded(source, content, await self._slowly(hashing, inline=len(content) < 4 * INLINE_URL))

    async def _num_embeddings(self, image: _Loaded) -> int:
        known = self._cache.num_embeddings(image.mm_hash)
        if known is not None:
            return known
        with _named(image.source):
            reading = partial(images.read_dimensions, image.content, self._settings)
            return self._processor.num_embeddings(
                *await self._slowly(reading, inline=len(image.content) < INLINE_HEADER)
            )

    async def _processed(self, image: _Loaded, scope: RequestScope) -> CachedImage:
        def on_lookup(hit: bool) -> None:
            scope.on_lookup(hit, image.mm_hash)
            if self._probe:
                self._probe(hit, image.mm_hash, scope.request_id)

        with _named(image.source):
            process = scope.images[image.mm_hash] = partial(self._process, image.content, scope.context)
            return await self._cache.get(image.mm_hash, process, on_lookup)

    def _process(self, content: bytes, trace: spans.Context) -> ProcessedImage:
        width, height = images.read_dimensions(content, self._settings)
        with self._large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            with spans.span("mm: decode", trace):
                image = images.decode_image(content, self._settings)
            with spans.span("mm: hf_processor", trace):
                return self._processor.process(image)

    async def _slowly(self, work: Callable[[], T], *, inline: bool) -> T:
        return work() if inline else await asyncio.get_running_loop().run_in_executor(self._executor, work)


class _Budget:
    """The bytes that a request's images may still have."""

    def __init__(self, settings: MultimodalSettings) -> None:
        self._limit = self._left = settings.max_total_image_bytes

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise APIError(
                f"with it the images of this request have more than {self._limit:,} bytes, which is all that is "
                "accepted (multimodal.max_total_image_bytes)",
                code="image_too_large",
            )


@contextlib.contextmanager
def _named(source: ImageSource) -> Iterator[None]:
    """An APIError within says which image it is about."""
    try:
        yield
    except APIError as error:
        raise error.at(source.param) from None


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order; the first error cancels what still runs."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
