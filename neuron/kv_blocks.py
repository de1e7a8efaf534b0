"""KVBlocks: the keys and values of one rank, in preallocated blocks addressed by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from neuron.untouched_memory import zeros

Slots = Tensor | slice
"""Indices of slots, or a range of them."""


class KVBlocks:
    """For each layer, keys and values of `num_blocks` blocks of `block_size` tokens, and a scratch block behind them.

    A slot is block * block_size + offset in the block. The scratch block absorbs what padding writes and is never read
    by a real token. The tensors live as long as the object: graphs write them in place.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """num_kv_heads: those of this rank. num_blocks: without the scratch block."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = ((num_blocks + 1) * block_size, num_kv_heads, head_dim)
        self.keys: list[Tensor] = [zeros(shape, dtype, device) for _ in range(num_layers)]
        """Of each layer, [slots, kv heads, head_dim]."""
        self.values: list[Tensor] = [zeros(shape, dtype, device) for _ in range(num_layers)]
        """As `keys`."""

    @property
    def scratch_block(self) -> int:
        return self.num_blocks

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, kv heads, head_dim] at slots [tokens], in place."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv heads, head_dim] at slots [tokens]; of a range, the buffers' own memory."""
        if isinstance(slots, slice):
            return self.keys[layer][slots], self.values[layer][slots]
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)
