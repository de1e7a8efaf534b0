"""Scenes and conversations of handwritten digits, for the demo checkpoint, tests and benchmarks.

The scans are the 1,797 real ones of scikit-learn's `load_digits` (8x8 pixels, 16 grey levels), split once and for all
into 1,437 for training and 360 held out. `strip` draws one to six of them in a row; `conversation` makes a dialogue
about such images with the expected answers. Everything is a function of the given random generator.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_DIGITS = 6
MAX_IMAGES = 6
CELLS = (64, 32)  # pixels, side of the square that one scan is drawn into: the first that fits

# (width, height) in pixels. An image takes (width / 32) x (height / 32) embeddings, after rounding to multiples of 32.
SMALL_SIZES = (
    (64, 64),
    (96, 64),
    (128, 64),
    (160, 64),
    (192, 64),
    (96, 96),
    (128, 96),
    (128, 128),
    (150, 70),
    (100, 90),
)
MEDIUM_SIZES = ((224, 64), (256, 64), (256, 96), (192, 128), (224, 128), (224, 224), (320, 96), (256, 160), (200, 100))
LARGE_SIZES = ((448, 224), (320, 320), (448, 448), (640, 160), (500, 300), (896, 224), (896, 448), (300, 400))
SIZES = SMALL_SIZES + MEDIUM_SIZES + LARGE_SIZES


@dataclass(frozen=True)
class Style:
    """How scenes are drawn; the default is how they are drawn for measuring.

    augment: distort each scan and add noise (for training); jitter: how much the digits differ in size and
    place inside their cells, from 0 to 1.
    """

    augment: bool = False
    jitter: float = 1.0


PLAIN = Style()

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


@functools.cache
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """All scans and their labels: uint8 [1797, 8, 8] with 0 = paper and 255 = ink, and int64 [1797]."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.round(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)


@functools.cache
def split(name: str) -> np.ndarray:
    """Scan indices of the split `train` (1,437) or `held_out` (360), stratified by label; always the same."""
    from sklearn.model_selection import train_test_split

    _, labels = load_scans()
    train, held_out = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=labels)
    import numpy as np

    return np.sort(np.array({"train": train, "held_out": held_out}[name]))


def scans_of(labels: Sequence[int], rng: np.random.Generator, split_name: str = "held_out") -> list[int]:
    """For each label, the index of a random scan of that digit."""
    _, all_labels = load_scans()
    indices = split(split_name)
    return [int(rng.choice(indices[all_labels[indices] == label])) for label in labels]


def labels_of(scans: Sequence[int]) -> list[int]:
    """The digits that the scans show."""
    return [int(label) for label in load_scans()[1][list(scans)]]


