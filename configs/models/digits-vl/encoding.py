"""Conversations as token ids, labels and patches, and batches of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from build import FOLDER
from configs import dialogues

IGNORE = -100  # label of a token without loss
TARGETS = ("labels", "about", "weights")  # what a batch has besides the model's inputs
# Counts are few tokens beside those of the readings.
TASK_WEIGHTS = {"compare": 3.0, "count": 2.0}


@dataclass
class Example:
    """One conversation as tokens.

    ids: token ids [L], image placeholders expanded; labels: [L], `IGNORE` outside the answers;
    answers: (task, start, end) of each answer in ids; pixels: [patches, 1536]; grids: [images, 3] in patches;
    about: [L], of an image's token the number of the image, and where the next token is an answer's, the number of the
    image that it speaks of; elsewhere `IGNORE`.
    """

    ids: list[int]
    labels: list[int]
    about: list[int]
    answers: list[tuple[str, int, int]]
    pixels: np.ndarray | None
    grids: np.ndarray | None


class Encoder:
    """Turns a conversation into an `Example`, exactly as a server's chat template and processor would."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image_id = tokenizer.token_to_id("<|image_pad|>")
        self.comma, self.colon = (tokenizer.encode(sign).ids[0] for sign in ",:")
        settings = json.loads((FOLDER / "preprocessor_config.json").read_text())
        self.processor = Qwen2VLImageProcessorPil(**{k: v for k, v in settings.items() if not k.endswith("_type")})

    def __call__(self, talk: dialogues.Conversation) -> Example:
        images = [s.image for turn in talk.turns for s in turn.scenes]
        pixels = grids = None
        if images:
            processed = self.processor(images=images)
            pixels, grids = np.asarray(processed["pixel_values"]), np.asarray(processed["image_grid_thw"])
        embeddings = enumerate(grids.prod(1) // 4) if images else iter(())
        ids: list[int] = []
        labels: list[int] = []
        about: list[int] = []
        answers = []
        for text, turn in pieces(talk):
            start = len(ids)
            tokens = self.tokenizer.encode(text).ids
            if turn:
                answers.append((turn.task, start, start + len(tokens)))
                about[-1:] = [*parts(tokens, self.comma, self.colon, turn.about), IGNORE]
                ids += tokens
                labels += tokens
                continue
            for token in tokens:
                number, repeat = next(embeddings) if token == self.image_id else (IGNORE, 1)
                ids += [token] * int(repeat)
                labels += [IGNORE] * int(repeat)
                about += [number] * int(repeat)
        return Example(ids, labels, about, answers, pixels, grids)


def parts(tokens: list[int], comma: int, colon: int, about: Sequence[int]) -> Iterator[int]:
    """The image that each of an answer's tokens speaks of: the next one behind a comma, none behind a colon."""
    left = iter(about)
    image = next(left, IGNORE)
    for token in tokens:
        yield image
        if token == comma:
            image = next(left, IGNORE)
        elif token == colon:
            image = IGNORE


def pieces(talk: dialogues.Conversation) -> list[tuple[str, dialogues.Turn | None]]:
    """The conversation in the chat template's form, cut into (text, None) and (answer, its turn)."""
    result: list[tuple[str, dialogues.Turn | None]] = []
    head = f"<|im_start|>system\n{talk.system}<|im_end|>\n" if talk.system else ""
    for turn in talk.turns:
        images = "<|vision_start|><|image_pad|><|vision_end|>" * len(turn.scenes)
        content = images + turn.question if turn.images_first else turn.question + images
        result.append((f"{head}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", None))
        result.append((f"{turn.answer}<|im_end|>", turn))
        head = "\n"
    return result


def collate(examples: list[Example], image_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right and stack: ids, labels, about and weights [B, L], pixels [patches, 1536], grids [images, 3].

    No attention mask: under causal attention, padding on the right is seen by padding only.
    """
    longest = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    about = torch.full_like(ids, IGNORE)
    weights = torch.ones(len(examples), longest)
    for i, e in enumerate(examples):
        ids[i, : len(e.ids)] = torch.tensor(e.ids)
        labels[i, : len(e.ids)] = torch.tensor(e.labels)
        about[i, : len(e.ids)] = torch.tensor(e.about)
        for task, begin, end in e.answers:
            weights[i, begin:end] = TASK_WEIGHTS.get(task, 1.0)
    batch = {"input_ids": ids, "labels": labels, "about": about, "weights": weights}
    batch["mm_token_type_ids"] = (ids == image_id).int()
    if any(e.pixels is not None for e in examples):
        batch["pixel_values"] = torch.from_numpy(np.concatenate([e.pixels for e in examples if e.pixels is not None]))
        batch["image_grid_thw"] = torch.from_numpy(np.concatenate([e.grids for e in examples if e.grids is not None]))
    return batch
