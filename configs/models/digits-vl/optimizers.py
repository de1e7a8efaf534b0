"""The optimizers of a training of several processes: Muon for matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

WEIGHT_DECAY = 0.05


class Optimizers:
    """Every process holds all weights; gradients are averaged; each process updates its share of the matrices.

    Muon's orthogonalization is a good part of a step at this size, so that sharing it out pays.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], lr: float) -> None:
        named = list(named)
        self.parameters = [p for _, p in named]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "head" not in name]
        taken = {id(p) for p in matrices}
        others = [p for p in self.parameters if id(p) not in taken]
        self.shares: list[list[torch.nn.Parameter]] = [[] for _ in range(dist.get_world_size())]
        for p in sorted(matrices, key=torch.numel, reverse=True):
            min(self.shares, key=lambda share: sum(map(torch.numel, share))).append(p)
        mine = self.shares[dist.get_rank()]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.all = [
            torch.optim.Muon(mine, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True),
        ]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)  # a batch without images leaves those of the vision encoder at zero

    def zero(self) -> None:
        for p in self.parameters:
            p.grad.zero_()

    def step(self, lr: float) -> None:
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        for rank, share in enumerate(self.shares):
            _in_one_message([p.data for p in share], lambda flat, rank=rank: dist.broadcast(flat, rank))

    def _average_gradients(self) -> None:
        def average(flat: torch.Tensor) -> None:
            dist.all_reduce(flat)
            flat /= dist.get_world_size()

        _in_one_message([p.grad for p in self.parameters], average)

    def state(self) -> list:
        """The state of every process, the same on all of them."""
        states: list = [None] * dist.get_world_size()
        dist.all_gather_object(states, [o.state_dict() for o in self.all])
        return states

    def load(self, states: list) -> None:
        for optimizer, state in zip(self.all, states[dist.get_rank()], strict=True):
            optimizer.load_state_dict(state)


def _in_one_message(tensors: list[torch.Tensor], exchange) -> None:
    """`exchange` the tensors as one flat one, in place."""
    flat = torch.cat([t.flatten() for t in tensors])
    exchange(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def learning_rate(step: int, steps: int, peak: float, last: float, warmup: int = 30) -> float:
    """Linear warm-up, then a cosine down to `last`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * done))
