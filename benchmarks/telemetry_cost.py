"""What spans and the cache probe cost: the same work with their code removed, present and off, and on.

    python benchmarks/telemetry_cost.py

One rank in this process, eight requests with an image each, 64 tokens, again and again with fresh images. The variants
take turns. `removed`: the call sites of spans and probe meet stand-ins that do nothing. `off`: as shipped. `probe`:
with VLLM_MM_CACHE_PROBE=1, its lines written to a file. `spans`: every request sampled, all spans written to a file.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from actors.messages import EngineOutput, EngineRequest, MMItem, SamplingParams
from configs.engine import parse_config
from telemetry import probe, spans
from telemetry.logs import LOGGER_NAME
from tests.support.local_stack import Stack

VARIANTS = ("removed", "off", "probe", "spans")
CONFIG = {
    "model": {"max_model_len": 512},
    "parallel": {"world_size": 1, "threads_per_rank": 1, "device": "cpu"},
    "kv_cache": {"num_blocks": 256},
    "encoder_cache": {"num_blocks": 64},
    "scheduler": {"max_num_seqs": 8},
}
GRID, EMBEDDINGS = (1, 4, 4), 4
_NOTHING: AbstractContextManager[None] = nullcontext()


class NoStages:
    """Stages with the spans and clocks taken out."""

    def __init__(self, reports: bool) -> None:
        self.seconds: dict[str, float] = {}

    def step(self, *_: Any) -> AbstractContextManager[None]:
        return _NOTHING

    def __call__(self, _: str) -> AbstractContextManager[None]:
        return _NOTHING


@contextmanager
def variant(name: str, folder: Path) -> Iterator[None]:
    """Everything made inside, and only that, is of this variant."""
    if name == "removed":
        nothing = {"open_span": lambda *_: None, "context_of": lambda _: None, "link_to": lambda _: None}
        with mock.patch("actors.model_runner.Stages", NoStages), mock.patch.multiple(spans, **nothing):
            yield
    elif name == "probe":
        with mock.patch.dict(os.environ, {probe.VARIABLE: "1"}):
            yield
    elif name == "spans":
        spans.configure("benchmark", str(folder / "spans.jsonl"))
        yield
        spans.shutdown()
    else:
        yield


def requests(rng: np.random.Generator, count: int, tokens: int) -> Iterator[EngineRequest]:
    """Each with an image of four embeddings that was never seen before."""
    for _ in range(count):
        root = spans.open_span("request", None) if spans.recording() else None
        mm_hash = rng.bytes(32).hex()
        yield EngineRequest(
            request_id=rng.bytes(8).hex(),
            token_ids=(*[510] * EMBEDDINGS, *(int(token) for token in rng.integers(0, 500, 28))),
            sampling=SamplingParams(max_tokens=tokens, temperature=0),
            arrival_time=time.time(),
            mm_items=(MMItem(mm_hash=mm_hash, offset=0, length=EMBEDDINGS, num_embeddings=EMBEDDINGS, grid=GRID),),
            pixels={mm_hash: rng.standard_normal((16, 768), np.float32)},
            trace_context=spans.headers_of(root.context) if root else {},
        )
        if root:
            root.end()


def seconds_per_token(stack: Stack, batch: list[EngineRequest], tokens: int) -> float:
    left, done = [len(batch)], threading.Event()

    def on_output(output: EngineOutput) -> None:
        if output.finish_reason is not None:
            left[0] -= 1
            if not left[0]:
                done.set()

    begin = time.perf_counter()
    for request in batch:
        stack.engine.submit(request, on_output)
    done.wait()
    return (time.perf_counter() - begin) / (len(batch) * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: expected at least 2")
    took: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logging.getLogger(LOGGER_NAME).addHandler(logging.FileHandler(folder / "log"))
        logging.getLogger(LOGGER_NAME).setLevel(logging.INFO)
        logging.getLogger(LOGGER_NAME).propagate = False
        stacks = {}
        for each in VARIANTS:
            with variant(each, folder):
                stacks[each] = Stack(parse_config(CONFIG), check_invariants=False)
        for number in range(arguments.rounds + 1):
            for each in (VARIANTS, VARIANTS[::-1])[number % 2]:
                with variant(each, folder):
                    batch = list(requests(rng, 8, arguments.tokens))
                    seconds = seconds_per_token(stacks[each], batch, arguments.tokens)
                if number:  # the first round warms up
                    took[each].append(seconds)
            print(f"\rround {number} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
        for stack in stacks.values():
            stack.engine.stop()
    print(file=sys.stderr)
    print("variant    us per token   spread (quartiles)   ratio to removed, paired by round (median)")
    for each in VARIANTS:
        low, middle, high = statistics.quantiles(took[each], n=4)
        ratio = statistics.median(a / b for a, b in zip(took[each], took["removed"], strict=True))
        print(f"{each:10} {middle * 1e6:12.0f}   {low * 1e6:7.0f} to {high * 1e6:7.0f}   {ratio:.3f}")


if __name__ == "__main__":
    main()
