"""Where the time of one request goes, from its spans: a table per stage, and a drawing of its first token.

    python benchmarks/profile_request.py --checkpoint configs/models/digits-vl --out build/profile.png

One request with a new 448x448 image and one with text only, each after a warm-up, through `configs/laptop.yaml`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.engines import SERVE_ENVIRONMENT
from benchmarks.workloads import Client, Timing, image, words
from tests.support.application import Application, free_port

Span = dict[str, Any]


async def ask_both(url: str, tokens: int) -> list[Timing]:
    """The request with an image, then the one with text only."""
    client = Client(url, "digits-vl")
    rng = np.random.default_rng(0)
    for _ in range(3):
        await client.ask(words(rng), (image(rng, 448),), tokens)
        await client.ask(words(rng), (), tokens)
    return [await client.ask(words(rng), (image(rng, 448),), tokens), await client.ask(words(rng), (), tokens)]


def traces(file: Path) -> list[list[Span]]:
    """The spans of each trace in order of time, traces in order of their begin."""
    by_trace: dict[str, list[Span]] = defaultdict(list)
    for line in file.read_text().splitlines():
        span = json.loads(line)
        by_trace[span["trace_id"]].append(span)
    for spans in by_trace.values():
        spans.sort(key=lambda span: span["start_time"])
    return sorted(by_trace.values(), key=lambda spans: spans[0]["start_time"])


def stage(span: Span) -> str:
    return span["name"].partition(": prefill=")[0]


def print_table(title: str, spans: list[Span], timing: Timing) -> None:
    print(f"\n{title}: first token {timing.first * 1e3:.1f} ms, then {timing.per_token * 1e3:.2f} ms per token")
    print(f"{'stage':26} {'times':>6} {'total ms':>9} {'mean ms':>9}")
    took: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        took[stage(span)].append((span["end_time"] - span["start_time"]) / 1e6)
    for name, values in took.items():
        if name != "step_meta":
            print(f"{name:26} {len(values):6} {sum(values):9.2f} {np.mean(values):9.3f}")


def draw(axis, title: str, spans: list[Span], until_ms: float) -> None:
    """Each span as a bar over time, up to the first token."""
    zero = spans[0]["start_time"]
    shown = [span for span in spans if (span["start_time"] - zero) / 1e6 < until_ms and stage(span) != "step_meta"]
    for row, span in enumerate(shown):
        begin, end = ((span[key] - zero) / 1e6 for key in ("start_time", "end_time"))
        axis.barh(row, min(end, until_ms) - begin, left=begin)
    axis.set(title=title, xlabel="ms", yticks=range(len(shown)), yticklabels=[stage(span) for span in shown])
    axis.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("configs/models/digits-vl"))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("build/profile.png"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "spans.jsonl"
        changes = {
            "model": {"path": str(args.checkpoint.resolve()), "served_name": "digits-vl"},
            "telemetry": {"spans_file": str(file)},
        }
        ports = {key: str(free_port()) for key in ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT")}
        with Application("configs/laptop.yaml", changes, Path(name) / "log", SERVE_ENVIRONMENT | ports) as application:
            timings = asyncio.run(ask_both(application.url, args.tokens))
        asked = [spans for spans in traces(file) if any(span["name"] == "request" for span in spans)][-2:]
    figure, axes = plt.subplots(1, 2, figsize=(16, 6), layout="constrained")
    for axis, title, spans, timing in zip(axes, ("new 448x448 image", "text only"), asked, timings, strict=True):
        print_table(title, spans, timing)
        draw(axis, f"{title}: to the first token", spans, timing.first * 1e3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=80)
    print(f"\ndrawn in {args.out}")


if __name__ == "__main__":
    main()
