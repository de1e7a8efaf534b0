"""Times of the collectives: `python benchmarks/collectives.py [--worlds 2 4 16] [--kinds shared_memory gloo]`.

Prints milliseconds per call, the median over the calls of the slowest rank, for both implementations.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from neuron.collectives import create_collectives

T = TypeVar("T")

SIZES = {"1 KB": 1024, "16 KB": 16 * 1024, "64 KB": 64 * 1024, "1.5 MB": 1536 * 1024}
OPERATIONS = ("all_reduce", "all_gather", "all_to_all")
SECONDS_PER_CASE = 1.0


def measure(kind: str, rank: int, world_size: int, rendezvous: str) -> dict[tuple[str, str], float]:
    """(operation, size) -> ms per call on this rank. `size`: of one rank's input."""
    torch.set_num_threads(1)
    collectives = create_collectives(kind, rank, world_size, rendezvous, 120.0)
    times = {}
    for name, size in SIZES.items():
        for operation in OPERATIONS:
            x = torch.ones(world_size, size // 4 // world_size)
            call = getattr(collectives, operation)
            begin = time.perf_counter()
            for _ in range(3):
                call(x)
            # The ranks agree on a number of calls.
            estimate = torch.tensor([(time.perf_counter() - begin) / 3])
            estimate = collectives.all_reduce(estimate) / world_size
            count = max(5, min(2000, int(SECONDS_PER_CASE / float(estimate))))
            laps = []
            for _ in range(count):
                begin = time.perf_counter()
                call(x)
                laps.append(time.perf_counter() - begin)
            times[operation, name] = statistics.median(laps) * 1e3
    collectives.close()
    return times


def in_processes(kind: str, world_size: int, target: Callable[..., T], *arguments: Any) -> list[T]:
    """What `target(kind, rank, world_size, rendezvous, *arguments)` returns in each rank's process."""
    if kind == "gloo":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    else:
        rendezvous = f"benchmark-{uuid.uuid4().hex}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(world_size) as pool:
        return pool.starmap(target, [(kind, rank, world_size, rendezvous, *arguments) for rank in range(world_size)], 1)


def run(kind: str, world_size: int) -> dict[tuple[str, str], float]:
    """The slowest rank's times."""
    results = in_processes(kind, world_size, measure)
    return {case: max(result[case] for result in results) for case in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--kinds", nargs="+", default=["shared_memory", "gloo"])
    arguments = parser.parse_args()
    print(f"ms per call, {os.cpu_count()} cores")
    print(f"{'':14} {'ranks':>5} {'':11}" + "".join(f"{size:>9}" for size in SIZES))
    for kind in arguments.kinds:
        for world_size in arguments.worlds:
            times = run(kind, world_size)
            for operation in OPERATIONS:
                cells = "".join(f"{times[operation, size]:9.3f}" for size in SIZES)
                print(f"{kind:14} {world_size:5} {operation:11}{cells}", flush=True)


if __name__ == "__main__":
    main()
