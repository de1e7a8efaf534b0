"""The sampler as graphs of fixed shapes, for devices that hold the logits; `neuron.sampler` draws on the host.

The same distribution, in float32: a draw is the same function of logits, seed and position, but for rounding. Nothing
is sorted, as an accelerator's compiler may have no sort: edges of the order (likeliest first, then by token id) are
found by bisection.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuron.sampler import SamplingRow, changes_logits, is_greedy, logit_changes, uniform

Kind = Literal["sample_greedy", "sample", "sample_penalties"]
"""What rows need: their likeliest tokens; draws; draws with changed logits."""
_LARGE = 1e30
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_NEAREST = 2.0**-100
"""Distances below it count as none, so that bisection need not reach further."""


class SampleInputs(NamedTuple):
    """Of S rows, each [S]; padding is greedy."""

    greedy: Tensor
    """bool."""
    temperature: Tensor
    """float32; 1 where greedy."""
    top_k: Tensor
    """int32; the vocabulary's size where there is no limit."""
    top_p: Tensor
    """float32."""
    furthest: Tensor
    """float32: how far below the highest logit, over the temperature, min_p lets a token be; infinite without it."""
    uniform: Tensor
    """float32 in [0, 1), of the row's seed and position."""


class LogitChanges(NamedTuple):
    """What penalties and min_tokens do to the logits of S rows, each [S, H]; see `neuron.sampler.logit_changes`."""

    token_ids: Tensor
    """int64, no token twice in a row; padding: the vocabulary's size."""
    repetition: Tensor
    """float32."""
    subtract: Tensor
    """float32."""
    masked: Tensor
    """bool."""


class SampleCall(NamedTuple):
    """What to run for a step's rows: a kind of graph, and its inputs beside the logits."""

    kind: Kind
    inputs: tuple[SampleInputs | LogitChanges, ...]


def prepare(rows: Sequence[SamplingRow], size: int, vocab: int, num_changes: int) -> SampleCall | None:
    """The call for `rows`, padded to `size`. None: a row changes more than `num_changes` logits."""
    changing = [changes_logits(row) for row in rows]
    if not any(changing) and all(is_greedy(row) for row in rows):
        return SampleCall("sample_greedy", ())
    inputs = empty_inputs(size, vocab)
    for index, row in enumerate(rows):
        params = row.params
        if is_greedy(row):
            continue
        inputs.greedy[index] = False
        inputs.temperature[index] = params.temperature
        inputs.top_k[index] = min(params.top_k, vocab) or vocab
        inputs.top_p[index] = params.top_p
        if params.min_p > 0:
            inputs.furthest[index] = max(0.0, -float(np.log(params.min_p)))
        inputs.uniform[index] = min(uniform(params.seed, row.position), _BELOW_ONE)
    if not any(changing):
        return SampleCall("sample", (inputs,))
    changes = empty_changes(size, vocab, num_changes)
    for index, row in enumerate(rows):
        if not changing[index]:
            continue
        token_ids, repetition, subtract, masked = logit_changes(row, vocab)
        count = len(token_ids)
        if count > num_changes:
            return None
        changes.token_ids[index, :count] = torch.from_numpy(token_ids)
        changes.repetition[index, :count] = _float32(np.clip(repetition, 1 / _LARGE, _LARGE))
        changes.subtract[index, :count] = _float32(subtract)
        changes.masked[index, :count] = torch.from_numpy(masked)
    return SampleCall("sample_penalties", (inputs, changes))


def empty_inputs(size: int, vocab: int) -> SampleInputs:
    """All padding."""
    return SampleInputs(
        greedy=torch.ones(size, dtype=torch.bool),
        temperature=torch.ones(size),
        top_k=torch.full((size,), vocab, dtype=torch.int32),
        top_p=torch.ones(size),
        furthest=torch.full((size,), float("inf")),
        uniform=torch.zeros(size),
    )


def empty_changes(size: int, vocab: int, num_changes: int) -> LogitChanges:
    """All padding."""
    shape = (size, num_changes)
    return LogitChanges(
        token_ids=torch.full(shape, vocab, dtype=torch.int64),
        repetition=torch.ones(shape),
        subtract=torch.zeros(shape),
        masked=torch.zeros(shape, dtype=torch.bool),
    )


