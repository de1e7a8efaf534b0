"""Draw the example images of this folder from held-out scans: `python examples/make.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import digits

IMAGES = {
    "digit-7.png": ([7], (64, 64)),
    "digits-26.png": ([2, 6], (128, 64)),
    "digits-3141.png": ([3, 1, 4, 1], (448, 448)),
    "digits-59.png": ([5, 9], (448, 448)),
    "digits-808.png": ([8, 0, 8], (224, 224)),
    "digits-271828.png": ([2, 7, 1, 8, 2, 8], (896, 448)),
}


def main() -> None:
    for seed, (name, (labels, size)) in enumerate(IMAGES.items()):
        rng = np.random.default_rng(seed)
        image = digits.strip(digits.scans_of(labels, rng), size, rng)
        image.save(Path(__file__).parent / name)


if __name__ == "__main__":
    main()
