"""Where the time of an output token goes at one rank: the engine alone in this process, then the whole application.

    python benchmarks/per_token.py

Text requests, one stream and sixteen, `configs/laptop.yaml`, once with each `server.engine_channel`, in turns. Of the
application also the CPU time of each process per token: on a small machine they take each other's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import yaml

from actors.messages import EngineOutput, EngineRequest, SamplingParams
from actors.plan import make_plan
from benchmarks.workloads import Client, words
from configs.engine import parse_config
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from telemetry.recorder import ENGINE, create_recorder
from tests.support.application import ROOT, Application, behind_haproxy
from tests.support.local_stack import LocalGang

PARTS = ("Renderer", "Scheduler", "RankActor", "ProxyActor", "HAProxy", "ServeController", "raylet", "gcs")
STREAMS = (1, 16)
CPU_TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


def cpu_ms() -> dict[str, float]:
    """CPU time until now of each process of the application and of this one, by what it is."""
    took: dict[str, float] = defaultdict(float)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").lower()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        for part in PARTS:
            if part.lower() in command:
                took[part] += (int(fields[11]) + int(fields[12])) * CPU_TICK_MS
                break
    took["client"] = time.process_time() * 1e3
    return took


async def through_http(url: str, streams: int, tokens: int) -> tuple[float, dict[str, float]]:
    """Seconds per token of one stream, and CPU milliseconds per token of all streams by process.

    From answers of one and of many tokens to the same prompts, whose prefixes are cached by then.
    """
    rng = np.random.default_rng(streams)
    prompts = [words(rng) for _ in range(streams)]
    async with Client(url, "digits-vl") as client:
        for _ in range(2):
            ones = await asyncio.gather(*(client.ask(prompt, tokens=1) for prompt in prompts))
        before = cpu_ms()
        timings = await asyncio.gather(*(client.ask(prompt, tokens=tokens) for prompt in prompts))
        after = cpu_ms()
    cpu = {name: (after[name] - before[name]) / (streams * tokens) for name in after}
    first, whole = (float(np.median([timing.total for timing in each])) for each in (ones, timings))
    return (whole - first) / (tokens - 1), cpu


class Listener:
    """Of one request to an engine of this process."""

    def __init__(self, done: queue.SimpleQueue[float], tokens: int) -> None:
        self._done, self._tokens = done, tokens
        self._first = 0.0

    def take(self, output: EngineOutput) -> None:
        now = time.perf_counter()
        self._first = self._first or now
        if output.finish_reason is not None:
            self._done.put((now - self._first) / (self._tokens - 1))


def text_request(request_id: str, rng: np.random.Generator, tokens: int) -> EngineRequest:
    """120 random tokens that want `tokens` more."""
    token_ids = tuple(int(token) for token in rng.integers(300, 400, 120))
    sampling = SamplingParams(max_tokens=tokens, temperature=0)
    return EngineRequest(request_id=request_id, token_ids=token_ids, sampling=sampling, arrival_time=0.0)


def engine_alone(rounds: int, tokens: int) -> dict[int, list[float]]:
    """Seconds per token of one stream, by streams: the same engine and rank in this process, tokens thrown away."""
    torch.set_num_threads(2)
    args = yaml.safe_load((ROOT / "configs/laptop.yaml").read_text())["applications"][0]["args"]
    plan = make_plan(parse_config(args))
    recorder = create_recorder(plan.config.model, ENGINE)
    stats = EngineStats(plan.config, recorder, ENGINE, time.monotonic())
    engine = Engine(Scheduler(plan.config), LocalGang(plan, recorder), stats)
    engine.start()
    took: dict[int, list[float]] = {}
    for streams in STREAMS:
        for number in range(rounds + 1):
            done: queue.SimpleQueue[float] = queue.SimpleQueue()
            rng = np.random.default_rng([streams, number])
            for stream in range(streams):
                request = text_request(f"{streams}-{number}-{stream}", rng, tokens)
                engine.submit(request, Listener(done, tokens).take)
            values = [done.get() for _ in range(streams)]
            if number:  # the first is the warm-up
                took.setdefault(streams, []).append(float(np.median(values)))
    engine.stop()
    return took


def spread(values: list[float]) -> str:
    return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind, per start")
    parser.add_argument("--starts", type=int, default=1, help="of the application with each channel")
    parser.add_argument("--channels", nargs="+", default=["serve", "auto"])
    args = parser.parse_args()
    for streams, seconds in engine_alone(args.rounds, args.tokens).items():
        print(f"{streams:2} streams, engine alone: {spread([1e3 * each for each in seconds])} ms per token", flush=True)
    with TemporaryDirectory() as folder:
        for channel in args.channels * args.starts:
            changes = {"server": {"engine_channel": channel}}
            log = Path(folder) / "log"
            with Application("configs/laptop.yaml", changes, log, behind_haproxy()) as application:
                for streams in STREAMS:
                    measured = [
                        asyncio.run(through_http(application.url, streams, args.tokens)) for _ in range(args.rounds)
                    ]
                    values = [1e3 * seconds for seconds, _ in measured]
                    cpu = {name: np.median([each.get(name, 0.0) for _, each in measured]) for name in measured[0][1]}
                    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(cpu.items()) if ms >= 0.05)
                    print(
                        f"{streams:2} streams, {channel}: {spread(values)} ms per token, "
                        f"{1e3 * streams / np.median(values):.0f} tokens/s; CPU ms per token: {parts}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