def _float32(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def sample_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [S, vocab] float32 -> the likeliest token of each row [S] int64, of equal ones the lowest id; and whether
    all of the row's logits are finite [S] bool."""
    return _likeliest(logits)[0].long(), torch.isfinite(logits).all(dim=1)


def sample(logits: Tensor, inputs: SampleInputs, changes: LogitChanges | None = None) -> tuple[Tensor, Tensor]:
    """logits [S, vocab] float32 -> tokens [S] int64, and whether each row could be sampled [S] bool: its logits are
    finite and not all masked."""
    usable = torch.isfinite(logits).all(dim=1)
    if changes is not None:
        logits = _changed(logits, changes)
    likeliest, highest = _likeliest(logits)
    usable = usable & (highest[:, 0] > -torch.inf)
    drawn = _draw((highest - logits) / inputs.temperature[:, None], inputs)
    return torch.where(inputs.greedy, likeliest, drawn).long(), usable


GRAPHS: dict[Kind, Callable[..., tuple[Tensor, Tensor]]] = {
    "sample_greedy": sample_greedy,
    "sample": sample,
    "sample_penalties": sample,
}


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest id of the highest logit [S] int32, and that logit [S, 1]."""
    vocab = logits.shape[1]
    highest = logits.amax(dim=1, keepdim=True)
    # No argmax: which of equal ones it takes differs between devices.
    token_ids = torch.where(logits == highest, _token_ids(logits), vocab - 1)
    return token_ids.amin(dim=1), highest


def _token_ids(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)


def _changed(logits: Tensor, changes: LogitChanges) -> Tensor:
    """A copy of the logits with penalties and masks."""
    padded = torch.cat((logits, logits.new_zeros(logits.shape[0], 1)), dim=1)  # where padding reads and writes
    values = padded.gather(1, changes.token_ids)
    values = torch.where(values > 0, values / changes.repetition, values * changes.repetition)
    values = values.clamp(-_LARGE, _LARGE) - changes.subtract
    values = torch.where(changes.masked, -torch.inf, values)
    return padded.scatter(1, changes.token_ids, values)[:, : logits.shape[1]]


def _draw(distance: Tensor, inputs: SampleInputs) -> Tensor:
    """A token of each row [S] int32. distance [S, vocab]: how far below the likeliest token, at least 0."""
    distance = torch.where(distance < _NEAREST, 0.0, distance)
    weights = torch.exp(-distance)
    kept = (distance <= inputs.furthest[:, None]) & (distance < torch.inf)

    def mass(mask: Tensor) -> Tensor:
        return torch.where(mask, weights, 0.0).sum(dim=1, keepdim=True)

    wanted = inputs.top_k[:, None]
    below, tie = _edge(distance, kept, lambda reached: _count(reached) >= wanted)
    kept = torch.where(_count(kept) > wanted, below | _first(tie, wanted - _count(below)), kept)

    top_p = inputs.top_p[:, None]
    limit = top_p * mass(kept)
    below, tie = _edge(distance, kept, lambda reached: mass(reached) >= limit)
    # A token stays while those before it have not reached the limit.
    wanted = torch.ceil((limit - mass(below)) / _each(weights, tie)).clamp(1.0, float(distance.shape[1]))
    kept = torch.where(top_p < 1, below | _first(tie, wanted.to(torch.int32)), kept)

    target = inputs.uniform[:, None] * mass(kept)
    below, tie = _edge(distance, kept, lambda reached: mass(reached) > target)
    before = torch.floor((target - mass(below)) / _each(weights, tie)).clamp(0.0, float(distance.shape[1]))
    wanted = torch.minimum(before.to(torch.int32) + 1, _count(tie))
    return torch.where(_first(tie, wanted), _token_ids(distance), -1).amax(dim=1)


def _each(weights: Tensor, tie: Tensor) -> Tensor:
    """The weight [S, 1] that the tokens of a tie have."""
    each = torch.where(tie, weights, 0.0).amax(dim=1, keepdim=True)
    return torch.where(each > 0, each, 1.0)


def _edge(distance: Tensor, kept: Tensor, holds: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Where the kept tokens, likeliest first, come to hold: those before and the tie [S, vocab] with which they do.

    holds: of a mask of tokens, [S, 1]; monotone. Where it never does, as rounding may have it, the tie is the last one.
    """

    def reaches(trial: Tensor) -> Tensor:
        return holds(kept & (distance <= trial))

    nothing = torch.zeros_like(distance[:, :1])
    # The largest float32 that does not reach: its exponent, then its mantissa.
    short = nothing + _NEAREST
    for exponent in (128, 64, 32, 16, 8, 4, 2, 1):
        trial = short * 2.0**exponent if exponent < 128 else short * 2.0**64 * 2.0**64
        short = torch.where(reaches(trial), short, trial)
    step = short
    for _ in range(23):
        step = step * 0.5
        short = torch.where(reaches(short + step), short, short + step)
    last = torch.where(kept, distance, 0.0).amax(dim=1, keepdim=True)
    beyond = torch.where(kept & (distance > short), distance, torch.inf).amin(dim=1, keepdim=True)
    edge = torch.minimum(torch.where(reaches(nothing), 0.0, beyond), last)
    return kept & (distance < edge), kept & (distance == edge)


def _first(mask: Tensor, wanted: Tensor) -> Tensor:
    """The first `wanted` [S, 1] tokens of mask [S, vocab], by id."""
    token_ids = _token_ids(mask)
    last = torch.zeros_like(wanted)
    for bit in reversed(range(max(1, (mask.shape[1] - 1).bit_length()))):
        enough = _count(mask & (token_ids < last + (1 << bit))) >= wanted
        last = torch.where(enough, last, last + (1 << bit))
    return mask & (token_ids <= last) & (wanted > 0)


def _count(mask: Tensor) -> Tensor:
    """[S, 1] int32."""
    return mask.sum(dim=1, keepdim=True, dtype=torch.int32)
