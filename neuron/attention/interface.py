"""The interface of attention: how queries read the keys and values of their own sequence, and of no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from neuron.kv_blocks import KVBlocks
    from neuron.models.interface import DecodeInputs, PrefillInputs


class ReadsBlocks(Protocol):
    """Attention over the KV blocks, for all layers of one step."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]; the step's own keys are in the blocks by then.

        Rows of padding are finite, whatever lies in slots that nobody owns.
        """


class ReadsPatches(Protocol):
    """Attention among the patches of each image in a block, for all layers."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each [P, heads, head_dim] -> [P, heads * head_dim]. Rows of padding are finite."""


class Attention(Protocol):
    """One implementation. Each method works out once what is the same in every layer."""

    def prefill(self, kv: KVBlocks, inputs: PrefillInputs) -> ReadsBlocks:
        """Causal: a token reads those of its sequence at its own position and before it."""

    def decode(self, kv: KVBlocks, inputs: DecodeInputs) -> ReadsBlocks:
        """Each row reads all `context_lens` tokens of its sequence."""

    def patches(self, segment_ids: Tensor, dtype: torch.dtype) -> ReadsPatches:
        """segment_ids [P]: ascending from 0, patches with the same one see each other; -1, at the end: padding."""
