"""The graphs against transformers in float32: logits within 1e-3, 64 greedy tokens identical, at 1, 4 and 16 ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from neuron.kernels import KERNELS
from tests.neuron.models.gang import Gang, Image, Seq
from tests.neuron.models.reference import DEMO, Reference, make_checkpoint, make_image
from tests.support.kernels import marks_of

TOKENS = 64
TOLERANCE = 1e-3
WORLDS = (1, 4, 16)
CHECKPOINTS = ("random", "two-kv-heads-untied", "demo")

setups = [(name, world) for name in CHECKPOINTS for world in WORLDS] + [("random", 2), ("two-kv-heads-untied", 8)]
every_setup = pytest.mark.parametrize("setup", setups, ids=str)
every_world = pytest.mark.parametrize("setup", [*(("random", world) for world in WORLDS), ("demo", 1)], ids=str)
all_kernels = pytest.mark.parametrize("kernels", [pytest.param(name, marks=marks_of(name)) for name in KERNELS])


class Case:
    """A checkpoint, prompts for it, and what transformers answers."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.reference = Reference(folder)
        config = self.reference.config
        self.special = {
            "image": config.image_token_id,
            "start": config.vision_start_token_id,
            "end": config.vision_end_token_id,
        }
        self.text_vocab = min(config.text_config.vocab_size, config.vision_start_token_id, config.vision_end_token_id)
        vision = config.vision_config
        self.patch_dim = vision.in_channels * vision.patch_size**2
        self.answer = functools.cache(self._answer)
        self.prompts = {name: self._prompt(seed, parts) for seed, (name, parts) in enumerate(PROMPTS.items())}

    def _prompt(self, seed: int, parts: Sequence[int | tuple[int, int]]) -> tuple[list[int], list[tuple[int, Image]]]:
        """Tokens, and images with their offsets. A part: so many text tokens, or an image of h x w patches."""
        # Prompts share their random text and images, so that one may be another's prefix.
        rng = np.random.default_rng(0)
        tokens: list[int] = []
        images: list[tuple[int, Image]] = []
        for part in parts:
            if isinstance(part, int):
                tokens += rng.integers(0, self.text_vocab - 20, part).tolist() if part > 0 else [seed] * -part
                continue
            h, w = part
            tokens.append(self.special["start"])
            images.append((len(tokens), make_image(f"{h}x{w}", h, w, self.patch_dim, seed=h * 100 + w)))
            tokens += [self.special["image"]] * (h * w // 4) + [self.special["end"]]
        return tokens, images

    def sequence(self, name: str) -> Seq:
        tokens, images = self.prompts[name]
        return Seq(list(tokens), list(images))

    def _answer(self, name: str) -> tuple[list[int], torch.Tensor]:
        tokens, images = self.prompts[name]
        return self.reference.greedy(tokens, [image for _, image in images], TOKENS)


PROMPTS: dict[str, tuple[int | tuple[int, int], ...]] = {
    "text": (37,),
    "image": (9, (8, 12), 6),
    "six": (3, (2, 2), (4, 6), 5, (8, 4), (6, 6), (2, 10), 2, (12, 8), 11),
    "large": (20, (16, 16), 7),
    "large-other-question": (20, (16, 16), -3, 7),  # a prefix of `large`, up to behind the image
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Checkpoint name -> its case."""

    @functools.cache
    def make(name: str) -> Case:
        if name == "demo":
            return Case(DEMO)
        folder = tmp_path_factory.mktemp("checkpoint")
        if name == "random":
            return Case(make_checkpoint(folder, seed=1))
        return Case(make_checkpoint(folder, kv_heads=2, tied=False, shard_size="200KB", seed=2))

    return make


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.getfixturevalue("setup")[0])


@pytest.fixture
def gang(setup: tuple[str, int], case: Case, kernels: str) -> Iterator[Gang]:
    made = Gang(case.folder, setup[1], kernels=kernels)
    yield made
    made.close()


def check_prompt(case: Case, name: str, logits: Sequence[torch.Tensor], first: int = 0) -> None:
    """logits: of the chunks of the prompt, from token `first` on."""
    expected = case.answer(name)[1][first : len(case.prompts[name][0])]
    torch.testing.assert_close(torch.cat(list(logits)), expected, atol=TOLERANCE, rtol=0)


def check_decode(case: Case, gang: Gang, names: Sequence[str], seqs: Sequence[Seq], last: Sequence) -> None:
    """Generate greedily, all sequences in each step; last: the logits of each prompt's last token."""
    tokens = [int(logits.argmax()) for logits in last]
    for seq, token in zip(seqs, tokens, strict=True):
        seq.tokens.append(token)
    for step in range(1, TOKENS):
        logits = gang.decode(seqs, seqs_bucket=8, blocks_bucket=16)
        for name, seq, row in zip(names, seqs, logits, strict=True):
            prompt = len(case.prompts[name][0])
            torch.testing.assert_close(row, case.answer(name)[1][prompt + step - 1], atol=TOLERANCE, rtol=0)
            seq.tokens.append(int(row.argmax()))
    for name, seq in zip(names, seqs, strict=True):
        assert seq.tokens[len(case.prompts[name][0]) :] == case.answer(name)[0], name


@all_kernels
@every_world
@pytest.mark.parametrize("name", ["text", "image", "six"])
def test_prompt_alone(case: Case, gang: Gang, name: str) -> None:
    seq = case.sequence(name)
    gang.encode([image for _, image in seq.images])
    (logits,) = gang.prefill([(seq, len(seq.tokens))], 128, 128)
    check_prompt(case, name, [logits])
    check_decode(case, gang, [name], [seq], [logits[-1]])


@all_kernels
@every_world
def test_image_cut_by_chunks(case: Case, gang: Gang) -> None:
    seq = case.sequence("large")
    gang.encode([image for _, image in seq.images])
    chunks = [30, 13, 24, len(seq.tokens) - 67]
    logits = [gang.prefill([(seq, count)], 32, 128)[0] for count in chunks]
    check_prompt(case, "large", logits)
    check_decode(case, gang, ["large"], [seq], [logits[-1][-1]])


@all_kernels
@every_world
def test_prefix_hit_inside_an_image(case: Case, gang: Gang) -> None:
    earlier = case.sequence("large")
    gang.encode([image for _, image in earlier.images])
    gang.prefill([(earlier, len(earlier.tokens))], 128, 128)
    seq = case.sequence("large-other-question")
    seq.blocks, seq.computed = earlier.blocks[:3], 3 * gang.BLOCK  # the image lies at tokens 21 to 84
    assert seq.tokens[: seq.computed] == earlier.tokens[: seq.computed]
    (logits,) = gang.prefill([(seq, len(seq.tokens) - seq.computed)], 64, 128)
    check_prompt(case, "large-other-question", [logits], first=3 * gang.BLOCK)
    check_decode(case, gang, ["large-other-question"], [seq], [logits[-1]])


@all_kernels
@every_setup
def test_everything_mixed(case: Case, gang: Gang) -> None:
    """All prompts in shared prefill steps, with cut images and a prefix hit, then in one decode batch."""
    play_mixed(case, gang)


def play_mixed(case: Case, gang: Gang) -> None:
    seqs = {name: case.sequence(name) for name in PROMPTS}
    text, image, six, large, other = seqs.values()
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in PROMPTS}

    def step(*chunks: tuple[str, int], context: int = 384) -> None:
        results = gang.prefill([(seqs[name], count) for name, count in chunks], 128, context)
        for (name, _), result in zip(chunks, results, strict=True):
            logits[name].append(result)

    gang.encode([i for _, i in large.images])
    step(("large", 50), ("text", 10))
    gang.encode([i for seq in (six, image) for _, i in seq.images])
    step(("six", 33), ("large", 20), ("image", len(image.tokens)), ("text", 5))
    other.blocks, other.computed = large.blocks[:4], 4 * gang.BLOCK
    step(
        ("text", len(text.tokens) - text.computed),
        ("large-other-question", len(other.tokens) - other.computed),
        ("large", len(large.tokens) - large.computed),
        ("six", 8),
    )
    step(("six", len(six.tokens) - six.computed), context=256)
    for name in PROMPTS:
        check_prompt(case, name, logits[name], first=4 * gang.BLOCK if name == "large-other-question" else 0)
    check_decode(case, gang, list(seqs), list(seqs.values()), [logits[name][-1][-1] for name in seqs])


@all_kernels
@pytest.mark.parametrize("setup", [("random", 1), ("two-kv-heads-untied", 4), ("demo", 1)], ids=str)
def test_nan_in_padding_reaches_no_output(case: Case, setup: tuple[str, int], kernels: str) -> None:
    """Scratch, padding and blocks that nobody owns hold NaN throughout."""
    gang = Gang(case.folder, setup[1], kernels=kernels, poison=True)
    play_mixed(case, gang)
    gang.close()


@all_kernels
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_embeddings(cases: Callable[[str], Case], name: str, kernels: str) -> None:
    """Two images packed in one block, with padding, each as transformers encodes it alone."""
    case = cases(name)
    gang = Gang(case.folder, 1, kernels=kernels)
    images = [image for prompt in ("image", "large") for _, image in case.prompts[prompt][1]]
    gang.encode(images)
    for image in images:
        start = gang.image_rows[image.name]
        expected = case.reference.embeddings(image)
        torch.testing.assert_close(gang.caches[0][start : start + expected.shape[0]], expected, atol=1e-4, rtol=1e-4)
    gang.close()


def test_the_answers_compared_are_not_trivial(cases: Callable[[str], Case]) -> None:
    """Outputs vary within a prompt and between prompts, and the runner-up is further off than the tolerance."""
    answers = [cases("random").answer(name) for name in PROMPTS]
    assert len({tuple(tokens) for tokens, _ in answers}) == len(PROMPTS)
    for tokens, logits in answers:
        assert len(set(tokens)) > 8
        best = logits.topk(2, dim=-1).values
        assert (best[:, 0] - best[:, 1]).median() > 100 * TOLERANCE
