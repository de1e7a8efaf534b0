"""How the cost of the plain cores grows with their size: no Ray, no model, one process.

    python benchmarks/growth.py --out build/growth.png

- `schedule()` and `update_from_output()` of a decode step, over running requests, with an empty and with a long queue
- encoder cache manager and EncoderCacheBlocks: one image in and one out, over cached images
- prefix lookup of a prompt, over its tokens: hashing its blocks and finding them
- a processor cache hit, over images of 1 MB: the hash, and everything behind it
- host memory per cached image, of the manager and of EncoderCacheBlocks
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from blake3 import blake3

from actors.messages import EngineRequest, MMItem, SamplingParams, TokenLogprobs
from configs.engine import EngineConfig, parse_config
from deployments.renderer.processor import ProcessedImage
from deployments.renderer.processor_cache import ProcessorCache
from deployments.scheduler.encoder_cache_manager import EncoderCacheManager
from deployments.scheduler.request import Request
from deployments.scheduler.scheduler import Scheduler
from neuron.encoder_cache_blocks import EncoderCacheBlocks
from telemetry.recorder import Recorder

Curve = list[tuple[int, float]]
"""(size, cost)"""

BLOCK = 64  # embeddings of an encoder cache block


def request(number: int, num_tokens: int, image: str | None = None, tokens: range | None = None) -> EngineRequest:
    item = MMItem(mm_hash=image, offset=0, length=BLOCK, num_embeddings=BLOCK, grid=(1, 16, 16)) if image else None
    return EngineRequest(
        request_id=str(number),
        token_ids=tuple(tokens or range(number, number + num_tokens)),
        sampling=SamplingParams(max_tokens=10_000, temperature=0),
        arrival_time=0.0,
        mm_items=(item,) if item else (),
    )


@contextmanager
def timed(samples: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    samples.append(time.perf_counter() - begin)


def config_of(running: int, waiting: int) -> EngineConfig:
    return parse_config(
        {
            "model": {"max_model_len": 16384},
            "kv_cache": {"num_blocks": 65536},
            "scheduler": {
                "max_num_seqs": running,
                "max_num_batched_tokens": 16384,
                "max_waiting_requests": running + waiting,
                "max_waiting_tokens": 32 * (running + waiting),
            },
        }
    )


def decode_step(running: int, waiting: int, steps: int = 60) -> tuple[float, float]:
    """Seconds of `schedule` and of `update_from_output` in a decode step of `running` sequences (medians)."""
    scheduler = Scheduler(config_of(running, waiting))
    for number in range(running + waiting):
        scheduler.add_request(request(number * 40, 32))
    schedule: list[float] = []
    update: list[float] = []
    clock = 0.0
    while len(schedule) < steps:
        clock += 0.01
        begin = time.perf_counter()
        output = scheduler.schedule(clock)
        between = time.perf_counter()
        assert output is not None
        sampled = {request_id: TokenLogprobs(token_id=7, logprob=0.0) for request_id in output.num_scheduled_tokens}
        before = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        if output.phase == "decode" and len(scheduler.running) == running:
            schedule.append(between - begin)
            update.append(time.perf_counter() - before)
    return statistics.median(schedule), statistics.median(update)


def encoder_manager(entries: int, operations: int = 2000) -> tuple[float, float]:
    """Seconds to look up, evict for and admit one image in a full cache, and bytes per entry."""
    manager = EncoderCacheManager(entries + 1, BLOCK)
    tracemalloc.start()
    for number in range(entries):
        one = Request(request(number, BLOCK + 8, image=f"{number:064x}"), number, 16384)
        assert manager.can_allocate(one, 0)
        manager.allocate(one, 0)
        manager.free(one)
    size = tracemalloc.get_traced_memory()[0] / entries
    tracemalloc.stop()
    samples: list[float] = []
    for number in range(entries, entries + operations):
        one = Request(request(number, BLOCK + 8, image=f"{number:064x}"), number, 16384)
        with timed(samples):
            manager.advance(float(number))
            assert not manager.check_and_update_cache(one, 0)
            assert manager.can_allocate(one, 0)
            manager.allocate(one, 0)
            manager.free(one)
            manager.get_freed_mm_hashes()
    return statistics.median(samples), size


def encoder_blocks(entries: int, operations: int = 2000) -> tuple[float, float]:
    """Seconds to free one image and admit another in a full cache, and bytes per entry."""
    blocks = EncoderCacheBlocks(entries + 1, BLOCK)
    tracemalloc.start()
    for number in range(entries):
        blocks.allocate(f"{number:064x}", BLOCK)
    size = tracemalloc.get_traced_memory()[0] / entries
    tracemalloc.stop()
    samples: list[float] = []
    for number in range(operations):
        with timed(samples):
            blocks.advance(float(number))
            blocks.free(f"{number:064x}", float(number))
            blocks.allocate(f"{entries + number:064x}", BLOCK)
            blocks.mark_written(f"{entries + number:064x}", float(number))
    return statistics.median(samples), size


def prefix_lookup(tokens: int) -> tuple[float, float]:
    """Seconds to hash the blocks of a prompt of `tokens` tokens, and to find them all in the cache."""
    scheduler = Scheduler(
        parse_config({"model": {"max_model_len": 2 * tokens}, "kv_cache": {"num_blocks": tokens // 8 + 64}})
    )
    pool = scheduler.kv.pool
    first = Request(request(0, tokens), 0, 2 * tokens)
    first.extend_block_hashes(scheduler.kv.block_size)
    for block_id, block_hash in zip(pool.allocate(len(first.block_hashes)), first.block_hashes, strict=True):
        pool.register(block_id, block_hash)
    hashing: list[float] = []
    finding: list[float] = []
    for _ in range(5):
        again = Request(request(0, tokens), 0, 2 * tokens)
        with timed(hashing):
            again.extend_block_hashes(scheduler.kv.block_size)
        with timed(finding):
            found = scheduler.kv.find_prefix(again)
        assert len(found) >= tokens // scheduler.kv.block_size - 1
    return min(hashing), min(finding)


def processor_hit(images: int) -> tuple[float, float]:
    """Seconds to hash `images` images of 1 MB, and to get all of them from the cache (with hashing)."""
    contents = [np.random.default_rng(number).bytes(1_000_000) for number in range(images)]
    with ThreadPoolExecutor(1) as executor:
        cache = ProcessorCache(2**30, Recorder(()), executor)
        image = ProcessedImage(np.zeros((4, 4), np.float32), (1, 2, 2), 1)

        async def get_all() -> None:
            for content in contents:
                await cache.get(blake3(content).hexdigest(), lambda: image)

        asyncio.run(get_all())
        hashing: list[float] = []
        everything: list[float] = []
        for _ in range(7):
            with timed(hashing):
                for content in contents:
                    blake3(content).hexdigest()
            with timed(everything):
                asyncio.run(get_all())
    return min(hashing), min(everything)


def over(sizes: list[int], measure: Callable[[int], tuple[float, float]]) -> tuple[Curve, Curve]:
    first: Curve = []
    second: Curve = []
    for size in sizes:
        print(f"  {measure.__name__} {size:,}", file=sys.stderr, flush=True)
        one, other = measure(size)
        first.append((size, one))
        second.append((size, other))
    return first, second


def draw(axes, title: str, unit: str, scale: float, **curves: Curve) -> None:
    for name, curve in curves.items():
        axes.plot(*zip(*((size, cost * scale) for size, cost in curve), strict=True), marker="o", label=name)
        values = "  ".join(f"{size:,}: {cost * scale:.3g}" for size, cost in curve)
        print(f"{title}, {name.replace('_', ' ')} ({unit}): {values}")
    axes.set(title=title, ylabel=unit, xscale="log", ylim=(0, None))
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/growth.png"))
    parser.add_argument("--max-entries", type=int, default=1_000_000, help="largest encoder cache")
    args = parser.parse_args()
    entries = [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= args.max_entries]
    running = [1, 16, 64, 256, 512]

    def short_queue(n: int) -> tuple[float, float]:
        return decode_step(n, 0)

    def long_queue(n: int) -> tuple[float, float]:
        return decode_step(n, 100_000)

    figure, axes = plt.subplots(2, 3, figsize=(16, 8), layout="constrained")
    schedule, update = over(running, short_queue)
    schedule_long, _ = over(running[:4], long_queue)
    draw(
        axes[0, 0], "decode step, by running requests", "ms", 1e3,
        schedule=schedule, schedule_with_100k_waiting=schedule_long, update_from_output=update,
    )  # fmt: skip
    manager, manager_bytes = over(entries, encoder_manager)
    blocks, blocks_bytes = over(entries, encoder_blocks)
    draw(axes[0, 1], "one image in, one out, by cached images", "µs", 1e6, manager=manager, blocks=blocks)
    draw(axes[0, 2], "host memory per cached image", "bytes", 1, manager=manager_bytes, blocks=blocks_bytes)
    hashing, finding = over([1_024, 8_192, 32_768, 131_072], prefix_lookup)
    draw(axes[1, 0], "prefix of a prompt, by tokens", "ms", 1e3, hashing=hashing, finding=finding)
    only_hash, everything = over([1, 10, 30], processor_hit)
    draw(axes[1, 1], "processor cache hits, by images of 1 MB", "ms", 1e3, hashing=only_hash, hit=everything)
    axes[1, 2].axis("off")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=80)
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    main()
