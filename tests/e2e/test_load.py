"""Clients that leave and clients that do not read, on the running application."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

from configs import digits
from tests.soak.leaks import SERVES_BYTES
from tests.soak.watch import object_store_bytes, open_pixels
from tests.support.application import Application
from tests.support.raw_client import RawClient

RUNNING, WAITING, KV = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
BLOCKS = "vllm_neuron:device_encoder_cache_{}_blocks"
VISITS = 200


def settles(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds:g} s"
        time.sleep(0.2)


def reset_caches(application: Application) -> None:
    for cache in ("prefix", "encoder", "mm"):
        httpx.post(f"{application.url}/reset_{cache}_cache", timeout=30).raise_for_status()


def idle(application: Application) -> bool:
    values = application.metrics()
    return values[RUNNING] == values[WAITING] == values[KV] == 0


def test_hundreds_of_disconnects_leave_nothing(one_rank: Application) -> None:
    """In the middle of a request, while it waits, is encoded, prefilled or decoded, and between its events."""
    rng = np.random.default_rng(0)
    pictures = [
        digits.strip(digits.scans_of([index % 10], rng), (64, 64 + 32 * (index % 4)), rng) for index in range(30)
    ]
    images = [{"type": "image_url", "image_url": {"url": digits.data_url(picture)}} for picture in pictures]

    def visit(seed: int) -> None:
        rng = random.Random(seed)
        content = [*rng.sample(images, rng.randrange(3)), {"type": "text", "text": "Read the digits."}]
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.choice((5, 200, 2000)),
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
            "n": rng.choice((1, 1, 3)),
        }
        client = RawClient(one_rank.port)
        share = rng.choice((0.5, 1, 1, 1, 1, 1))
        client.send("/v1/chat/completions", body, share)
        if share == 1 and body["stream"] and rng.random() < 0.5:
            for _, _ in zip(range(rng.choice((1, 10, 30))), client.lines(), strict=False):
                pass
        else:
            time.sleep(rng.random() * 0.5)
        client.leave(abruptly=rng.random() < 0.5)

    reset_caches(one_rank)
    settles(lambda: one_rank.metrics()[BLOCKS.format("active")] == 0, "an empty encoder cache")
    stored = object_store_bytes(one_rank)  # of Serve; what earlier tests left can only shrink
    before = one_rank.metrics()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(visit, range(VISITS)))
    settles(lambda: idle(one_rank), "the end of every request")
    after = one_rank.metrics()
    assert after["vllm:request_success"] - before["vllm:request_success"] > VISITS / 2
    assert after[BLOCKS.format("active")] > 0
    reset_caches(one_rank)
    settles(lambda: one_rank.metrics()[BLOCKS.format("active")] == 0, "the end of every cached image")
    assert one_rank.metrics()[BLOCKS.format("free")] == one_rank.args["encoder_cache"]["num_blocks"] - 1
    settles(lambda: open_pixels(one_rank) == {}, "the end of every image's pixels")
    settles(lambda: object_store_bytes(one_rank) - stored <= SERVES_BYTES, "the end of those in Ray's object store")


def test_a_client_that_does_not_read_holds_nobody_up(one_rank: Application) -> None:
    body = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "logprobs": 5}
    whole = httpx.post(f"{one_rank.url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    client = RawClient(one_rank.port, receive_buffer=4096)
    client.send("/v1/completions", body | {"stream": True})
    settles(lambda: not idle(one_rank), "the beginning of the request that nobody reads")
    short = httpx.post(f"{one_rank.url}/v1/completions", json=body | {"max_tokens": 20}, timeout=30).json()
    assert whole["text"].startswith(short["choices"][0]["text"])
    assert not idle(one_rank)  # that one came in between
    settles(lambda: idle(one_rank), "the end of the request that nobody reads", 120)
    events = [event["choices"][0] for event in client.events(chunk=4096)]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]
    assert events[-1]["finish_reason"] == "length"
