"""A thousand clients leave at random moments; nothing of them stays: no request, block, image, pixel, task or file."""

import base64
import gc
import io
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import numpy as np
from PIL import Image

from configs.engine import EngineConfig, parse_config
from deployments.renderer.checkpoint import load_checkpoint
from telemetry import metrics
from tests.support.raw_client import RawClient
from tests.support.simulated_stack import SimulatedStack, wait_until

NUM_CLIENTS = 1000
AT_A_TIME = 16
WAYS = ("half a request", "at once", "soon", "soon", "at an event", "at an event", "at an event", "stays")
CONFIG = {
    "model": {"max_model_len": 256},
    # KV for one longest request and a bit, few images, fewer pixels: preemption, eviction and processing anew happen.
    "kv_cache": {"block_size": 8, "num_blocks": 36},
    "encoder_cache": {"block_size": 4, "num_blocks": 9, "min_hold_time_ms": 2},
    "processor_cache": {"max_bytes": 400_000},
    "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_encoder_embeddings_per_step": 16},
    "debug": {"check_invariants": True},
}


def pictures(number: int) -> list[dict]:
    """Parts of a message: images of 4 to 16 embeddings."""
    rng = np.random.default_rng(0)
    parts = []
    for index in range(number):
        side = 64 + 32 * (index % 3)
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(buffer, "PNG", compress_level=0)
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def body(rng: random.Random, images: list[dict]) -> dict:
    content = [*rng.sample(images, rng.choice((0, 1, 1, 2))), {"type": "text", "text": rng.choice(("Hi!", "Hm" * 9))}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.choice((1, 5, 60)),
        "ignore_eos": True,
        "n": rng.choice((1, 1, 1, 3)),
        "stream": rng.random() < 0.7,
        "seed": 1,
    }


def visit(port: int, seed: int, images: list[dict]) -> str:
    """One client; returns how it left."""
    rng = random.Random(seed)
    client = RawClient(port)
    request = body(rng, images)
    way = rng.choice(WAYS)
    client.send("/v1/chat/completions", request, share=rng.random() if way == "half a request" else 1.0)
    if way == "soon":
        time.sleep(rng.random() * 0.1)
    elif way == "at an event" and request["stream"]:
        for _, _ in zip(range(rng.choice((1, 2, 8, 40))), client.lines(), strict=False):
            pass
    elif way == "stays":
        assert next(client.lines()).startswith(b"HTTP/1.1 200")
        for _ in client.lines():
            pass
    client.leave(abruptly=rng.random() < 0.5)
    return way


def open_files() -> Counter[str]:
    """What this process has open, sockets and pipes by their numbers, without what waits for the garbage collector.

    Numbers, because an earlier test of this process may leave sockets (Ray's) that close in the middle of this one.
    """
    gc.collect()
    files: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            files[os.readlink(f"/proc/self/fd/{number}")] += 1
    return files


def test_a_thousand_disconnects_leave_nothing() -> None:
    images = pictures(12)
    with SimulatedStack(parse_config(CONFIG), load_checkpoint(EngineConfig()), step_s=0.001) as stack:
        scheduler, cache = stack.scheduler, stack.scheduler.encoder_cache
        ask = body(random.Random(5), images) | {"stream": False, "max_tokens": 30, "n": 1}

        def answer() -> str:
            with httpx.Client(timeout=30) as http:
                response = http.post(f"{stack.url}/v1/chat/completions", json=ask)
            return response.raise_for_status().json()["choices"][0]["message"]["content"]

        tasks = stack.tasks()
        expected = answer()
        for seed in range(8):  # every kind of thread and connection is there from now on
            visit(stack.port, seed, images)
        wait_until(lambda: not scheduler.requests and stack.tasks() == tasks and stack.connections() == 0)
        files, threads = open_files(), threading.active_count()
        gauges = dict(stack.recorder.values)

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            left = Counter(pool.map(lambda seed: visit(stack.port, seed, images), range(NUM_CLIENTS)))
        wait_until(lambda: not scheduler.requests, what="the end of every request")
        wait_until(lambda: stack.tasks() == tasks, what="the end of every task")
        counts = stack.recorder.counts
        ends = {reason: counts[f"{metrics.REQUEST_SUCCESS.name},{reason}"] for reason in ("abort", "length", "error")}
        assert min(left.values()) > 50
        assert ends["error"] == 0
        assert ends["abort"] > 300
        assert ends["length"] > 300
        assert counts[metrics.NUM_PREEMPTIONS.name] > 10
        assert stack.gang.rank.num_evicted_blocks > 100

        wait_until(lambda: not stack.gang.rank.tokens, what="the ranks' word that nobody is known")
        wait_until(lambda: stack.recorder.values == gauges, what="every gauge's idle value")
        assert gauges[metrics.NUM_REQUESTS_RUNNING.name] == gauges[metrics.NUM_REQUESTS_WAITING.name] == 0
        assert gauges[metrics.KV_CACHE_USAGE.name] == 0
        assert not any(item.request_ids for item in cache.cached.values())
        assert scheduler.waiting.num_tokens == 0
        assert not stack.engine._live
        wait_until(lambda: stack.connections() == 0, what="the end of every connection")
        assert open_files() - files == Counter()
        assert threading.active_count() <= threads + AT_A_TIME  # the pool's are ended, the worker threads are bounded
        assert answer() == expected

        stack.reset_caches()
        wait_until(lambda: stack.gang.rank.blocks.num_active_blocks == 0, what="the end of every image on the rank")
        wait_until(lambda: stack.gang.rank.blocks.num_held_blocks == 0)
        assert cache.num_free_blocks == cache.num_blocks - 1
        wait_until(lambda: stack.held_pixels() == 0, what="the end of every image's pixels")
