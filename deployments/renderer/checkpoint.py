"""What the Renderer reads of a checkpoint folder: tokenizer, image processor, chat template, special token ids."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.engine import EngineConfig

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint folder without its weights."""

    tokenizer: Any
    """transformers' fast tokenizer."""
    image_processor: Any
    """transformers' Pillow-backed image processor: it returns numpy arrays and needs neither torch nor torchvision."""
    chat_template: str
    image_token_id: int
    media_token_ids: frozenset[int]
    """Placeholder tokens of images and videos: only the chat template may write them into a prompt."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the embedding table: token ids of a prompt are below it."""
    sampling_defaults: dict[str, Any]
    """Sampling parameters that generation_config.json sets, for requests that leave them out."""


def load_checkpoint(config: EngineConfig, *, hide_torch: bool = False) -> Checkpoint:
    """Read the model's folder; nothing is downloaded. Raises OSError or ValueError naming what is missing or wrong.

    `hide_torch` imports transformers as if torch were not installed (1.5 s and 75 MB instead of 6 s and 430 MB, two
    cores). It holds for the whole process, so it is for the Renderer's own, and only where nothing imported them yet.
    """
    folder = config.model.folder
    model = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json")
    with _torch_hidden() if hide_torch else contextlib.nullcontext():
        from transformers import AutoImageProcessor, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    text_config = model.get("text_config", model)
    if "image_token_id" not in model:
        raise ValueError(f"{folder / 'config.json'}: no image_token_id: expected a vision-language checkpoint")
    image_token_id = int(model["image_token_id"])
    media = {image_token_id} | ({int(model["video_token_id"])} if model.get("video_token_id") is not None else set())
    eos = generation.get("eos_token_id", text_config.get("eos_token_id"))
    eos_ids = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos_ids:
        eos_ids.append(tokenizer.eos_token_id)
    return Checkpoint(
        tokenizer=tokenizer,
        image_processor=image_processor,
        chat_template=_chat_template(folder, tokenizer),
        image_token_id=image_token_id,
        media_token_ids=frozenset(media),
        eos_token_ids=tuple(eos_ids),
        vocab_size=int(text_config.get("vocab_size", len(tokenizer))),
        sampling_defaults={k: generation[k] for k in SAMPLING_DEFAULTS if generation.get(k) is not None},
    )


def _chat_template(folder: Path, tokenizer: Any) -> str:
    """Where the folder keeps it: with the tokenizer (tokenizer_config.json, chat_template.jinja) or the processor."""
    template = tokenizer.chat_template or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ValueError(f"{folder}: no chat template: expected chat_template.jinja beside the tokenizer")
    return template


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    tree = json.loads(path.read_text())
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


@contextlib.contextmanager
def _torch_hidden() -> Iterator[None]:
    """transformers imports torch where it finds it, though tokenizers and Pillow image processors use none of it.

    A None in sys.modules is how Python itself marks a module as not to be found. transformers looks once, at import.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it warns that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment]  # the mark of the import system
    try:
        yield
    finally:
        del sys.modules["torch"]
