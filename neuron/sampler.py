"""Draws tokens from logits.

The order of the steps is vLLM's: min_tokens, penalties, temperature, min_p, top_k, top_p, draw. A row's result depends
on that row alone: the draw is a function of (seed, position), and every sum runs within the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy."""
_HEADS = (64, 1024, 16384)
"""Candidates that are sorted first; more only if the draw or top_p reaches beyond them."""
_WORD = 2**64 - 1
_LARGE = 1e300


class SamplerError(ValueError):
    """A row that cannot be sampled. row: its index; -1 where the call itself is at fault."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}" if row >= 0 else reason)
        self.row = row


class SamplingSettings(Protocol):
    """What the sampler reads of `actors.messages.SamplingParams`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logprobs(self) -> int | None: ...


def _no_tokens() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """One row's request. The token arrays are int64 [n]; ids outside the vocabulary count for nothing."""

    params: SamplingSettings
    position: int
    """Of the token to draw, counted so that a recomputed request counts the same."""
    prompt_token_ids: IntArray = field(default_factory=_no_tokens)
    """Read with a repetition penalty only."""
    output_token_ids: IntArray = field(default_factory=_no_tokens)
    """All tokens generated so far. Read with penalties and min_tokens only."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token. Log probabilities are natural and raw: before penalties, temperature and filters."""

    token_id: int
    logprob: float
    """0.0 where `logprobs` is None: not computed, as over a large vocabulary it costs more than a greedy draw."""
    top: tuple[tuple[int, float], ...] = ()
    """The `logprobs` likeliest (token id, log probability), likeliest first, equal ones by token id."""


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw one token per row.

    logits: float32 [S, vocab] on the CPU, not changed. rows: S of them.
    Raises SamplerError for a row with NaN or infinite logits, or with every token masked.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        raise SamplerError(-1, f"logits of shape {tuple(logits.shape)}: expected [{len(rows)}, vocab]")
    if logits.dtype != torch.float32:
        raise SamplerError(-1, f"logits of {logits.dtype}: expected torch.float32")
    if not rows:
        return []
    raw = logits.detach().contiguous().numpy()
    # argmax takes the first of equal ones, and a NaN before anything else.
    likeliest = raw.argmax(axis=1)
    highest = raw[np.arange(len(rows)), likeliest]
    _check_finite(raw, highest)
    if all(is_greedy(row) and not changes_logits(row) for row in rows):
        tokens = [int(token) for token in likeliest]
    else:
        tokens = [_draw(index, raw[index], row) for index, row in enumerate(rows)]
    return with_logprobs(tokens, logits, rows)


def with_logprobs(tokens: Sequence[int], logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Drawn tokens with the log probabilities that their rows ask for. logits: as `sample` takes them, finite."""
    raw = logits.detach().contiguous().numpy()
    return [
        _with_logprobs(token, raw[index], row.params.logprobs)
        for index, (token, row) in enumerate(zip(tokens, rows, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a (seed, position): 53 bits of Philox keyed by both."""
    key = np.array([seed & _WORD, position & _WORD], np.uint64)
    return int(np.random.Philox(key=key).random_raw() >> 11) * 2.0**-53


def _check_finite(raw: FloatArray, highest: FloatArray) -> None:
    finite = np.isfinite(highest) & np.isfinite(raw.min(axis=1))
    if not finite.all():
        row = int(np.argmin(finite))
        column = int(np.argmin(np.isfinite(raw[row])))
        raise SamplerError(row, f"logit of token {column} is {raw[row, column]}: expected finite logits")


def is_greedy(row: SamplingRow) -> bool:
    """Whether the row takes its likeliest token."""
    return row.params.temperature < GREEDY_BELOW


def _masks_stop_tokens(row: SamplingRow) -> bool:
    return bool(row.params.stop_token_ids) and len(row.output_token_ids) < row.params.min_tokens


def changes_logits(row: SamplingRow) -> bool:
    """Whether min_tokens or a penalty applies."""
    params = row.params
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or _masks_stop_tokens(row)
    )


def _draw(index: int, raw: FloatArray, row: SamplingRow) -> int:
    """One token of raw [vocab]."""
    logits: NDArray[np.floating] = raw
    if changes_logits(row):
        logits = _apply_penalties(raw, row)
        if logits.max() == -np.inf:
            raise SamplerError(index, f"min_tokens {row.params.min_tokens} masks every token of the vocabulary")
    if is_greedy(row):
        return int(logits.argmax())
    return _draw_from(logits, row)


