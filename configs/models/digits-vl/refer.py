"""The text model's lesson in reference: which image a token belongs to, or speaks of.

Labels for every token of an image and of an answer: from answers alone, guessing among several images stays as good as
anything for a long time.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from configs import dialogues
from encoding import IGNORE

LAYER = 1  # the layers behind it can look at the right image


class Refer(nn.Module):
    """The text model, and a linear reading of the output of its layer `LAYER`."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text
        self.head = nn.Linear(text.config.hidden_size, dialogues.MAX_IMAGES)
        self.hook = text.layers[LAYER].register_forward_hook(self._keep)

    def close(self) -> None:
        """Leave the text model as it was."""
        self.hook.remove()

    def _keep(self, _layer: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        self.hidden = output

    def loss(self, about: torch.Tensor) -> torch.Tensor:
        """Of the latest forward pass; about [B, L]."""
        known = about != IGNORE
        return cross_entropy(self.head(self.hidden[known]), about[known])
