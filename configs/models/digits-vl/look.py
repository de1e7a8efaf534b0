"""The vision encoder's own first lesson: what does each square of 32 pixels of a sheet full of digits show?

A label for every embedding teaches more per second than the few words of an answer: without this lesson, the model
needs several times as long to read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from configs import digits
from encoding import Encoder

PARTS = 1 + 5 * 10  # what a square may show, see `digits.sheet`
SIZES = ((128, 64), (192, 64), (256, 64), (128, 128), (192, 128), (256, 128), (320, 96), (224, 160))


class Look(nn.Module):
    """The vision encoder, and a linear reading of each of its outputs: the embeddings and those for deepstack."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        self.heads = nn.ModuleList(nn.Linear(width, PARTS) for _ in range(1 + len(visual.deepstack_visual_indexes)))

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Logits [squares, PARTS] of each output; pixels [patches, 1536], grids [images, 3]."""
        out = self.visual(pixels, grid_thw=grids)
        return [head(x) for head, x in zip(self.heads, (out.pooler_output, *out.deepstack_features), strict=True)]

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pixels, grids, shown = batch
        return sum(cross_entropy(logits, shown) for logits in self(pixels, grids))


def sheets(encode: Encoder, rng: np.random.Generator, patches: int, split: str = "train"):
    """Pixels, grids and labels [squares] of sheets of one random size, of about `patches` patches together."""
    size = SIZES[int(rng.integers(len(SIZES)))]
    number = max(1, patches * 16 * 16 // (size[0] * size[1]))
    drawn = [digits.sheet(size, rng, split) for _ in range(number)]
    processed = encode.processor(images=[image for image, _ in drawn])
    pixels, grids = (torch.from_numpy(np.asarray(processed[k])) for k in ("pixel_values", "image_grid_thw"))
    return pixels, grids, torch.from_numpy(np.concatenate([shown.reshape(-1) for _, shown in drawn]))


@torch.no_grad()
def share_read(look: Look, encode: Encoder) -> float:
    """Share of the inked squares of held-out sheets of which the embedding tells digit and part."""
    rng = np.random.default_rng(1)
    right = []
    for _ in range(16):
        pixels, grids, shown = sheets(encode, rng, 1000, "held_out")
        ink = shown > 0
        right.append((look(pixels, grids)[0].argmax(-1) == shown)[ink].float())
    return float(torch.cat(right).mean())
