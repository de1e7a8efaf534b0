"""Conversations as token ids, labels and patches, and batches of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from build import FOLDER
from configs import dialogues

IGNORE = -100  # label of a token without loss
# Counts are few tokens beside those of the readings.
TASK_WEIGHTS = {"compare": 3.0, "count": 2.0}


@dataclass
class Example:
    """One conversation as tokens.

    ids: token ids [L], image placeholders expanded; labels: [L], `IGNORE` outside the answers;
    answers: (task, start, end) of each answer in ids; pixels: [patches, 1536]; grids: [images, 3] in patches.
    """

    ids: list[int]
    labels: list[int]
    answers: list[tuple[str, int, int]]
    pixels: np.ndarray | None
    grids: np.ndarray | None


class Encoder:
    """Turns a conversation into an `Example`, exactly as a server's chat template and processor would."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image_id = tokenizer.token_to_id("<|image_pad|>")
        settings = json.loads((FOLDER / "preprocessor_config.json").read_text())
        self.processor = Qwen2VLImageProcessorPil(**{k: v for k, v in settings.items() if not k.endswith("_type")})

    def __call__(self, talk: dialogues.Conversation) -> Example:
        images = [s.image for turn in talk.turns for s in turn.scenes]
        pixels = grids = None
        if images:
            processed = self.processor(images=images)
            pixels, grids = np.asarray(processed["pixel_values"]), np.asarray(processed["image_grid_thw"])
        embeddings = iter(grids.prod(1) // 4) if images else iter(())
        ids: list[int] = []
        labels: list[int] = []
        answers = []

        def add(text: str, learn: bool = False) -> None:
            for token in self.tokenizer.encode(text).ids:
                repeat = int(next(embeddings)) if token == self.image_id else 1
                ids.extend([token] * repeat)
                labels.extend([token if learn else IGNORE] * repeat)

        for text, task in pieces(talk):
            start = len(ids)
            add(text, learn=task is not None)
            if task:
                answers.append((task, start, len(ids)))
        return Example(ids, labels, answers, pixels, grids)


def pieces(talk: dialogues.Conversation) -> list[tuple[str, str | None]]:
    """The conversation in the chat template's form, cut into (text, None) and (answer, task)."""
    result: list[tuple[str, str | None]] = []
    head = f"<|im_start|>system\n{talk.system}<|im_end|>\n" if talk.system else ""
    for turn in talk.turns:
        images = "<|vision_start|><|image_pad|><|vision_end|>" * len(turn.scenes)
        content = images + turn.question if turn.images_first else turn.question + images
        result.append((f"{head}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", None))
        result.append((f"{turn.answer}<|im_end|>", turn.task))
        head = "\n"
    return result


def collate(examples: list[Example], image_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right and stack: ids, labels and weights [B, L], pixels [patches, 1536], grids [images, 3].

    No attention mask: under causal attention, padding on the right is seen by padding only.
    """
    longest = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    weights = torch.ones(len(examples), longest)
    for i, e in enumerate(examples):
        ids[i, : len(e.ids)] = torch.tensor(e.ids)
        labels[i, : len(e.ids)] = torch.tensor(e.labels)
        for task, begin, end in e.answers:
            weights[i, begin:end] = TASK_WEIGHTS.get(task, 1.0)
    batch = {"input_ids": ids, "labels": labels, "weights": weights}
    batch["mm_token_type_ids"] = (ids == image_id).int()
    if any(e.pixels is not None for e in examples):
        batch["pixel_values"] = torch.from_numpy(np.concatenate([e.pixels for e in examples if e.pixels is not None]))
        batch["image_grid_thw"] = torch.from_numpy(np.concatenate([e.grids for e in examples if e.grids is not None]))
    return batch
