"""Text as it comes equals text at the end, and stop strings cut it exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.renderer.detokenizer import Detokenizer
from deployments.renderer.tokenizer import PromptTokenizer


def feed(
    tokenizer: PromptTokenizer, token_ids: list[int], stop: list[str], min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """(what each step gave, the stop string)."""
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    given = []
    for token_id in token_ids:
        piece = detokenizer.add(token_id)
        given.append(piece.text)
        if piece.stop is not None:
            return given, piece.stop
    piece = detokenizer.flush()
    return [*given, piece.text], piece.stop


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=30))
def test_any_tokens_give_in_pieces_what_they_give_at_once(tokenizer, token_ids):
    given, stop = feed(tokenizer, token_ids, [])
    assert "".join(given) == tokenizer.decode(token_ids)
    assert stop is None


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet="abc é🎉", max_size=20), st.lists(st.text(alphabet="abc é🎉", min_size=1, max_size=4), max_size=4)
)
def test_stop_strings_cut_where_the_first_one_begins(tokenizer, text, stop):
    """Tokens are single bytes here, so that every stop string lies across tokens."""
    alphabet = {byte: token_id for token_id in range(256) for byte in tokenizer.token_bytes(token_id)}
    given, found = feed(tokenizer, [alphabet[byte] for byte in text.encode()], stop)
    # The stop string that is complete first ends the output; what stands before it was given.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert ("".join(given), found) == (text, None)
        return
    head = text[: min(ends)]
    begin = min(head.find(s) for s in stop if s in head)
    assert "".join(given) == text[:begin]
    assert found is not None
    assert text[begin:].startswith(found)


def test_character_split_across_tokens_is_held_back(tokenizer: PromptTokenizer):
    token_ids = tokenizer.encode("é🎉")
    assert len(token_ids) > 2
    given, _ = feed(tokenizer, token_ids, [])
    assert "\ufffd" not in "".join(given)
    assert given.count("") >= len(token_ids) - 2
    assert "".join(given) == "é🎉"
    cut, _ = feed(tokenizer, token_ids[:-1], [])
    assert "".join(cut) == "é\ufffd"


def test_nothing_that_may_begin_a_stop_string_is_given_early(tokenizer: PromptTokenizer):
    token_ids = [token_id for letter in "abcabd" for token_id in tokenizer.encode(letter)]
    given, stop = feed(tokenizer, token_ids, ["abd"])
    assert (given, stop) == (["", "", "abc", "", "", ""], "abd")
    given, stop = feed(tokenizer, token_ids, ["abx"])
    assert ("".join(given), stop) == ("abcabd", None)


def test_stop_strings_wait_for_min_tokens(tokenizer: PromptTokenizer):
    token_ids = [token_id for letter in "axbxc" for token_id in tokenizer.encode(letter)]
    assert feed(tokenizer, token_ids, ["x"]) == (["a", ""], "x")
    assert feed(tokenizer, token_ids, ["x"], min_tokens=2) == (["a", "x", "b", ""], "x")


@pytest.mark.parametrize("text", ["é", "digits", " 🎉", "<|im_end|>"])
def test_bytes_of_tokens_join_to_the_text(tokenizer: PromptTokenizer, text):
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
