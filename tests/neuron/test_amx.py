"""The kernels for AMX against the same in float64, and what holds of them beside: rows and threads change no bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron.kernels import choose_kernels, load_kernels
from neuron.kv_blocks import KVBlocks
from neuron.ops import load_ops
from neuron.ops.before import Gelu, LayerNorm, RmsNorm, SwiGlu
from neuron.ops.interface import Linear, Ops
from tests.support.kernels import amx_error, marks_of

INPUTS = 96
HALVES = 2.0**-16
"""Relative error of a product of two values that keep 16 bits of mantissa each, at most, with what is left out."""

pytestmark = marks_of("amx")


@pytest.fixture(params=[1, 2], ids="threads={}".format)
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load_ops("amx")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids="weights={}".format)
def of_dtype(request: pytest.FixtureRequest):
    """Makes a float32 weight one of a checkpoint in that dtype."""
    return lambda weight: weight.to(request.param).float()


def before_of(name: str) -> nn.Module | None:
    torch.manual_seed(1)
    return {
        "nothing": lambda: None,
        "rms_norm": lambda: RmsNorm(torch.randn(INPUTS), 1e-6),
        "layer_norm": lambda: LayerNorm(torch.randn(INPUTS), torch.randn(INPUTS), 1e-6),
        "gelu_tanh": lambda: Gelu("tanh"),
        "gelu": lambda: Gelu("none"),
        "swiglu": SwiGlu,
    }[name]()


BEFORE = ["nothing", "rms_norm", "layer_norm", "gelu_tanh", "gelu", "swiglu"]


def example(rows: int, before: str, outputs: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, residual."""
    torch.manual_seed(rows)
    x = 3 * torch.randn(rows, INPUTS * (2 if before == "swiglu" else 1)) + 0.5
    return x, torch.randn(outputs, INPUTS), torch.randn(outputs), torch.randn(rows, outputs)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, before: str) -> tuple[Tensor, Tensor]:
    """In float64: the map, and the sum of the products' sizes, which bounds its error."""
    made = before_of(before)
    x = x.double() if made is None else made.double()(x.double())
    y, sizes = F.linear(x, weight.double()), F.linear(x.abs(), weight.double().abs())
    return y if bias is None else y + bias.double(), sizes


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33, 64, 100])
def test_linear(ops: Ops, threads: int, of_dtype: Callable[[Tensor], Tensor], rows: int, before: str) -> None:
    x, weight, bias, residual = example(rows, before)
    weight = of_dtype(weight)
    linear = ops.linear(weight, bias, before_of(before))
    y, sizes = expected(x, weight, bias, before)
    assert ((linear(x) - y).abs() <= HALVES * (sizes + y.abs())).all()
    y = y + residual.double()
    assert ((linear(x, residual) - y).abs() <= HALVES * (sizes + y.abs())).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (512, 5120), (2560, 512), (32, 4096), (4096, 32)])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_linear_of_every_shape(
    ops: Ops, threads: int, of_dtype: Callable[[Tensor], Tensor], rows: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(rows, inputs), of_dtype(torch.randn(outputs, inputs))
    y, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert ((ops.linear(weight)(x) - y).abs() <= HALVES * sizes).all()


def test_weights_of_a_bfloat16_checkpoint_take_two_bytes(ops: Ops) -> None:
    """One value that is none is enough for all to have low halves."""
    weight = torch.randn(64, INPUTS).bfloat16().float()
    assert bytes_of(ops.linear(weight)) == 2 * weight.numel()
    weight[-1, -1] = 1 + 2.0**-12
    assert bytes_of(ops.linear(weight)) == 4 * weight.numel()


def bytes_of(linear: Linear) -> int:
    assert isinstance(linear, nn.Module)
    return sum(buffer.nbytes for buffer in linear.buffers())


def test_a_rows_result_depends_on_no_other_row(ops: Ops, threads: int, of_dtype: Callable[[Tensor], Tensor]) -> None:
    """Not a bit of it: whether it is computed alone, with some, or with many."""
    x, weight, bias, _ = example(200, "rms_norm")
    linear = ops.linear(of_dtype(weight), bias, before_of("rms_norm"))
    whole = linear(x)
    for rows in (1, 5, 16, 17, 40):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


def test_nan_stays_in_its_row(ops: Ops, threads: int) -> None:
    x, weight, bias, residual = example(40, "layer_norm")
    linear = ops.linear(weight, bias, before_of("layer_norm"))
    x[[3, 39]] = float("nan")
    y = linear(x, residual)
    assert y[[3, 39]].isnan().all()
    others = [row for row in range(40) if row not in (3, 39)]
    assert y[others].isfinite().all()


def test_values_of_every_size(ops: Ops, threads: int) -> None:
    """From the smallest normal numbers, whose low halves are none, to large ones."""
    torch.manual_seed(3)
    x = torch.randn(20, INPUTS) * torch.logspace(-37, 30, 20, dtype=torch.float64).float()[:, None]
    weight = torch.randn(64, INPUTS)
    y, sizes = expected(x, weight, None, "nothing")
    smallest = torch.finfo(torch.float32).tiny
    # A low half below the smallest number is 0, and such a sum is.
    assert ((ops.linear(weight)(x) - y).abs() <= HALVES * sizes + 4 * INPUTS * smallest).all()


def test_sides_that_tiles_do_not_divide_are_torchs(ops: Ops) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(5, 40), torch.randn(24, 40)
    assert torch.equal(ops.linear(weight)(x), load_ops("plain").linear(weight)(x))


@pytest.mark.parametrize("head_dim", [24, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 3, 400])
def test_rotate_and_store(ops: Ops, threads: int, rows: int, head_dim: int) -> None:
    """As torch does it: queries, and the slots of one layer, and of no other slot."""
    torch.manual_seed(5)
    heads, kv_heads, slots = 6, 2, torch.randperm(500)[:rows]
    norm = RmsNorm(torch.randn(heads + kv_heads, head_dim), 1e-6)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    cos, sin = torch.randn(2, rows, 1, head_dim)
    results = []
    for each in (ops, load_ops("plain")):
        kv = KVBlocks(2, 31, 16, kv_heads, head_dim)
        q = each.rotate_and_store(qkv.clone(), norm, cos, sin, kv, 1, slots)
        assert q.shape == (rows, heads, head_dim)
        results.append((q, kv))
    (q, kv), (plain_q, plain_kv) = results
    torch.testing.assert_close(q, plain_q, atol=1e-5, rtol=1e-5)
    for got, wanted in ((kv.keys, plain_kv.keys), (kv.values, plain_kv.values)):
        torch.testing.assert_close(got[1], wanted[1], atol=1e-5, rtol=1e-5)
        assert not got[0].any(), "another layer's"
    assert torch.equal(kv.values[1], plain_kv.values[1])


@pytest.mark.parametrize("head_dim", [24, 32, 64])
def test_rotate(ops: Ops, threads: int, head_dim: int) -> None:
    torch.manual_seed(6)
    qkv = torch.randn(300, 3, 4, head_dim)
    cos, sin = torch.randn(2, 300, 1, head_dim)
    wanted = load_ops("plain").rotate(qkv.clone(), cos, sin)
    for got, each in zip(ops.rotate(qkv, cos, sin), wanted, strict=True):
        torch.testing.assert_close(got, each, atol=1e-5, rtol=1e-5)


def test_the_kernels_are_chosen_by_precision_and_dtype() -> None:
    assert amx_error() is None, "built where the CPU has AMX"
    amx, exact = load_kernels("amx"), load_kernels("per_sequence")
    assert choose_kernels("per_sequence", "amx", "float32", "high") == amx
    assert choose_kernels("per_sequence", "amx", "float32", "highest") == exact
    assert choose_kernels("per_sequence", "amx", "bfloat16", "high") == exact
    assert choose_kernels("masked", None, "float32", "high") == load_kernels("masked")
