"""Everything at once: conversations, disconnects, slow readers, evictions, preemptions, and a rank killed every minute.

    python -m tests.soak.soak --minutes 30

Starts the application with caches far too small, asks everything once undisturbed, and then lets clients ask it again
and again. Fails unless every answer is the undisturbed one, nobody saw an error, and between two quiet moments no
process's memory, files or threads, no segment, object, temporary folder or gauge has grown. Writes a plot into --out.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from tests.soak.leaks import SERVES_BYTES, Quiet, leaks
from tests.soak.talk import Talk
from tests.soak.watch import Watcher, errors_in, quiet, ranks
from tests.support.application import Application

WORLD_SIZE = 2
CHANGES: dict[str, Any] = {
    "model": {"max_model_len": 1024},
    "parallel": {"world_size": WORLD_SIZE, "threads_per_rank": 1},
    "kv_cache": {"num_blocks": 80},
    "encoder_cache": {"block_size": 16, "num_blocks": 24, "min_hold_time_ms": 3},
    "processor_cache": {"max_bytes": 2_000_000},
    "scheduler": {"max_num_batched_tokens": 256, "max_encoder_embeddings_per_step": 64},
    "debug": {"rank_digest": True, "check_invariants": True, "fail_on_new_shape": True},
    "server": {"development_mode": True},
}
RUNNING, WAITING, KV = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
BLOCKS = tuple(f"vllm_neuron:device_encoder_cache_{state}_blocks" for state in ("active", "free", "held"))
GAUGES = (RUNNING, WAITING, KV, *BLOCKS, "vllm_neuron:device_encoder_cache_active_real_tokens")
HAPPENS = {
    "preemptions": "vllm:num_preemptions",
    "evicted blocks": "vllm_neuron:device_encoder_cache_evictions",
    "prefix hits": "vllm:prefix_cache_hits",
    "tokens": "vllm:generation_tokens",
}
"""What must have happened, or the soak has shown little; and the counters that say so."""
SETTLE_S = 90.0
REPORTS_S = 3.0
"""In which every process has reported its gauges, and Ray its object store, a second's interval each."""


def _steady(before: Quiet, now: Quiet) -> bool:
    return abs(now.object_store_bytes - before.object_store_bytes) <= SERVES_BYTES


