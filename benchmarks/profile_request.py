"""Where the time of one request goes, from its spans and its client's clock: a table per stage, and a drawing.

    python benchmarks/profile_request.py --checkpoint configs/models/digits-vl --out build/profile.png

Requests with a new 448x448 image and with text only, one at a time after a warm-up, through `configs/laptop.yaml`.
Until the first token the stages follow each other without a gap, so that they add up to what the client waited; behind
it the table says what a token takes. Medians over the requests; the drawing is of the request in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.workloads import Client, Timing, image, words
from tests.support.application import Application, behind_haproxy

Span = dict[str, Any]
Stage = tuple[str, float]
"""(name, milliseconds)"""
IMAGE, TEXT = "new 448x448 image", "text only"


@dataclass
class Asked:
    """A request as its client saw it."""

    kind: str
    begin: int
    """Nanoseconds since 1970, the clock of the spans."""
    timing: Timing


async def ask(url: str, tokens: int, repeats: int) -> list[Asked]:
    rng = np.random.default_rng(0)
    asked = []
    async with Client(url, "digits-vl") as client:
        for number in range(repeats + 3):
            for kind, images in ((IMAGE, (image(rng, 448),)), (TEXT, ())):
                begin = time.time_ns()
                timing = await client.ask(words(rng), images, tokens)
                if number >= 3:
                    asked.append(Asked(kind, begin, timing))
    return asked


def traces(file: Path) -> list[list[Span]]:
    """The spans of each trace in order of time, traces in order of their begin."""
    by_trace: dict[str, list[Span]] = defaultdict(list)
    for line in file.read_text().splitlines():
        span = json.loads(line)
        by_trace[span["trace_id"]].append(span)
    for spans in by_trace.values():
        spans.sort(key=lambda span: span["start_time"])
    return sorted(by_trace.values(), key=lambda spans: spans[0]["start_time"])


def to_first_token(asked: Asked, spans: list[Span]) -> list[Stage]:
    """What the client waited for, one after the other. Where spans overlap, the later one counts."""
    named = defaultdict(list)
    for span in spans:
        named[span["name"]].append(span)
    (request,), (queue,), (prefill,) = named["request"], named["scheduler: queue"], named["scheduler: prefill"]
    steps = [span for span in named["step"] if span["end_time"] < prefill["end_time"]]
    last = steps[-1]["end_time"]
    marks = [("client and proxy", asked.begin), ("renderer: parse", request["start_time"])]
    for span in spans:
        begin, end = span["start_time"], span["end_time"]
        if span["name"].startswith(("render: ", "mm: ")) and end > begin:
            marks += [(span["name"], begin), ("renderer: other", end)]
        elif span["name"] in ("vit_forward", "forward", "sample") and end <= last:
            marks += [(span["name"], begin), ("step: other", end)]
    marks += [("step: other", step["start_time"]) for step in steps]
    marks += [("scheduler: queue", queue["start_time"]), ("engine to rank", prefill["start_time"])]
    marks += [("rank to engine", last), ("engine to client", prefill["end_time"])]
    sent = max(end for name, end in marks if name == "renderer: other" and end < queue["start_time"])
    marks = [("renderer to engine" if mark == ("renderer: other", sent) else mark[0], mark[1]) for mark in marks]
    marks.sort(key=lambda mark: mark[1])
    marks.append(("", asked.begin + int(1e9 * asked.timing.first)))
    return [(name, (end - begin) / 1e6) for (name, begin), (_, end) in pairwise(marks)]


def summed(stages: list[Stage]) -> dict[str, float]:
    took: dict[str, float] = defaultdict(float)
    for name, ms in stages:
        took[name] += ms
    return took


def per_token(asked: Asked, spans: list[Span]) -> dict[str, float]:
    """Milliseconds of a token behind the first."""
    (decode,) = [span for span in spans if span["name"] == "scheduler: decode"]
    inside = [span for span in spans if span["start_time"] >= decode["start_time"]]
    count = asked.timing.tokens - 1
    took = {"as the client sees it": 1e3 * asked.timing.per_token}
    took["in the engine"] = (decode["end_time"] - decode["start_time"]) / 1e6 / count
    for name in ("step", "prepare_mm_inputs", "forward", "sample"):
        took[f"  {name}"] = sum(span["end_time"] - span["start_time"] for span in inside if span["name"] == name) / 1e6
        took[f"  {name}"] /= count
    took["between steps"] = took["in the engine"] - took["  step"]
    return took


def print_table(title: str, rows: list[dict[str, float]]) -> None:
    print(f"\n{title}")
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, 0.0) for row in rows]
        print(f"  {name:24} {np.median(values):8.2f} ms   ({min(values):.2f} to {max(values):.2f})")


def draw(axis, title: str, stages: list[Stage]) -> None:
    """A row for each stage, in order of its begin."""
    rows = {name: row for row, name in enumerate(dict.fromkeys(name for name, _ in stages))}
    at = 0.0
    for name, ms in stages:
        axis.barh(rows[name], ms, left=at, color=f"C{rows[name] % 10}")
        at += ms
    for name, ms in summed(stages).items():
        axis.text(at * 1.01, rows[name], f"{ms:.1f}", va="center")
    axis.set(title=title, xlabel="ms", yticks=range(len(rows)), yticklabels=list(rows), xlim=(0, at * 1.1))
    axis.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("configs/models/digits-vl"))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("build/profile.png"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "spans.jsonl"
        changes = {
            "model": {"path": str(args.checkpoint.resolve()), "served_name": "digits-vl"},
            "telemetry": {"spans_file": str(file)},
        }
        with Application("configs/laptop.yaml", changes, Path(name) / "log", behind_haproxy()) as application:
            asked = asyncio.run(ask(application.url, args.tokens, args.repeats))
        recorded = [spans for spans in traces(file) if any(span["name"] == "request" for span in spans)][-len(asked) :]
    figure, axes = plt.subplots(1, 2, figsize=(16, 6), layout="constrained")
    for axis, kind in zip(axes, (IMAGE, TEXT), strict=True):
        pairs = [(each, spans) for each, spans in zip(asked, recorded, strict=True) if each.kind == kind]
        pairs.sort(key=lambda pair: pair[0].timing.first)
        stages = [to_first_token(*pair) for pair in pairs]
        firsts = [{"all of it": 1e3 * each.timing.first} for each, _ in pairs]
        print_table(
            f"{kind}: to the first token", [summed(one) | first for one, first in zip(stages, firsts, strict=True)]
        )
        print_table(f"{kind}: then per token", [per_token(*pair) for pair in pairs])
        draw(axis, f"{kind}: to the first token", stages[len(stages) // 2])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=80)
    print(f"\ndrawn in {args.out}")


if __name__ == "__main__":
    main()