def max_digits(size: tuple[int, int]) -> int:
    """How many digits fit side by side into an image of `size` (width, height)."""
    return max(1, min(MAX_DIGITS, size[0] // CELLS[-1]))


def strip(scans: Sequence[int], size: tuple[int, int], rng: np.random.Generator, style: Style = PLAIN) -> Image.Image:
    """Draw scans in a row, left to right, on a plain canvas.

    Args:
        scans: one to six indices into `load_scans()`.
        size: (width, height) of the image in pixels.
        rng: decides brightness, digit size and placement.
        style: brightness and distortion (rotation, shear, scale, stroke, noise).
    Returns:
        an RGB image of exactly `size`.
    """
    import numpy as np
    from PIL import Image

    width, height = size
    if not 1 <= len(scans) <= max_digits(size):
        raise ValueError(f"{len(scans)} digits do not fit into {width}x{height}: 1 to {max_digits(size)} do")
    images, _ = load_scans()
    cell = next((c for c in CELLS if c <= height and c * len(scans) <= width), CELLS[-1])
    left, top = (32 * int(rng.integers(free // 32 + 1)) for free in (width - cell * len(scans), height - cell))

    ink = np.zeros((height, width), np.float32)
    for i, scan in enumerate(scans):
        side = round(cell * (1 - rng.uniform(0, 0.15) * style.jitter))
        tile = Image.fromarray(images[scan]).resize((side, side), Image.Resampling.BICUBIC)
        if style.augment:
            tile = _distort(tile, rng)
        shift_x, shift_y = (int((cell - side) * (0.5 + rng.uniform(-0.5, 0.5) * style.jitter)) for _ in "xy")
        x, y = left + i * cell + shift_x, top + shift_y
        area = ink[y : y + side, x : x + side]
        np.maximum(area, np.asarray(tile, np.float32) / 255, out=area)

    paper, pen = rng.uniform(150, 255), rng.uniform(0, 90)
    if style.augment:
        ink = ink ** rng.uniform(0.7, 1.4)
    canvas = paper + ink * (pen - paper)
    if style.augment and rng.random() < 0.5:
        canvas += rng.standard_normal(canvas.shape, np.float32) * rng.uniform(0, 12)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)).convert("RGB")


def _distort(tile: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Rotate (about 12 degrees), scale, shear and shift one scan inside its own tile."""
    import numpy as np
    from PIL import Image

    side = tile.size[0]
    angle = np.deg2rad(np.clip(rng.normal(0, 6), -12, 12))
    rotate = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shear = np.array([[1, rng.normal(0, 0.08)], [0, 1]])
    inverse = rotate @ shear @ np.diag(rng.uniform(0.95, 1.2, 2))
    offset = side / 2 - inverse @ np.full(2, side / 2) + side * rng.uniform(-0.05, 0.05, 2)
    matrix = (*inverse[0], offset[0], *inverse[1], offset[1])
    return tile.transform(tile.size, Image.Transform.AFFINE, tuple(map(float, matrix)), Image.Resampling.BILINEAR)


@dataclass
class Scene:
    """One image and what it shows."""

    image: Image.Image
    labels: list[int]

    @property
    def text(self) -> str:
        return " ".join(map(str, self.labels))


@dataclass
class Turn:
    """One question, with the images sent along, and its expected answer."""

    task: str
    question: str
    answer: str
    scenes: list[Scene] = field(default_factory=list)
    images_first: bool = True


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
            images = [{"type": "image_url", "image_url": {"url": data_url(s.image)}} for s in t.scenes]
            messages.append({"role": "user", "content": [*images, text] if t.images_first else [text, *images]})
            if i < last:
                messages.append({"role": "assistant", "content": answers[i] if answers else t.answer})
        return messages


def png(image: Image.Image) -> bytes:
    """The image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    """The image as a `data:image/png;base64,` URL."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def scene(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = SIZES,
    split_name: str = "held_out",
    style: Style = PLAIN,
    count: int | None = None,
) -> Scene:
    """A random strip: random size, number of digits (or `count`) and scans of the split."""
    if count is not None:
        sizes = [s for s in sizes if max_digits(s) >= count]
    size = sizes[int(rng.integers(len(sizes)))]
    count = count or int(rng.integers(1, max_digits(size) + 1))
    scans = [int(s) for s in rng.choice(split(split_name), count)]
    return Scene(strip(scans, size, rng, style), labels_of(scans))


class Dialogue:
    """Makes a conversation turn by turn.

    The rules of reference, which the model learns:
    - ordinals ("the second image") count over all images of the conversation, and a comparison covers them all;
    - a question that names no image is about the images of the latest message that had any, each answered in turn;
    - "And this one?" and "And the second one?" repeat the latest reading or counting question.
    """

    def __init__(self, rng: np.random.Generator, new_scene: Callable[[], Scene]) -> None:
        self.rng = rng
        self.new_scene = new_scene
        self.scenes: list[Scene] = []
        self.latest: list[Scene] = []
        self.verb: str | None = None  # "read" or "count", while a short follow-up may repeat it
        self.turns: list[Turn] = []

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def say(self, task: str, question: str, answer: str, scenes: Sequence[Scene] = (), verb: str | None = None) -> None:
        self.verb = verb
        self.turns.append(Turn(task, question, answer, list(scenes), self.rng.random() < 0.8))

    def answer(self, verb: str, scenes: Sequence[Scene]) -> str:
        return ", ".join(s.text if verb == "read" else str(len(s.labels)) for s in scenes)

    def attach(self, number: int, again: bool = False) -> list[Scene]:
        """Send `number` new images, or one of the earlier ones once more."""
        self.latest = [self.pick(self.scenes)] if again else [self.new_scene() for _ in range(number)]
        self.scenes += self.latest
        return self.latest

    def ask_plain(self, attached: Sequence[Scene] = ()) -> None:
        """Read or count, without naming an image."""
        verb = "read" if self.rng.random() < 0.65 else "count"
        single = len(self.latest) == 1 and len(self.latest[0].labels) == 1
        if verb == "count":
            task, question = "count", self.pick(ASK_COUNT)
        elif single and self.rng.random() < 0.8:
            task, question = "digit", self.pick(ASK_DIGIT)
        else:
            task, question = "read", self.pick(ASK_READ)
        self.say(task if attached else "follow-up", question, self.answer(verb, self.latest), attached, verb)

    def ask_nth(self, attached: Sequence[Scene] = (), short: bool = False) -> None:
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
        self.say("nth image" if attached else "follow-up", question, self.answer(verb, [target]), attached, verb)

    def ask_compare(self, attached: Sequence[Scene] = ()) -> bool:
        """Which image has more (or fewer) digits, behind the count of each: one glance at all images is not enough.

        False when three or more images have no clear answer.
        """
        counts = [len(s.labels) for s in self.scenes]
        more = self.rng.random() < 0.5
        best = max(counts) if more else min(counts)
        if counts.count(best) > 1 and len(counts) > 2:
            return False
        winner = "equal" if counts.count(best) > 1 else ORDINALS[counts.index(best)]
        answer = f"{self.answer('count', self.scenes)}: {winner}"
        self.say("compare", self.pick(ASK_MORE if more else ASK_FEWER), answer, attached)
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
            self.say("and this one", self.pick(ASK_SAME_OF_THIS), self.answer(verb, attached), attached, verb)
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
    sizes: Sequence[tuple[int, int]] = SIZES,
    split_name: str = "held_out",
    style: Style = PLAIN,
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
    talk = Dialogue(rng, lambda: scene(rng, sizes, split_name, style))
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
