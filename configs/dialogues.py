"""Conversations about images of digits with the expected answers, for the demo checkpoint, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs import digits

if TYPE_CHECKING:
    import numpy as np

MAX_IMAGES = 6
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

ASK_DIGIT = (
    "Which digit is this?",
    "What digit is this?",
    "Which digit is in the image?",
    "What digit do you see?",
    "Name the digit.",
)
ASK_READ = (
    "Read the digits.",
    "What are the digits?",
    "Which digits are in the image?",
    "What digits do you see?",
    "List the digits.",
    "Read the digits from left to right.",
    "What does the image say?",
    "Read the image.",
    "What number is this?",
)
ASK_COUNT = (
    "How many digits are there?",
    "How many digits are in the image?",
    "How many digits do you see?",
    "Count the digits.",
    "How many digits?",
)
ASK_READ_NTH = (
    "Read the digits in the {nth} image.",
    "What are the digits in the {nth} image?",
    "Which digits are in the {nth} image?",
    "What does the {nth} image say?",
    "Read the {nth} image.",
)
ASK_DIGIT_NTH = (
    "Which digit is in the {nth} image?",
    "What digit is in the {nth} image?",
    "Name the digit in the {nth} image.",
)
ASK_COUNT_NTH = (
    "How many digits are in the {nth} image?",
    "How many digits does the {nth} image have?",
    "Count the digits in the {nth} image.",
)
ASK_MORE = ("Which image has more digits?", "Which image has the most digits?", "Which one has more digits?")
ASK_FEWER = ("Which image has fewer digits?", "Which image has the fewest digits?", "Which one has fewer digits?")
ASK_SAME_OF_THIS = ("And this one?", "And this image?", "What about this one?", "And now?")
ASK_SAME_OF_NTH = (
    "And the {nth} one?",
    "And the {nth} image?",
    "What about the {nth} one?",
    "What about the {nth} image?",
)
CHAT = (
    ("Hello!", "Hello! Send me an image of digits."),
    ("Hi!", "Hello! Send me an image of digits."),
    ("Who are you?", "I am a small model that reads digits."),
    ("What can you do?", "I can read and count the digits in an image."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
)
NO_IMAGE = "There is no image."
SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You read digits.")


@dataclass
class Turn:
    """One question, with the images sent along, and its expected answer.

    about: for each part of the answer (they are divided by commas), the number of the image that it speaks of, counted
    from 0 over the whole conversation.
    """

    task: str
    question: str
    answer: str
    scenes: list[digits.Scene] = field(default_factory=list)
    images_first: bool = True
    about: Sequence[int] = ()


@dataclass
class Conversation:
    """Turns in order; every turn has an expected answer."""

    turns: list[Turn]
    system: str | None = None

    def messages(self, turn: int = -1, answers: Sequence[str] | None = None) -> list[dict]:
        """OpenAI chat messages up to and including the question of `turn` (default: the last).

        `answers` replaces the expected answers of the earlier turns in the history, e.g. by those really received.
        """
        last = range(len(self.turns))[turn]
        messages: list[dict] = [{"role": "system", "content": self.system}] if self.system else []
        for i, t in enumerate(self.turns[: last + 1]):
            text = {"type": "text", "text": t.question}
            images = [{"type": "image_url", "image_url": {"url": digits.data_url(s.image)}} for s in t.scenes]
            messages.append({"role": "user", "content": [*images, text] if t.images_first else [text, *images]})
            if i < last:
                messages.append({"role": "assistant", "content": answers[i] if answers else t.answer})
        return messages


class Dialogue:
    """Makes a conversation turn by turn.

    The rules of reference, which the model learns:
    - ordinals ("the second image") count over all images of the conversation, and a comparison covers them all;
    - a question that names no image is about the images of the latest message that had any, each answered in turn;
    - "And this one?" and "And the second one?" repeat the latest reading or counting question.
    """

    def __init__(self, rng: np.random.Generator, new_scene: Callable[[], digits.Scene]) -> None:
        self.rng = rng
        self.new_scene = new_scene
        self.scenes: list[digits.Scene] = []
        self.latest: list[int] = []  # the latest message's images, as indices of `scenes`
        self.verb: str | None = None  # "read" or "count", while a short follow-up may repeat it
        self.turns: list[Turn] = []

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def say(
        self,
        task: str,
        question: str,
        answer: str,
        scenes: Sequence[digits.Scene] = (),
        verb: str | None = None,
        about: Sequence[int] = (),
    ) -> None:
        self.verb = verb
        self.turns.append(Turn(task, question, answer, list(scenes), self.rng.random() < 0.8, about))

    def answer(self, verb: str, about: Sequence[int]) -> str:
        scenes = [self.scenes[i] for i in about]
        return ", ".join(s.text if verb == "read" else str(len(s.labels)) for s in scenes)

    def attach(self, number: int, again: bool = False) -> list[digits.Scene]:
        """Send `number` new images, or one of the earlier ones once more."""
        attached = [self.pick(self.scenes)] if again else [self.new_scene() for _ in range(number)]
        self.latest = list(range(len(self.scenes), len(self.scenes) + len(attached)))
        self.scenes += attached
        return attached

    def ask_plain(self, attached: Sequence[digits.Scene] = ()) -> None:
        """Read or count, without naming an image."""
        verb = "read" if self.rng.random() < 0.65 else "count"
        single = len(self.latest) == 1 and len(self.scenes[-1].labels) == 1
        if verb == "count":
            task, question = "count", self.pick(ASK_COUNT)
        elif single and self.rng.random() < 0.8:
            task, question = "digit", self.pick(ASK_DIGIT)
        else:
            task, question = "read", self.pick(ASK_READ)
        answer = self.answer(verb, self.latest)
        self.say(task if attached else "follow-up", question, answer, attached, verb, self.latest)

    def ask_nth(self, attached: Sequence[digits.Scene] = (), short: bool = False) -> None:
        """Read or count the n-th image of the conversation; `short` repeats the verb without saying it."""
        index = int(self.rng.integers(len(self.scenes)))
        target = self.scenes[index]
        last = index == len(self.scenes) - 1 and self.rng.random() < 0.25
        verb = self.verb if short and self.verb else ("read" if self.rng.random() < 0.6 else "count")
        if short and self.verb:
            phrases: Sequence[str] = ASK_SAME_OF_NTH
        elif verb == "count":
            phrases = ASK_COUNT_NTH
        else:
            phrases = ASK_DIGIT_NTH if len(target.labels) == 1 and self.rng.random() < 0.5 else ASK_READ_NTH
        question = self.pick(phrases).format(nth="last" if last else ORDINALS[index])
        task = "nth image" if attached else "follow-up"
        self.say(task, question, self.answer(verb, [index]), attached, verb, [index])

    def ask_compare(self, attached: Sequence[digits.Scene] = ()) -> bool:
        """Which image has more (or fewer) digits, behind the count of each: one glance at all images is not enough.

        False when three or more images have no clear answer.
        """
        counts = [len(s.labels) for s in self.scenes]
        more = self.rng.random() < 0.5
        best = max(counts) if more else min(counts)
        if counts.count(best) > 1 and len(counts) > 2:
            return False
        winner = "equal" if counts.count(best) > 1 else ORDINALS[counts.index(best)]
        about = range(len(self.scenes))
        answer = f"{self.answer('count', about)}: {winner}"
        self.say("compare", self.pick(ASK_MORE if more else ASK_FEWER), answer, attached, about=about)
        return True

    def first(self, number: int) -> None:
        attached = self.attach(number)
        draw = self.rng.random()
        if number == 1 or draw < 0.3:
            self.ask_plain(attached)
        elif draw >= 0.6 or not self.ask_compare(attached):
            self.ask_nth(attached)

    def follow(self, room: int) -> None:
        """A later turn; `room` is how many more images may be sent."""
        draw = self.rng.random()
        if not self.scenes:
            self.first(1)
        elif draw < 0.4 and room > 0 and self.verb:
            verb = self.verb
            attached = self.attach(1, again=self.rng.random() < 0.4)
            answer = self.answer(verb, self.latest)
            self.say("and this one", self.pick(ASK_SAME_OF_THIS), answer, attached, verb, self.latest)
        elif draw < 0.5 and room > 0:
            self.ask_plain(self.attach(1, again=self.rng.random() < 0.4))
        elif draw < 0.65 and len(self.scenes) > 1 and self.ask_compare():
            pass
        elif draw < 0.75:
            self.ask_plain()
        else:
            self.ask_nth(short=draw >= 0.87)


def conversation(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = digits.SIZES,
    split_name: str = "held_out",
    style: digits.Style = digits.PLAIN,
    images: int | None = None,
    turns: int | None = None,
    max_images: int = 4,
    chat: float = 0.0,
) -> Conversation:
    """A random conversation with expected answers.

    Args:
        rng: decides everything.
        sizes: the image sizes to draw from, (width, height) in pixels.
        split_name: which scans, `train` or `held_out`.
        style: see `Style`.
        images: images in the first message (default: one or more, at random).
        turns: number of questions (default: one to four).
        max_images: most images in the whole conversation, at most 6.
        chat: chance of a first turn without an image (small talk, or a question about a missing image).
    """
    talk = Dialogue(rng, lambda: digits.scene(rng, sizes, split_name, style))
    turns = turns or int(rng.integers(1, 5))
    if rng.random() < chat:
        question, answer = talk.pick(CHAT)
        if rng.random() < 0.3:
            question, answer = talk.pick(ASK_READ + ASK_COUNT), NO_IMAGE
        talk.say("chat", question, answer)
    else:
        talk.first(images or (1 if rng.random() < 0.5 else int(rng.integers(1, max_images + 1))))
    while len(talk.turns) < turns:
        talk.follow(min(max_images, MAX_IMAGES) - len(talk.scenes))
    system = talk.pick(SYSTEM) if rng.random() < 0.15 else None
    return Conversation(talk.turns, system)
