"""Between text and token ids. Special tokens come from the chat template only: typed by a user they are text."""

import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer


class Quotes:
    """Stand-ins for what must stay text while a chat template is rendered around it.

    A stand-in is private-use characters around a random number, which no client can guess and no template looks for.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._special = _any_of(tokens)
        self._key = secrets.token_hex(8)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def quote(self, parts: list[str]) -> list[str]:
        """The texts, which will stand side by side, with each of the tokens in them, and across them, replaced."""
        quoted = [self._special.sub(lambda match: self._stand_in(match[0]), part) for part in parts]
        if len(parts) > 1 and self._special.search("".join(quoted)):  # one that only two parts together spell
            quoted = [part + self._stand_in("") for part in quoted]
        return quoted

    def restore(self, text: str) -> str:
        return re.sub(f"\ue000{self._key}-([0-9]+)\ue001", lambda match: self._texts[int(match.group(1))], text)

    def _stand_in(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{self._key}-{len(self._texts) - 1}\ue001"


class PromptTokenizer:
    """transformers' tokenizer, and beside it a copy that reads special tokens as ordinary text.

    Where a text holds no special token that must stay text, `encode` is the tokenizer's own; so prompts equal those of
    every other engine. Otherwise the text is cut at the special tokens that count and the pieces encoded as text,
    which is what the tokenizer itself does with them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._as_text = Tokenizer.from_str(self._tokenizer.to_str())
        self._as_text.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Special tokens by their text."""
        self._special = _any_of(self.special_ids)
        self.max_token_length = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """Of the longest token: a text of n characters has at least n / max_token_length tokens."""
        self._bytes = _byte_level_alphabet() if "ByteLevel" in str(self._tokenizer.decoder) else None
        self._added = {token_id: token.content for token_id, token in added.items()}

    @property
    def backend(self) -> Tokenizer:
        return self._tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokenizer's own result: special tokens in `text` count as such."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_quoted(self, text: str, quotes: Quotes, *, add_special_tokens: bool = False) -> list[int]:
        """As `encode`, with everything that `quotes` replaced in `text` put back as plain text."""
        if not quotes:
            return self.encode(text, add_special_tokens=add_special_tokens)
        token_ids: list[int] = []
        for index, piece in enumerate(self._special.split(text)):
            if index % 2:
                token_ids.append(self.special_ids[piece])
            elif piece:
                token_ids += self._as_text.encode(quotes.restore(piece), add_special_tokens=False).ids
        return self._tokenizer_frame(token_ids) if add_special_tokens else token_ids

    def _tokenizer_frame(self, token_ids: list[int]) -> list[int]:
        """What the tokenizer puts before and behind a sequence, if anything."""
        probe = self._tokenizer.encode("a", add_special_tokens=True)
        inner = [index for index, special in enumerate(probe.special_tokens_mask) if not special]
        if not inner:
            return token_ids
        return probe.ids[: inner[0]] + token_ids + probe.ids[inner[-1] + 1 :]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_str(self, token_id: int) -> str:
        """The token's name in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; it may be a part of a character only."""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._bytes is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        name = self._tokenizer.id_to_token(token_id)
        return b"" if name is None else bytes(self._bytes[character] for character in name)


def _any_of(texts: Iterable[str]) -> "re.Pattern[str]":
    """Matches any of the texts, the longest first, as one group; nothing where there are none."""
    ordered = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(ordered)})" if ordered else r"((?!))")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is one, else the next from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet.values()]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
