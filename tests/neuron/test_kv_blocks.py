"""KVBlocks: slots are written and read in place, the scratch block lies behind the real ones."""

from __future__ import annotations

from pathlib import Path

import torch

from neuron.kv_blocks import KVBlocks


def test_write_then_read() -> None:
    kv = KVBlocks(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=5)
    assert (kv.scratch_block, kv.scratch_slot) == (3, 12)
    assert kv.nbytes == 2 * 2 * 16 * 2 * 5 * 4
    buffer = kv.keys[1]
    keys, values = torch.randn(2, 3, 2, 5)
    slots = torch.tensor([11, 0, 6])
    kv.write(1, slots, keys, values)
    read_keys, read_values = kv.read(1, slots.flip(0))
    assert torch.equal(read_keys, keys.flip(0))
    assert torch.equal(read_values, values.flip(0))
    assert kv.keys[1] is buffer
    assert not kv.keys[0].any()
    assert not kv.keys[1][kv.scratch_slot :].any()


def test_blocks_take_memory_as_they_are_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    kv = KVBlocks(num_layers=2, num_blocks=4096, block_size=16, num_kv_heads=4, head_dim=64)
    assert resident() - before < kv.nbytes / 10
    keys = torch.ones(16, 4, 64)
    kv.write(0, torch.arange(16), keys, keys)
    assert resident() - before < kv.nbytes / 10
    assert torch.equal(kv.read(0, slice(0, 16))[0], keys)
    assert kv.read(0, slice(16, 32))[0].count_nonzero() == 0
    kv.keys[0].fill_(1.0)
    assert resident() - before > kv.nbytes / 5
