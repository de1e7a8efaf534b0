"""The kernels for AMX compute a token's logits to the same bits however it is reached: in one chunk or in several,
alone or beside others, decoded or computed again. So an answer depends on nothing else that runs, and on no lost rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.neuron.models.gang import Gang, Image, Seq
from tests.neuron.models.reference import DEMO, make_image
from tests.support.kernels import marks_of

LENGTH, PROMPT = 90, 60

pytestmark = marks_of("amx")


@pytest.fixture(params=[(1, 1), (1, 2), (2, 1), (4, 1)], ids="{0[0]} ranks, {0[1]} threads".format)
def world_size(request: pytest.FixtureRequest):
    world_size, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield world_size
    torch.set_num_threads(before)


def tokens_of(seed: int, image_token_id: int = 0, image: Image | None = None) -> Seq:
    """LENGTH tokens; an image at the fourth."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (LENGTH,), generator=generator).tolist()
    if image is None:
        return Seq(tokens)
    count = len(image.pixels) // 4
    tokens[3 : 3 + count] = [image_token_id] * count
    return Seq(tokens, [(3, image)])


def decoded(gang: Gang, seq: Seq, others: list[Seq], bucket: int) -> list[Tensor]:
    """The logits of tokens PROMPT to LENGTH, decoded beside others."""
    tokens = [each.tokens for each in (seq, *others)]
    rows = []
    for count in range(PROMPT + 1, LENGTH + 1):
        for each, whole in zip((seq, *others), tokens, strict=True):
            each.tokens = whole[:count]
        rows.append(gang.decode([*others, seq], bucket, LENGTH // gang.BLOCK + 1)[-1])
    return rows


def test_a_token_has_the_same_logits_however_it_is_computed(world_size: int) -> None:
    gang = Gang(DEMO, world_size, "amx")
    image = make_image("a", 6, 8, gang.config.patch_dim, seed=1)
    gang.encode([image])
    other = make_image("b", 10, 4, gang.config.patch_dim, seed=2)

    seen = (1, gang.config.image_token_id, image)

    (whole,) = gang.prefill([(tokens_of(*seen), LENGTH)], 128, 128)
    wanted = whole[PROMPT:]

    chunked = tokens_of(*seen)
    parts = [gang.prefill([(chunked, count)], 128, 128)[0] for count in (1, 33, 2, LENGTH - 36)]
    assert torch.equal(torch.cat(parts), whole)

    alone = tokens_of(*seen)
    gang.prefill([(alone, PROMPT)], 64, 64)
    assert torch.equal(torch.stack(decoded(gang, alone, [], 1)), wanted)

    # Encoded and computed anew, behind another image and other sequences, in other blocks and buckets.
    gang.image_rows.clear()
    gang.encode([other, image])
    seq, *others = tokens_of(*seen), *(tokens_of(seed) for seed in range(2, 20))
    gang.prefill([(others[0], PROMPT)], 64, 64)
    gang.prefill([(others[1], PROMPT), (seq, PROMPT), (others[2], PROMPT)], 256, 256)
    for each in others[3:]:
        gang.prefill([(each, PROMPT)], 64, 64)
    beside = torch.stack(decoded(gang, seq, others, 24))
    assert torch.equal(beside, wanted)
    gang.close()


def test_all_layers_in_one_call_are_the_layers_one_by_one() -> None:
    def logits(gang: Gang) -> list[Tensor]:
        images = [make_image(name, 6, 8, gang.config.patch_dim, seed) for seed, name in enumerate("ab")]
        gang.encode(images)
        seqs = [tokens_of(seed, gang.config.image_token_id, image) for seed, image in enumerate(images)]
        prefilled = gang.prefill([(seq, PROMPT) for seq in seqs], 128, 128)  # rows of padding behind them
        return [*gang.caches, *prefilled, *decoded(gang, seqs[0], [seqs[1]], 4)]

    at_once, one_by_one = Gang(DEMO, 1, "amx"), Gang(DEMO, 1, "amx")
    (model,) = one_by_one.models
    assert model.text.at_once is not None
    assert model.vision.at_once is not None
    model.text.at_once = model.vision.at_once = None
    for wanted, got in zip(logits(one_by_one), logits(at_once), strict=True):
        assert torch.equal(wanted, got)
    for gang in (at_once, one_by_one):
        gang.close()
