"""The vision encoder's own lesson: what each square of 32 pixels shows, and where in a strip it stands.

Labels for every embedding teach more per second than the few words of an answer: without this lesson, the model needs
several times as long to read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from configs import digits
from encoding import Encoder

LABELS = {"shown": 1 + 5 * 10, "place": 1 + digits.MAX_DIGITS, "count": 1 + digits.MAX_DIGITS}  # see `digits.Squares`
SHEETS = ((128, 64), (192, 64), (256, 64), (128, 128), (192, 128), (256, 128), (320, 96), (224, 160))
STRIPS = tuple(
    [(w, h) for w, h in sizes if w % 32 == h % 32 == 0]
    for sizes in (digits.SMALL_SIZES, digits.MEDIUM_SIZES, digits.LARGE_SIZES)
)


@dataclass
class Seen:
    """pixels [patches, 1536], grids [images, 3], and the labels of `digits.Squares` by name [squares]."""

    pixels: torch.Tensor
    grids: torch.Tensor
    labels: dict[str, torch.Tensor]


class Look(nn.Module):
    """The vision encoder, and linear readings of each of its outputs: the embeddings and those for deepstack."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        outputs = 1 + len(visual.deepstack_visual_indexes)
        self.heads = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, size) for name, size in LABELS.items()}) for _ in range(outputs)
        )

    def forward(self, seen: Seen) -> list[dict[str, torch.Tensor]]:
        """Logits [squares, classes] by label, of each output."""
        out = self.visual(seen.pixels, grid_thw=seen.grids)
        outputs = (out.pooler_output, *out.deepstack_features)
        return [{name: head(x) for name, head in heads.items()} for heads, x in zip(self.heads, outputs, strict=True)]

    def loss(self, seen: Seen) -> torch.Tensor:
        """Places and counts are learned where there are any."""
        in_strip = seen.labels["place"] > 0
        total = torch.zeros(())
        for logits in self(seen):
            total = total + cross_entropy(logits["shown"], seen.labels["shown"])
            if in_strip.any():
                for name in ("place", "count"):
                    total = total + 0.5 * cross_entropy(logits[name][in_strip], seen.labels[name][in_strip])
        return total


def draw(encode: Encoder, rng: np.random.Generator, patches: int, split: str = "train") -> Seen:
    """Sheets and strips, about `patches` patches together, half of them of each kind; strips mostly small."""
    drawn: list[digits.Squares] = []
    left = patches / 2
    size = SHEETS[int(rng.integers(len(SHEETS)))]
    while left > 0:
        drawn.append(digits.sheet(size, rng, split))
        left -= size[0] * size[1] / 256
    sizes = STRIPS[int(rng.choice(len(STRIPS), p=(0.4, 0.35, 0.25)))]
    left = patches / 2
    while left > 0:
        size = sizes[int(rng.integers(len(sizes)))]
        drawn.append(digits.labelled_strip(size, rng, split))
        left -= size[0] * size[1] / 256
    processed = encode.processor(images=[each.image for each in drawn])
    pixels, grids = (torch.from_numpy(np.asarray(processed[key])) for key in ("pixel_values", "image_grid_thw"))
    labels = {
        name: torch.from_numpy(np.concatenate([getattr(each, name).reshape(-1) for each in drawn])) for name in LABELS
    }
    return Seen(pixels, grids, labels)


@torch.no_grad()
def share_read(look: Look, encode: Encoder, rounds: int) -> dict[str, float]:
    """Share of the held-out squares with ink of which the embedding tells each label."""
    rng = np.random.default_rng(1)
    right: dict[str, list[torch.Tensor]] = {name: [] for name in LABELS}
    for _ in range(rounds):
        seen = draw(encode, rng, 700, "held_out")
        logits = look(seen)[0]
        for name, label in seen.labels.items():
            ink = label > 0
            right[name].append((logits[name].argmax(-1) == label)[ink].float())
    return {name: float(torch.cat(hits).mean()) for name, hits in right.items()}
