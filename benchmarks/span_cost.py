"""What spans cost a running application: tokens per second over HTTP with every request sampled, against spans off.

    python benchmarks/span_cost.py

Two applications of `configs/laptop.yaml` run side by side and are asked in turns, so that both meet the same machine:
`--concurrency` clients at a time, each with an image never seen before and `--tokens` tokens. One writes every span of
every process to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from openai import AsyncOpenAI

from configs import digits
from tests.support.application import Application


async def tokens_per_second(client: AsyncOpenAI, rng: np.random.Generator, args: argparse.Namespace) -> float:
    urls = [digits.data_url(digits.scene(rng, digits.MEDIUM_SIZES).image) for _ in range(args.requests)]
    gate = asyncio.Semaphore(args.concurrency)

    async def ask(url: str) -> None:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Read the digits."}]
        async with gate:
            stream = await client.chat.completions.create(
                model="digits-vl",
                messages=[{"role": "user", "content": content}],
                max_tokens=args.tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                pass

    begin = time.perf_counter()
    await asyncio.gather(*map(ask, urls))
    return len(urls) * args.tokens / (time.perf_counter() - begin)


async def alternate(clients: dict[str, AsyncOpenAI], args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each application, round by round; the first round warms up."""
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for name in list(clients)[:: 1 if number % 2 else -1]:
            rate = await tokens_per_second(clients[name], rng, args)
            if number:
                rates[name].append(rate)
        print(f"\rround {number} of {args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32, help="per application and round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: expected at least 2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traced = {"telemetry": {"spans_file": str(folder / "spans.jsonl")}}
        with (
            Application("configs/laptop.yaml", {}, folder / "off.log") as off,
            Application("configs/laptop.yaml", traced, folder / "on.log") as on,
        ):
            clients = {
                "off": AsyncOpenAI(base_url=f"{off.url}/v1", api_key="none"),
                "on": AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none"),
            }
            rates = asyncio.run(alternate(clients, args))
        count = len((folder / "spans.jsonl").read_text().splitlines())
    print(f"{count} spans")
    print("spans   tokens/s   quartiles")
    for name in ("off", "on"):
        low, middle, high = statistics.quantiles(rates[name], n=4)
        print(f"{name:5} {middle:10.0f}   {low:.0f} to {high:.0f}")
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"on / off, paired by round: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
