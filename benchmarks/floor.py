"""The floor under the time of an output token: every weight that a decode step needs, read once as a bare product.

    python benchmarks/floor.py configs/models/digits-vl build/large-vl

Matrix times vector in fp32 on two threads, over the text model's matrices and the output head; milliseconds, the median
and the best of many rounds. `make bench` measures what a token really takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from safetensors import safe_open


def matrices(checkpoint: Path) -> list[torch.Tensor]:
    """The text model's, in fp32, and the output head: the embeddings where these are tied."""
    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # the file is no mapping and cannot be iterated
                if "visual" not in name and len(weights.get_slice(name).get_shape()) == 2:
                    found[name] = weights.get_tensor(name).float().contiguous()
    embeddings = [name for name in found if "embed_tokens" in name]
    if any("lm_head" in name for name in found):
        for name in embeddings:
            del found[name]
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for checkpoint in args.checkpoints:
        weights = matrices(checkpoint)
        inputs = {size: torch.ones(size) for size in {matrix.shape[1] for matrix in weights}}
        laps = []
        for _ in range(args.rounds):
            begin = time.perf_counter()
            for matrix in weights:
                torch.mv(matrix, inputs[matrix.shape[1]])
            laps.append(1e3 * (time.perf_counter() - begin))
        count = sum(matrix.numel() for matrix in weights)
        print(
            f"{checkpoint.name}: {count / 1e6:.1f} M weights in {len(weights)} matrices, "
            f"{statistics.median(laps):.2f} ms (best {min(laps):.2f})"
        )


if __name__ == "__main__":
    main()
