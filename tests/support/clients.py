"""Sixteen streaming clients, and what each of them got; to compare a disturbed run with an undisturbed one."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from configs import digits
from tests.support.application import Application

MODEL = "digits-vl"
NUM_CLIENTS = 16


def image_message(seed: int, text: str = "Read the digits.") -> list[dict]:
    """A message with an image of its own."""
    rng = np.random.default_rng(seed)
    picture = digits.strip(digits.scans_of([2, 7], rng), (128, 64), rng)
    image = {"type": "image_url", "image_url": {"url": digits.data_url(picture)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


@dataclass(frozen=True)
class Got:
    """One client's answer."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None


class Clients:
    """One run of streams, some seconds long: every second one greedy, the others drawn with a seed and penalties."""

    def __init__(self, application: Application, seed: int, max_tokens: int = 300, number: int = NUM_CLIENTS) -> None:
        self._client = application.client
        self._seed, self._max_tokens = seed, max_tokens
        self._pool = ThreadPoolExecutor(number)
        self.num_chunks = [0] * number
        self._futures: list[Future[Got]] = [self._pool.submit(self._stream, index) for index in range(number)]

    def _stream(self, index: int) -> Got:
        drawn = {"temperature": 1.0, "seed": 1000 + index, "presence_penalty": 0.3, "frequency_penalty": 0.2}
        parameters = drawn if index % 2 else {"temperature": 0}
        stream = self._client.chat.completions.create(
            model=MODEL, messages=image_message(self._seed + index), max_tokens=self._max_tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"min_tokens": self._max_tokens}, **parameters,
        )  # fmt: skip
        text, usage, reason = "", None, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                self.num_chunks[index] += 1
        assert usage is not None
        return Got(text, usage.prompt_tokens, usage.completion_tokens, reason)

    def wait_for_chunks(self, number: int) -> None:
        """Until every client has so many, that is, is in the middle of its answer."""
        wait_until(lambda: min(self.num_chunks) >= number or any(future.done() for future in self._futures))

    def results(self) -> list[Got]:
        """Raises what a client met."""
        try:
            return [future.result(timeout=240) for future in self._futures]
        finally:
            self._pool.shutdown(wait=False)


def processes(application: Application, name: str) -> list[psutil.Process]:
    """The living processes of this application that Ray calls so."""
    found = []
    for child in psutil.Process(application.pid).children(recursive=True):
        try:
            if name in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 120, what: str = "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        threading.Event().wait(0.05)


def samples(application: Application) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics by name and labels."""
    text = httpx.get(f"{application.url}/metrics", timeout=30).raise_for_status().text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check_counters(before: dict, after: dict) -> None:
    """None went backwards, and none is gone."""
    suffixes = ("_total", "_bucket", "_count", "_sum")
    backwards = {key: (value, after.get(key)) for key, value in before.items() if key[0].endswith(suffixes)}
    backwards = {key: pair for key, pair in backwards.items() if pair[1] is None or pair[1] < pair[0]}
    assert not backwards


def restarts(values: dict) -> dict[str, float]:
    """vllm_neuron:rank_restarts by reason."""
    return {dict(labels)["reason"]: value for (name, labels), value in values.items() if "rank_restarts_total" in name}


def blocks(application: Application, names: Sequence[str] = ("active", "free", "held")) -> float:
    """Encoder cache blocks of all ranks, in whatever state."""
    values = application.metrics()
    return sum(values[f"vllm_neuron:device_encoder_cache_{name}_blocks"] for name in names)
