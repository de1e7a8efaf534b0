"""What the demo checkpoint is taught about which image is meant: of each image's tokens, and of each answer's."""

import sys

import numpy as np
import pytest

from configs import dialogues, digits
from tests.support.application import ROOT

sys.path.insert(0, str(ROOT / "configs" / "models" / "digits-vl"))

from build import build_tokenizer
from encoding import IGNORE, Encoder


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(build_tokenizer())


@pytest.mark.parametrize("seed", range(30))
def test_every_token_names_its_image(encode: Encoder, seed: int) -> None:
    talk = dialogues.conversation(np.random.default_rng(seed), digits.SMALL_SIZES, turns=6, max_images=6, chat=0.3)
    scenes = [scene for turn in talk.turns for scene in turn.scenes]
    example = encode(talk)
    assert len(example.about) == len(example.ids)

    shown = [about for token, about in zip(example.ids, example.about, strict=True) if token == encode.image_id]
    sizes = [int(grid.prod()) // 4 for grid in example.grids] if scenes else []
    assert shown == [number for number, size in enumerate(sizes) for _ in range(size)]

    for (task, start, end), turn in zip(example.answers, talk.turns, strict=True):
        meant = example.about[start - 1 : end - 1]
        assert (task == "chat") == (not turn.about)
        assert set(meant) - {IGNORE} == set(turn.about)
        for number in turn.about:
            text = encode.tokenizer.decode(
                [t for t, about in zip(example.ids[start:end], meant, strict=True) if about == number]
            )
            assert text.strip(" ,:") in (scenes[number].text, str(len(scenes[number].labels))), turn
