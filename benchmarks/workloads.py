"""What the engines are asked, generated from a seed, and what a client measures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from openai import AsyncOpenAI

from configs import digits

Samples = dict[str, list[float]]
"""Measured values by name, see `UNITS`."""

UNITS = {
    "first token: text": "ms",
    "first token: new image": "ms",
    "first token: same image, new question": "ms",
    "first token: identical request": "ms",
    "per output token, one stream": "ms",
    "8 at a time": "tokens/s",
    "8 at a time, requests": "1/s",
    "16 at a time": "tokens/s",
    "16 at a time, requests": "1/s",
    "30 images, cold": "ms",
    "30 images, again": "ms",
    "start to ready": "s",
    "memory": "MB",
    "memory after it all": "MB",
}


@dataclass
class Timing:
    """Of one streamed answer, in seconds."""

    first: float
    """From the request to the first text. Tokens without text come before it, so that only an answer of one token tells
    when the first token came."""
    total: float
    tokens: int

    @property
    def per_token(self) -> float:
        return (self.total - self.first) / max(1, self.tokens - 1)


class Client:
    """One OpenAI client, greedy requests of a fixed number of tokens."""

    def __init__(self, url: str, model: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900, max_retries=0)
        self._model = model

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, text: str, images: Sequence[str] = (), tokens: int = 32) -> Timing:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        begin = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        first: float | None = None
        generated = 0
        async for chunk in stream:
            if chunk.choices and first is None and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
                first = time.perf_counter() - begin
            if chunk.usage:
                generated = chunk.usage.completion_tokens
        if first is None or generated != tokens:
            raise RuntimeError(f"{generated} of {tokens} tokens came")
        return Timing(first, time.perf_counter() - begin, generated)


def image(rng: np.random.Generator, side: int) -> str:
    """A new PNG of digits, as a data URL."""
    return digits.data_url(digits.scene(rng, [(side, side)], style=digits.Style(augment=True)).image)


def words(rng: np.random.Generator, number: int = 24) -> str:
    return " ".join("".join(chr(97 + c) for c in rng.integers(0, 26, int(rng.integers(2, 8)))) for _ in range(number))


async def first_tokens(client: Client, rng: np.random.Generator, repeats: int) -> AsyncIterator[tuple[str, float]]:
    for _ in range(repeats):
        picture = image(rng, 448)
        question = words(rng, 8)
        for name, text, images in (
            ("text", words(rng), ()),
            ("new image", words(rng, 8), (picture,)),
            ("same image, new question", question, (picture,)),
            ("identical request", question, (picture,)),
        ):
            yield f"first token: {name}", 1e3 * (await client.ask(text, images, tokens=1)).first


async def one_stream(client: Client, rng: np.random.Generator, repeats: int) -> AsyncIterator[tuple[str, float]]:
    """From answers of one and of many tokens to one prompt, whose prefix is cached by then."""
    for _ in range(repeats):
        text = words(rng)
        await client.ask(text, tokens=1)
        one, many = await client.ask(text, tokens=1), await client.ask(text, tokens=129)
        yield "per output token, one stream", 1e3 * (many.total - one.total) / 128


async def many_at_a_time(
    client: Client, rng: np.random.Generator, concurrency: int
) -> AsyncIterator[tuple[str, float]]:
    """Two images each from 20 distinct, 32 tokens."""
    pictures = [image(rng, 448) for _ in range(20)]
    jobs = [
        (words(rng, 8), [pictures[int(i)] for i in rng.choice(20, 2, replace=False)]) for _ in range(4 * concurrency)
    ]
    gate = asyncio.Semaphore(concurrency)

    async def ask(text: str, images: list[str]) -> None:
        async with gate:
            await client.ask(text, images, tokens=32)

    begin = time.perf_counter()
    await asyncio.gather(*(ask(*job) for job in jobs))
    rate = len(jobs) / (time.perf_counter() - begin)
    yield f"{concurrency} at a time", 32 * rate
    yield f"{concurrency} at a time, requests", rate


async def thirty_images(client: Client, rng: np.random.Generator) -> AsyncIterator[tuple[str, float]]:
    pictures = [image(rng, 512) for _ in range(30)]
    question = words(rng, 8)
    for name in ("cold", "again"):
        yield f"30 images, {name}", 1e3 * (await client.ask(question, pictures, tokens=1)).first


async def measure(url: str, model: str, seed: int, repeats: int, thirty: bool) -> Samples:
    """Every workload once, after a warm-up with inputs of their own. `seed` is another one in every round."""
    async with Client(url, model) as client:
        return await _measure(client, seed, repeats, thirty)


async def _measure(client: Client, seed: int, repeats: int, thirty: bool) -> Samples:
    samples: Samples = defaultdict(list)
    warm = np.random.default_rng([seed, 1])
    for _ in range(2):
        async for _ in first_tokens(client, warm, 2):
            pass
    async for _ in many_at_a_time(client, warm, 8):
        pass
    rng = np.random.default_rng([seed, 0])
    for workload in (
        first_tokens(client, rng, repeats),
        one_stream(client, rng, max(2, repeats // 3)),
        many_at_a_time(client, rng, 8),
        many_at_a_time(client, rng, 16),
        *((thirty_images(client, rng),) if thirty else ()),
    ):
        async for name, value in workload:
            samples[name].append(value)
    return samples
