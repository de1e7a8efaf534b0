"""Where the time of an output token goes at 1, 2, 4, 8 and 16 ranks, and how it grows with them.

    python benchmarks/ranks.py

Real rank actors of the demo checkpoint on this machine, one text stream, the engine in this process; no HTTP. Writes a
plot and the figures into `--out`. Of a token: `compute` is rank 0's forward pass without its collectives, which are
timed by themselves, the same calls in as many processes; `dispatch` is what a step takes beyond rank 0's own work (the
message to every rank, the last one's answer); `host` is the engine between two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The ranks' metrics, which prometheus_client looks for when it is imported.
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="tvs-ranks-"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import ray
import torch
from torch import Tensor

from actors.messages import RankOutput, SchedulerOutput, WarmUp
from actors.plan import EnginePlan, make_plan
from actors.rank_group import RankGroup
from benchmarks.collectives import in_processes
from benchmarks.per_token import Listener, text_request
from configs.engine import parse_config
from deployments.scheduler.engine import Engine
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from neuron.collectives import create_collectives
from telemetry.recorder import ENGINE, create_recorder
from tests.neuron.models.gang import ThreadCollectives
from tests.support.local_stack import LocalGang

PARTS = ("compute", "collectives", "sample", "dispatch", "host")
Call = tuple[str, tuple[int, ...]]
"""A collective and the shape of one rank's input."""


def plan_of(world_size: int) -> EnginePlan:
    tree = {
        "model": {"max_model_len": 512},
        "parallel": {"world_size": world_size, "threads_per_rank": 2 if world_size == 1 else 1, "device": "cpu"},
        "kv_cache": {"num_blocks": 128},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 128},
        "buckets": {"vision_patches": [1664]},
    }
    return make_plan(parse_config(tree))


class TimedGang(RankGroup):
    """Notes of every decode step its seconds and those of rank 0's stages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decodes: list[dict[str, float]] = []

    def step(self, output: SchedulerOutput, *arguments: Any) -> RankOutput:
        begin = time.perf_counter()
        answer = super().step(output, *arguments)
        if output.phase == "decode":
            self.decodes.append({"step": time.perf_counter() - begin, **answer.timings})
        return answer


def calls_of_a_token(plan: EnginePlan) -> list[Call]:
    """The collectives of one decode step of one sequence."""
    calls: list[Call] = []

    class Noted(ThreadCollectives):
        def all_reduce(self, x: Tensor) -> Tensor:
            self.note("all_reduce", x)
            return super().all_reduce(x)

        def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
            self.note("all_gather", x)
            return super().all_gather(x, dim)

        def note(self, operation: str, x: Tensor) -> None:
            if self.rank == 0:
                calls.append((operation, tuple(x.shape)))

    with patch("tests.support.local_stack.ThreadCollectives", Noted):
        gang = LocalGang(plan, create_recorder(plan.config.model, ENGINE))
    bucket = next(name for name in plan.bucket_names() if name.startswith("decode/1x"))
    gang.on_every_rank(lambda runner: runner.warm_up(WarmUp(step_id=-1, bucket=bucket)))
    return calls


def time_calls(kind: str, rank: int, world_size: int, rendezvous: str, calls: Sequence[Call], rounds: int) -> float:
    """Median seconds of all `calls` on this rank."""
    torch.set_num_threads(1)
    collectives = create_collectives(kind, rank, world_size, rendezvous, 120.0)
    inputs = [(getattr(collectives, operation), torch.ones(shape)) for operation, shape in calls]
    laps = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for call, x in inputs:
            call(x)
        laps.append(time.perf_counter() - begin)
    collectives.close()
    return statistics.median(laps)


def decode(gang: TimedGang, plan: EnginePlan, rounds: int, tokens: int) -> list[float]:
    """Seconds per token of one stream, of each round."""
    recorder = create_recorder(plan.config.model, ENGINE)
    engine = Engine(Scheduler(plan.config), gang, EngineStats(plan.config, recorder, ENGINE, time.monotonic()))
    engine.start()
    took = []
    for number in range(rounds + 1):
        done: queue.SimpleQueue[float] = queue.SimpleQueue()
        engine.submit(text_request(f"{number}", np.random.default_rng(number), tokens), Listener(done, tokens).take)
        took.append(done.get())
        if not number:  # the warm-up
            took.clear()
            gang.decodes.clear()
    engine.stop()  # and the gang
    return took


def measure(world_size: int, rounds: int, tokens: int) -> dict[str, float]:
    """Milliseconds per token by part, and `total`."""
    plan = plan_of(world_size)
    calls = calls_of_a_token(plan) if world_size > 1 else []
    together = in_processes("shared_memory", world_size, time_calls, calls, 10 * tokens) if calls else [0.0]
    gang = TimedGang(plan, lambda *_: None)
    gang.start()
    total = statistics.median(decode(gang, plan, rounds, tokens))
    median = {name: statistics.median(step[name] for step in gang.decodes) for name in gang.decodes[0]}
    own = median["preprocess"] + median["forward"] + median["sample"]
    seconds = {
        "compute": median["preprocess"] + median["forward"] - max(together),
        "collectives": max(together),
        "sample": median["sample"],
        "dispatch": median["step"] - own,
        "host": total - median["step"],
    }
    return {"total": 1e3 * total} | {name: 1e3 * value for name, value in seconds.items()}


def plot(figures: Mapping[int, Mapping[str, float]], file: Path) -> None:
    worlds = list(figures)
    figure, (parts, overhead) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = [str(world) for world in worlds]
    below = np.zeros(len(worlds))
    for part in PARTS:
        heights = np.array([figures[world][part] for world in worlds])
        parts.bar(names, heights, bottom=below, label=part)
        below += heights
    parts.set(title="an output token, one stream", xlabel="ranks", ylabel="ms")
    parts.legend(frameon=False)
    spent = [figures[world]["dispatch"] + figures[world]["host"] for world in worlds]
    overhead.plot(worlds, spent, "o-", label="dispatch and host")
    overhead.plot(
        worlds, [spent[0] * world / worlds[0] for world in worlds], ":", color="grey", label="as the ranks do"
    )
    overhead.set(title="what a step costs beside the ranks' own work", xlabel="ranks", ylabel="ms")
    overhead.set_xscale("log", base=2)
    overhead.set_yscale("log")
    overhead.set_xticks(worlds, names)
    overhead.legend(frameon=False)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/ranks"))
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(f"ms per token, {os.cpu_count()} cores\n{'ranks':>5} {'total':>8}" + "".join(f"{part:>13}" for part in PARTS))
    figures = {}
    for world_size in args.worlds:
        took = figures[world_size] = measure(world_size, args.rounds, args.tokens)
        print(f"{world_size:5} {took['total']:8.2f}" + "".join(f"{took[part]:13.2f}" for part in PARTS), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ranks.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot(figures, args.out / "ranks.png")
    print(f"written: {args.out}/ranks.json, ranks.png")


if __name__ == "__main__":
    main()