def logit_changes(
    row: SamplingRow, vocab: int
) -> tuple[IntArray, NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """What the row's penalties and min_tokens do, for each token whose logit changes: ids, ascending; by what a
    positive logit is divided and another multiplied; what is subtracted then; and whether the token cannot be drawn.

    repetition: once per token of prompt or output. frequency: times the token's count in the output; presence: once if
    it is in the output.
    """
    params = row.params
    output, counts = np.unique(_inside(row.output_token_ids, vocab), return_counts=True)
    prompt = _inside(row.prompt_token_ids, vocab) if params.repetition_penalty != 1.0 else _no_tokens()
    stop = _inside(np.array(params.stop_token_ids, np.int64), vocab) if _masks_stop_tokens(row) else _no_tokens()
    token_ids = np.unique(np.concatenate([prompt, output, stop]))
    in_output = np.searchsorted(token_ids, output)
    repetition, subtract = np.ones(len(token_ids)), np.zeros(len(token_ids))
    repetition[np.searchsorted(token_ids, prompt)] = params.repetition_penalty
    repetition[in_output] = params.repetition_penalty
    subtract[in_output] = params.frequency_penalty * counts + params.presence_penalty
    return token_ids, repetition, subtract, np.isin(token_ids, stop)


def _apply_penalties(raw: FloatArray, row: SamplingRow) -> NDArray[np.float64]:
    """A copy of raw [vocab] with `logit_changes`."""
    logits = raw.astype(np.float64)
    token_ids, repetition, subtract, masked = logit_changes(row, len(raw))
    values = logits[token_ids]
    with np.errstate(all="ignore"):
        if row.params.repetition_penalty != 1.0:
            values = np.where(values > 0, values / repetition, values * repetition)
            # Whatever penalty a client asks for, the logits stay finite.
            values = np.clip(values, -_LARGE, _LARGE)
    logits[token_ids] = np.where(masked, -np.inf, values - subtract)
    return logits


def _inside(token_ids: IntArray, vocab: int) -> IntArray:
    return token_ids[(token_ids >= 0) & (token_ids < vocab)]


def _draw_from(logits: NDArray[np.floating], row: SamplingRow) -> int:
    """Inverse of the cumulated distribution over the candidates, sorted by probability, then token id."""
    params = row.params
    scaled = logits.astype(np.float64) / params.temperature
    scaled -= scaled.max()
    candidates = np.flatnonzero(scaled > -np.inf)
    if params.min_p > 0:
        # The highest probability is exp(0), so that its multiple min_p has this logarithm.
        candidates = candidates[scaled[candidates] >= min(np.log(params.min_p), 0.0)]
    if 0 < params.top_k < len(candidates):
        candidates = _likeliest(scaled, candidates, params.top_k)
    total = np.exp(scaled[candidates]).sum()
    target = uniform(params.seed, row.position) * total
    limit = params.top_p * total
    for count in (*_HEADS, len(candidates)):
        order = _by_value(scaled, _likeliest(scaled, candidates, count))
        cumulated = np.cumsum(np.exp(scaled[order]))
        if params.top_p < 1:
            if cumulated[-1] >= limit:
                break
        elif cumulated[-1] > target:
            break
    if params.top_p < 1:
        # A token stays while those before it have not reached the limit.
        cumulated = cumulated[: 1 + int(np.searchsorted(cumulated[:-1], limit, side="left"))]
        target = target / total * cumulated[-1]
    # Rounding may put the target at the end: then the last token that adds anything.
    last = int(np.searchsorted(cumulated, cumulated[-1], side="left"))
    return int(order[min(int(np.searchsorted(cumulated, target, side="right")), last)])


def _likeliest(scaled: NDArray[np.float64], candidates: IntArray, count: int) -> IntArray:
    """The `count` candidates (ascending ids) of the highest values; of equal ones at the edge the lowest ids.

    In any order, but equal values keep theirs.
    """
    if count >= len(candidates):
        return candidates
    values = scaled[candidates]
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = candidates[values > edge]
    return np.concatenate([above, candidates[values == edge][: count - len(above)]])


def _by_value(values: NDArray[np.float64], token_ids: IntArray) -> IntArray:
    """Highest value first; equal values keep their order."""
    return token_ids[np.argsort(-values[token_ids], kind="stable")]


def _with_logprobs(token: int, raw: FloatArray, count: int | None) -> SampledToken:
    if count is None:
        return SampledToken(token, 0.0)
    highest = raw.max()
    # One row at a time: a sum's rounding must not depend on the batch.
    log_total = float(highest) + float(np.log(np.exp(raw - highest).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        scores = raw.astype(np.float64)
        likeliest = _likeliest(scores, np.arange(len(raw)), min(count, len(raw)))
        top = tuple((int(each), float(raw[each]) - log_total) for each in _by_value(scores, likeliest))
    return SampledToken(token, float(raw[token]) - log_total, top)
