"""Measure engines one after the other on the same requests, and compare them.

    python benchmarks/bench.py --checkpoint configs/models/digits-vl --peer "vllm_cpu.sh serve {checkpoint} {port}"
    python benchmarks/bench.py --url other=http://127.0.0.1:9000

Every round starts each engine alone, warms it, asks it everything in `workloads.py` and stops it, in alternating order.
Writes a table, the raw samples and a plot into `--out`. A ratio above 1 is in this project's favour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import engines
from benchmarks.workloads import UNITS, Samples, measure

MORE_IS_BETTER = ("tokens/s", "1/s")
OURS = "ours"
Starter = Callable[[Path], AbstractContextManager[engines.Running]]
"""An engine, given the file for its log."""


def engines_of(args: argparse.Namespace) -> dict[str, Starter]:
    starters: dict[str, Starter] = {}
    if not args.skip_ours:
        starters[OURS] = partial(engines.ours, args.checkpoint.resolve(), max_model_len=args.max_model_len)
    if args.peer:
        starters["peer"] = partial(engines.peer, args.peer, args.checkpoint.resolve())
    for given in args.url:
        name, _, url = given.partition("=")
        starters[name] = lambda _log, url=url: engines.at_url(url.rstrip("/").removesuffix("/v1"))
    return starters


def one_round(starter: Starter, log: Path, seed: int, args: argparse.Namespace) -> Samples:
    with starter(log) as running:
        memory = engines.memory_of(running.pid) if running.pid is not None else 0
        samples = asyncio.run(measure(running.url, running.model, seed, args.repeats, args.thirty_images))
        if running.start_seconds is not None:
            samples["start to ready"].append(running.start_seconds)
        if running.pid is not None:
            samples["memory"].append(memory / 1e6)
            samples["memory after it all"].append(engines.memory_of(running.pid) / 1e6)
    return samples


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def ratio(name: str, mine: list[float], theirs: list[float]) -> float:
    value = statistics.median(theirs) / statistics.median(mine)
    return 1 / value if UNITS[name] in MORE_IS_BETTER else value


def table(results: dict[str, Samples]) -> str:
    others = [name for name in results if name != OURS] if OURS in results else []
    heads = ["", "unit", *results, *(f"{name} : {OURS}" for name in others)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, unit in UNITS.items():
        if not any(name in samples for samples in results.values()):
            continue
        cells = [spread(samples[name]) if name in samples else "" for samples in results.values()]
        for other in others:
            both = name in results[OURS] and name in results[other]
            cells.append(f"{ratio(name, results[OURS][name], results[other][name]):.2f}" if both else "")
        lines.append("| " + " | ".join([name, unit, *cells]) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Samples], file: Path) -> None:
    names = [name for name in UNITS if any(name in samples for samples in results.values())]
    columns = 4
    figure, axes = plt.subplots(-(-len(names) // columns), columns, figsize=(16, 11), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        for position, (engine, samples) in enumerate(results.items()):
            if name in samples:
                axis.bar(position, statistics.median(samples[name]), label=engine, alpha=0.6)
                axis.scatter([position] * len(samples[name]), samples[name], s=12, color="black")
        axis.set(title=f"{name} ({UNITS[name]})", xticks=range(len(results)), xticklabels=list(results))
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("configs/models/digits-vl"))
    parser.add_argument("--peer", help="command that serves {checkpoint} on 127.0.0.1:{port}")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument("--skip-ours", action="store_true", help="measure the others only")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each engine")
    parser.add_argument("--repeats", type=int, default=9, help="of the single requests, per round")
    parser.add_argument("--thirty-images", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    starters = engines_of(args)
    if not starters:
        parser.error("nothing to measure: give --peer or --url, or leave --skip-ours out")
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Samples] = {name: defaultdict(list) for name in starters}
    for number in range(args.rounds):
        for name in list(starters)[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            log = args.out / f"{name}-{number}.log"
            for metric, values in one_round(starters[name], log, number, args).items():
                results[name][metric] += values
    (args.out / "samples.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "table.md").write_text(table(results) + "\n")
    plot(results, args.out / "bench.png")
    print(table(results))


if __name__ == "__main__":
    main()
