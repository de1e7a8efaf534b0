"""Every implementation of attention against plain softmax over a sequence's own tokens, with NaN in all other slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from neuron.attention import ATTENTION, load_attention
from neuron.attention.interface import Attention
from neuron.kv_blocks import KVBlocks
from neuron.models.interface import DecodeInputs, PrefillInputs
from tests.support.kernels import marks_of

BLOCK, BLOCKS, KV_HEADS, GROUP, LAYERS = 4, 240, 2, 3, 2
HEADS = KV_HEADS * GROUP


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in ATTENTION])
def attention(request: pytest.FixtureRequest) -> Attention:
    return load_attention(request.param)


@pytest.fixture
def tolerance(attention: Attention) -> float:
    """`amx` keeps 16 bits of mantissa: a score's error is up to 2^-16 of the sum of |q| * |k|, about 5 here."""
    return 1e-4 if attention is load_attention("amx") else 1e-5


@pytest.fixture(params=[8, 32, 48, 64], ids="head_dim={}".format)
def head_dim(request: pytest.FixtureRequest) -> int:
    """8 is left to torch by the kernel, and 48 no multiple of its tiles."""
    size: int = request.param
    return size


def block_tables(rng: np.random.Generator, lengths: list[int], scattered: bool) -> list[np.ndarray]:
    blocks = rng.permutation(BLOCKS) if scattered else np.arange(BLOCKS)
    stops = np.cumsum([-(-length // BLOCK) for length in lengths])
    return np.split(blocks[: stops[-1]], stops[:-1])


def slots_of(blocks: np.ndarray, length: int) -> np.ndarray:
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:length]


def filled(slots: list[np.ndarray], head_dim: int) -> KVBlocks:
    """Random keys and values at the slots, NaN everywhere else."""
    kv = KVBlocks(LAYERS, BLOCKS, BLOCK, KV_HEADS, head_dim)
    for buffer in (*kv.keys, *kv.values):
        buffer.fill_(float("nan"))
        for each in slots:
            buffer[each] = torch.randn(len(each), KV_HEADS, head_dim)
    return kv


def plain(kv: KVBlocks, layer: int, slots: np.ndarray, q: Tensor) -> Tensor:
    """q [heads, head_dim], the last of the tokens at `slots`."""
    k, v = (buffer[layer][slots].repeat_interleave(len(q) // KV_HEADS, dim=1) for buffer in (kv.keys, kv.values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("ht,thd->hd", weights, v).flatten()


@pytest.mark.parametrize("scattered", [False, True])
def test_prefill(attention: Attention, scattered: bool, head_dim: int, tolerance: float) -> None:
    """A prompt, one token behind a prefix, chunks behind a short and a long one, a single token, and padding."""
    torch.manual_seed(0)
    chunks = [(9, 9), (1, 6), (5, 17), (1, 1), (70, 700)]  # tokens now, tokens in all
    tables = block_tables(np.random.default_rng(0), [total for _, total in chunks], scattered)
    slots = [slots_of(table, total) for table, (_, total) in zip(tables, chunks, strict=True)]
    kv = filled(slots, head_dim)
    rows, context = 90, 750
    arrays = {
        "token_ids": np.zeros(rows, np.int64),
        "rope_positions": np.zeros((3, rows), np.int64),
        "slot_mapping": padded([s[-n:] for s, (n, _) in zip(slots, chunks, strict=True)], rows, kv.scratch_slot),
        "query_seq": padded([np.full(n, i) for i, (n, _) in enumerate(chunks)], rows, -1),
        "query_pos": padded([np.arange(total - n, total) for n, total in chunks], rows, 0),
        "context_slots": padded(slots, context, kv.scratch_slot),
        "context_seq": padded([np.full(total, i) for i, (_, total) in enumerate(chunks)], context, -1),
        "context_pos": padded([np.arange(total) for _, total in chunks], context, 0),
        "logits_index": np.zeros(1, np.int64),
    }
    read = attention.prefill(kv, PrefillInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()}))
    q = torch.randn(rows, HEADS, head_dim)
    for layer in range(LAYERS):
        got = read(layer, q)
        assert got.shape == (rows, HEADS * head_dim)
        assert got.isfinite().all()
        row = 0
        for (count, total), own in zip(chunks, slots, strict=True):
            for length in range(total - count + 1, total + 1):
                torch.testing.assert_close(got[row], plain(kv, layer, own[:length], q[row]), atol=tolerance, rtol=0)
                row += 1


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("lengths", "group"),
    [([7, 1, 16, 13], GROUP), ([5, 0, 9], GROUP), ([0], GROUP), ([7, 20], 1), ([7, 20], 20), ([7, 20], 40)],
    ids=str,
)
def test_decode(
    attention: Attention, lengths: list[int], group: int, scattered: bool, head_dim: int, tolerance: float
) -> None:
    """Sequences, with padding behind them, and between them; few and many query heads for each of keys and values."""
    torch.manual_seed(1)
    tables = block_tables(np.random.default_rng(1), lengths, scattered)
    slots = [slots_of(table, length) for table, length in zip(tables, lengths, strict=True)]
    kv = filled(slots, head_dim)
    rows = len(lengths) + 2
    inputs = DecodeInputs(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        rope_positions=torch.zeros(3, rows, dtype=torch.int64),
        slot_mapping=torch.from_numpy(padded([own[-1:] for own in slots], rows, kv.scratch_slot)),
        block_tables=torch.from_numpy(
            np.stack([padded([table], 6, BLOCKS - 1) for table in [*tables, np.zeros(0), np.zeros(0)]])
        ),
        context_lens=torch.tensor([*lengths, 0, 0]),
    )
    for buffer in (*kv.keys, *kv.values):
        buffer[kv.scratch_slot] = 0.0  # as the graph has just written it for padding
    read = attention.decode(kv, inputs)
    heads = KV_HEADS * group
    q = torch.randn(rows, heads, head_dim)
    for layer in range(LAYERS):
        got = read(layer, q)
        assert got.shape == (rows, heads * head_dim)
        assert got.isfinite().all()
        for row, own in enumerate(slots):
            if not len(own):
                continue  # padding
            torch.testing.assert_close(got[row], plain(kv, layer, own, q[row]), atol=tolerance, rtol=0)


def test_patches(attention: Attention, head_dim: int, tolerance: float) -> None:
    torch.manual_seed(2)
    segments, start = [6, 1, 9], 0
    rows = sum(segments) + 4
    ids = padded([np.full(count, i) for i, count in enumerate(segments)], rows, -1)
    q, k, v = (torch.randn(rows, HEADS, head_dim) for _ in range(3))
    got = attention.patches(torch.from_numpy(ids), torch.float32)(q, k, v)
    assert got.shape == (rows, HEADS * head_dim)
    assert got.isfinite().all()
    for count in segments:
        own = slice(start, start + count)
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", q[own], k[own]) / q.shape[-1] ** 0.5, dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[own]).flatten(1)
        torch.testing.assert_close(got[own], expected, atol=tolerance, rtol=0)
        start += count


def padded(parts: list[np.ndarray], size: int, padding: int) -> np.ndarray:
    whole = np.full(size, padding, np.int64)
    joined = np.concatenate(parts)
    whole[: len(joined)] = joined
    return whole