class Soak:
    def __init__(self, application: Application, folder: Path, args: argparse.Namespace) -> None:
        self.application = application
        self.folder = folder
        self.args = args
        self.talk = Talk(application.url, args.seed, args.conversations)
        self.watcher = Watcher(application)
        self.kills: list[float] = []
        self.failures: list[str] = []

    async def run(self) -> None:
        self.say("asking everything once, undisturbed")
        await self.talk.prepare()
        self.say(f"{len(self.talk.questions)} questions; warming up for {self.args.warm_up:g} s")
        await self.load(self.args.warm_up, kills=False)
        first = await self.quiet()
        before = self.application.metrics()
        warm = dict(self.talk.tally.counts)
        self.say(f"the soak begins: {self.args.minutes:g} minutes, a rank dies every {self.args.kill_every:g} s")
        await self.load(self.args.minutes * 60, kills=True)
        after = self.application.metrics()
        last = await self.quiet()
        self.watcher.stop()
        self.judge(first, last, before, after)
        self.summarize(first, last, warm)

    async def load(self, seconds: float, kills: bool) -> None:
        until = asyncio.Event()
        beside = [asyncio.create_task(self.progress())]
        if kills:
            beside.append(asyncio.create_task(self.kill_ranks()))
        asyncio.get_running_loop().call_later(seconds, until.set)
        try:
            await asyncio.wait_for(self.talk.run(self.args.clients, until), seconds + 300)
        except TimeoutError:
            self.failures.append("some requests had no answer within 300 s of the last question")
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)

    async def kill_ranks(self) -> None:
        rng = random.Random(self.args.seed)
        while True:
            await asyncio.sleep(self.args.kill_every)
            alive = await asyncio.to_thread(ranks, self.application)
            if len(alive) < WORLD_SIZE:
                continue  # the gang is being restarted
            victim = rng.choice(alive)
            os.kill(victim.pid, signal.SIGKILL)
            self.kills.append(self.watcher.now)
            self.say(f"killed rank process {victim.pid}")

    async def progress(self) -> None:
        while True:
            await asyncio.sleep(15)
            tally = self.talk.tally
            memory = self.watcher.samples[-1][1] if self.watcher.samples else {}
            held = ", ".join(f"{n} {memory[n]:.0f} MB" for n in ("Renderer", "Scheduler", "RankActor") if n in memory)
            self.say(f"{dict(tally.counts)} wrong={len(tally.wrong)} errors={len(tally.errors)} {held}")

    async def quiet(self) -> Quiet:
        """What is held once all requests have ended and the caches are empty."""
        deadline = time.monotonic() + SETTLE_S
        previous: Quiet | None = None
        while True:
            for cache in ("prefix", "encoder", "mm"):
                httpx.post(f"{self.application.url}/reset_{cache}_cache", timeout=60).raise_for_status()
            await asyncio.sleep(REPORTS_S)
            now = await asyncio.to_thread(quiet, self.application, self.folder, GAUGES)
            idle = now.gauges[RUNNING] == now.gauges[WAITING] == now.gauges[KV] == now.gauges[BLOCKS[0]] == 0
            if idle and previous is not None and _steady(previous, now):
                return now
            previous = now
            if time.monotonic() > deadline:
                self.failures.append(f"not quiet within {SETTLE_S:g} s of the last request: {now.gauges}")
                return now

    def judge(self, first: Quiet, last: Quiet, before: dict[str, float], after: dict[str, float]) -> None:
        tally = self.talk.tally
        self.failures += leaks(first, last)
        self.failures += [f"wrong answer, {each}" for each in tally.wrong[:5]]
        self.failures += [f"error, {each}" for each in tally.errors[:5]]
        self.failures += [f"log: {line[:300]}" for line in errors_in(self.application.log.read_text())[:5]]
        if not self.kills:
            self.failures.append("no rank was killed: the soak was too short")
        for what, counter in HAPPENS.items():
            moved = after[counter] - before[counter]
            self.say(f"{what}: {moved:g}")
            if moved <= 0:
                self.failures.append(f"{counter} did not move: the soak has shown little")

    def summarize(self, first: Quiet, last: Quiet, warm: dict[str, int]) -> None:
        tally = self.talk.tally
        print(f"\n{'process':20} {'MB':>8} {'then':>8} {'grew':>7} {'files':>6} {'then':>5} {'threads':>8} {'then':>5}")
        for name, now in sorted(last.processes.items()):
            was = first.processes.get(name, now)
            print(
                f"{name:20} {was.memory_mb:8.1f} {now.memory_mb:8.1f} {now.memory_mb - was.memory_mb:+7.1f} "
                f"{was.files:6d} {now.files:5d} {was.threads:8d} {now.threads:5d}"
            )
        print(f"object store: {first.object_store_bytes:g} bytes, then {last.object_store_bytes:g}")
        print(f"/dev/shm: {first.shared_memory} segments, then {last.shared_memory}")
        print(f"clients, warm-up included: {dict(tally.counts)} ({sum(warm.values())} in it); kills: {len(self.kills)}")
        print(f"longest answer: {tally.longest_s:.1f} s; wrong: {len(tally.wrong)}; errors: {len(tally.errors)}")
        out = Path(self.args.out)
        out.mkdir(parents=True, exist_ok=True)
        figures = {"first": asdict(first), "last": asdict(last), "kills": self.kills, "samples": self.watcher.samples}
        (out / "soak.json").write_text(json.dumps(figures | {"counts": tally.counts, "failures": self.failures}))
        (out / "serve-log.txt").write_text(self.application.log.read_text())
        plot(self.watcher.samples, self.kills, out / "memory.png")
        print(f"written: {out}/soak.json, memory.png, serve-log.txt")

    def say(self, what: str) -> None:
        print(f"[{self.watcher.now:6.0f} s] {what}", flush=True)


def plot(samples: list[tuple[float, dict[str, float]]], kills: list[float], path: Path) -> None:
    """Own memory of every kind of process over time; dotted: a rank was killed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    for name in sorted({name for _, memory in samples for name in memory}):
        points = [(seconds / 60, memory[name]) for seconds, memory in samples if name in memory]
        axes.plot(*zip(*points, strict=True), label=name)
    for kill in kills:
        axes.axvline(kill / 60, color="grey", linestyle=":", linewidth=0.8)
    axes.set(xlabel="minutes", ylabel="MB of its own", title="Memory of every process (dotted: a rank was killed)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12, help="that ask at a time")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between two killed ranks")
    parser.add_argument(
        "--warm-up", type=float, default=30.0, help="seconds of the same load before memory is compared"
    )
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="build/soak")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tvs-soak-") as folder:
        environment = {"TMPDIR": folder, "RAY_metrics_report_interval_ms": "1000"}
        with Application("configs/laptop.yaml", CHANGES, Path(folder) / "serve.log", environment) as application:
            soak = Soak(application, Path(folder), args)
            asyncio.run(soak.run())
    if soak.failures:
        print("\nFAILED\n" + "\n".join(f"- {failure}" for failure in soak.failures))
        return 1
    print("\npassed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
