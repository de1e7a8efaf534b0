"""What the model learns from, in which order: exercises of growing difficulty, then conversations of every kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from configs import dialogues, digits
from encoding import Encoder, Example

POOL = 192  # conversations that are sorted by length into batches together
# Sizes of the images in a conversation, its share, the most images it has. Small images teach the most per second.
SIZE_MIX = (
    (digits.SMALL_SIZES[:2], 0.3, 6),
    (digits.SMALL_SIZES, 0.35, 5),
    (digits.MEDIUM_SIZES, 0.15, 3),
    (digits.LARGE_SIZES, 0.13, 2),
    (digits.SIZES, 0.07, 3),
)


def vary(talk: dialogues.Conversation, rng: np.random.Generator) -> dialogues.Conversation:
    """Now and then, write the questions as people type them: without capitals or without the final sign."""
    for turn in talk.turns:
        if rng.random() < 0.15:
            turn.question = turn.question.lower()
        if rng.random() < 0.15:
            turn.question = turn.question.rstrip("?.!")
    return talk


def practice(rng: np.random.Generator, level: float) -> dialogues.Conversation:
    """An exercise of growing difficulty, `level` from 0 to 1; without such a start, nothing is learned for long.

    One digit of 64 pixels; then rows of up to six; then all but the large image sizes; then distorted scans and two
    questions of every kind. Above 1: large images, more of them with a single digit.
    """
    style = digits.Style(augment=level > 0.75, jitter=min(1.0, 0.3 + level))
    if 0.85 < level < 1:
        return dialogues.conversation(rng, digits.SMALL_SIZES, "train", style, images=1, turns=2, max_images=1)
    count = int(rng.integers(1, 2 + int(np.clip(20 * (level - 0.1), 0, 5))))
    count = 1 if level > 1 and rng.random() < 0.2 else count  # one digit is hard to find on a large ground
    sizes = digits.SMALL_SIZES + digits.MEDIUM_SIZES if level > 0.35 else [(64 * count, 64)]
    sizes = digits.LARGE_SIZES if level > 1 else sizes
    scene = digits.scene(rng, sizes, "train", style, count)
    questions = dialogues.ASK_DIGIT if count == 1 and level > 1 else dialogues.ASK_READ
    question = questions[int(rng.integers(len(questions)))]
    return dialogues.Conversation([dialogues.Turn("read", question, scene.text, [scene], about=[0])])


def pointing(rng: np.random.Generator, level: float = 1.0) -> dialogues.Conversation:
    """An exercise in telling images apart: several questions about the n-th image, and comparisons.

    Two to six images of any sizes; below `level` 1 only small ones: two, from 0.4 also three, from 0.7 also four.
    Without such a concentrated start, guessing stays as good as anything for thousands of steps.
    Sizes must differ: among equal ones, the model would learn positions instead of counting images.
    """
    style = digits.Style(augment=True)
    if level < 1:
        number = int(rng.integers(2, 3 + (level > 0.4) + (level > 0.7)))
        sizes = digits.SMALL_SIZES[:5] if level < 0.7 else digits.SMALL_SIZES
    else:
        number = int(rng.choice([2, 3, 4, 5, 6], p=[0.4, 0.3, 0.2, 0.05, 0.05]))
        sizes = digits.SMALL_SIZES if rng.random() < 0.5 else digits.SMALL_SIZES + digits.MEDIUM_SIZES
        sizes = digits.SIZES if number < 4 and rng.random() < 0.2 else sizes
    talk = dialogues.Dialogue(rng, lambda: digits.scene(rng, sizes, "train", style))
    talk.first(number)
    while len(talk.turns) < number + 3:
        if rng.random() < 0.5:
            talk.ask_plain() if rng.random() < 0.3 else talk.ask_compare()
        else:
            talk.ask_nth(short=rng.random() < 0.3)
    return dialogues.Conversation(talk.turns)


def comparing(rng: np.random.Generator) -> dialogues.Conversation:
    """An exercise in the last word of a comparison: two to four small images, and whether more or fewer was asked."""
    talk = dialogues.Dialogue(rng, lambda: digits.scene(rng, digits.SMALL_SIZES, "train", digits.Style(augment=True)))
    attached = talk.attach(int(rng.choice([2, 3, 4], p=[0.4, 0.4, 0.2])))
    if not talk.ask_compare(attached):
        talk.ask_plain(attached)
    for _ in range(5):
        talk.ask_compare()
    return dialogues.Conversation(talk.turns)


def talk_of_any_kind(rng: np.random.Generator) -> dialogues.Conversation:
    """A conversation as they are measured, with more turns."""
    sizes, _, limit = SIZE_MIX[int(rng.choice(len(SIZE_MIX), p=[share for _, share, _ in SIZE_MIX]))]
    most, turns = int(rng.integers(1, limit + 1)), int(rng.integers(2, 8))
    style = digits.Style(augment=True)
    return dialogues.conversation(rng, sizes, "train", style, turns=turns, max_images=most, chat=0.03)


def growing(rng: np.random.Generator, done: float) -> dialogues.Conversation:
    """Of growing difficulty: reading, then telling images apart, then everything."""
    if done < 0.3:
        return practice(rng, level=min(1.3, 10 * done) * rng.random() ** 0.5)
    if done > 0.6:
        return mixture(rng, done)
    if rng.random() < 0.3:
        return practice(rng, level=rng.uniform(0.5, 1.3))
    return comparing(rng) if rng.random() < 0.2 else pointing(rng, level=min(1, (done - 0.3) / 0.25))


def mixture(rng: np.random.Generator, _done: float) -> dialogues.Conversation:
    """Exercises and conversations of every kind."""
    draw = rng.random()
    if draw < 0.3:
        return practice(rng, level=rng.uniform(0.5, 1.5))
    if draw < 0.42:
        return comparing(rng)
    return pointing(rng) if draw < 0.62 else talk_of_any_kind(rng)


def batches(
    encode: Encoder,
    lesson: Callable[[np.random.Generator, float], dialogues.Conversation],
    budget: float,
    rng: np.random.Generator,
    done: float,
) -> list[list[Example]]:
    """The examples of a pool in groups of similar length, in random order.

    A group costs about `budget`, in text tokens of work; `done` is the share of the lesson that is over.
    """
    examples = [encode(vary(lesson(rng, done), rng)) for _ in range(POOL)]
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda e: len(e.ids)):
        group = [*groups[-1], example]
        patches = sum(len(e.pixels) for e in group if e.pixels is not None)
        if groups[-1] and len(group) * len(example.ids) + 0.6 * patches > budget:
            groups.append([example])
        else:
            groups[-1] = group
    return [groups[i] for i in rng.permutation(len(groups))]
