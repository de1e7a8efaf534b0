"""From token ids to text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from deployments.renderer.tokenizer import PromptTokenizer


@dataclass(frozen=True)
class Piece:
    """What a client may see of the tokens so far and has not seen yet."""

    text: str
    stop: str | None = None
    """The stop string that ends the output; no text follows."""


class Detokenizer:
    """Of one output. Bytes of an unfinished character and a possible beginning of a stop string are held back."""

    def __init__(self, tokenizer: PromptTokenizer, stop: list[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._min_tokens = min_tokens
        """Stop strings are looked for behind this many tokens."""
        self._token_ids: list[int] = []
        self._decoded = 0  # characters that the stream has given
        self._held = ""  # given by the stream, not yet by us

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_characters(self) -> int:
        """Of the text so far, with what is held back of it."""
        return self._decoded

    def add(self, token_id: int) -> Piece:
        """One more token."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer.backend, token_id) or ""
        self._decoded += len(text)
        return self._give(text)

    def flush(self) -> Piece:
        """The end of the output: what was held back is text after all; an unfinished character becomes U+FFFD."""
        if not self._token_ids:
            return Piece("")
        piece = self._give(self._tokenizer.decode(self._token_ids)[self._decoded :])
        if piece.stop is not None:
            return piece
        rest, self._held = self._held, ""
        return Piece(piece.text + rest)

    def _give(self, text: str) -> Piece:
        text = self._held + text
        self._held = ""
        if not self._stop or len(self._token_ids) <= self._min_tokens:
            return Piece(text)
        found = [(position, stop) for stop in self._stop if (position := text.find(stop)) >= 0]
        if found:
            position, stop = min(found, key=lambda match: match[0])
            return Piece(text[:position], stop)
        keep = _possible_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return Piece(text[: len(text) - keep])


def _possible_beginning(text: str, stop: list[str]) -> int:
    """Characters at the end of `text` that are the beginning of a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest
