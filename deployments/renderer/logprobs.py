"""Log probabilities as OpenAI's two APIs show them."""

from actors.messages import TokenLogprobs
from deployments.renderer.responses import CompletionLogprobs, TokenLogprob, TopLogprob
from deployments.renderer.tokenizer import PromptTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def for_chat(entries: list[TokenLogprobs], tokenizer: PromptTokenizer) -> list[TokenLogprob]:
    """One per token. `bytes` are the token's own: those of a character split over tokens join to it."""
    result = []
    for entry in entries:
        top = [TopLogprob(**_named(token_id, logprob, tokenizer)) for token_id, logprob in entry.top]
        result.append(TokenLogprob(**_named(entry.token_id, entry.logprob, tokenizer), top_logprobs=top))
    return result


def for_completion(
    entries: list[TokenLogprobs], offsets: list[int], tokenizer: PromptTokenizer, *, with_top: bool
) -> CompletionLogprobs:
    """`offsets` are the tokens' places in the text so far, in characters."""
    tokens = [_text(entry.token_id, tokenizer) for entry in entries]
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        tokens=tokens,
        top_logprobs=[_top(entry, tokenizer) for entry in entries] if with_top else None,
    )


def _top(entry: TokenLogprobs, tokenizer: PromptTokenizer) -> dict[str, float]:
    """By text; of two tokens of the same text (parts of characters) the likelier one counts."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(_text(token_id, tokenizer), max(logprob, LOWEST))
    return top


def _named(token_id: int, logprob: float, tokenizer: PromptTokenizer) -> dict:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _text(token_id: int, tokenizer: PromptTokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
