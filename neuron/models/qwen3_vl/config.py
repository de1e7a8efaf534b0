"""Qwen3-VL's config.json as plain dataclasses, and the checks that it can be split over a gang."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron.models.interface import CheckpointError
from neuron.models.qwen3_vl.memory import Qwen3VLMemory

TEXT_ACTIVATIONS = ("silu",)
VISION_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


class _Section:
    """One JSON object; reading a missing or odd field raises CheckpointError with its path."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def section(self, name: str) -> _Section:
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.path}.{name} = {value!r}: expected an object")
        return _Section(value, f"{self.path}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.path}.{name} = {value!r}: expected an integer")
        return value

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self.values.get(name, default)
        if not isinstance(value, list | tuple) or not all(isinstance(entry, int) for entry in value):
            raise CheckpointError(f"{self.path}.{name} = {value!r}: expected a list of integers")
        return tuple(value)

    def choice(self, name: str, accepted: tuple[Any, ...], default: Any) -> Any:
        value = self.values.get(name, default)
        if value not in accepted:
            raise CheckpointError(f"{self.path}.{name} = {value!r}: expected {' or '.join(map(repr, accepted))}")
        return value


@dataclass(frozen=True)
class VisionConfig:
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    position_grid: int
    """Side of the square table of learned position embeddings."""
    deepstack_indexes: tuple[int, ...]
    """Vision layers whose output, merged, is added to the first text layers."""
    hidden_act: str
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class TextConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    """Rotary frequencies that turn with the temporal, vertical and horizontal position, interleaved."""
    max_position_embeddings: int


@dataclass(frozen=True)
class Qwen3VLConfig:
    """A whole checkpoint's shape. Implements `interface.ModelConfig`."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    model_type: str = "qwen3_vl"

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def num_layers(self) -> int:
        return self.text.num_layers

    @property
    def head_dim(self) -> int:
        return self.text.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.text.num_kv_heads

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings

    @property
    def patch_dim(self) -> int:
        """Of one frame: those of a still image are all the same."""
        return self.vision.in_channels * self.vision.patch_size**2

    @property
    def merge_area(self) -> int:
        return self.vision.spatial_merge_size**2

    @property
    def fat_dim(self) -> int:
        return self.vision.out_hidden_size * (1 + len(self.vision.deepstack_indexes))

    def num_local_kv_heads(self, world_size: int) -> int:
        """KV heads of one rank: replicated when there are fewer of them than ranks."""
        return max(1, self.text.num_kv_heads // world_size)

    def local_kv_heads(self, rank: int, world_size: int) -> range:
        """The KV heads that the query heads of `rank` use."""
        count = self.num_local_kv_heads(world_size)
        first = rank * self.text.num_kv_heads // world_size
        return range(first, first + count)

    def num_embeddings(self, width: int, height: int) -> int:
        """Of an image of so many pixels; each side is rounded to whole embeddings."""
        side = self.vision.patch_size * self.vision.spatial_merge_size
        return max(1, round(width / side)) * max(1, round(height / side))

    def memory(self, world_size: int, itemsize: int) -> Qwen3VLMemory:
        """What one of `world_size` ranks needs, at `itemsize` bytes for a value."""
        return Qwen3VLMemory(self, world_size, itemsize)

    def validate(self, world_size: int) -> None:
        """Raises CheckpointError naming the field that does not split over `world_size` ranks."""
        ranks = f"parallel.world_size = {world_size}"
        for name, value in (
            ("text_config.num_attention_heads", self.text.num_heads),
            ("text_config.intermediate_size", self.text.intermediate_size),
            ("vision_config.out_hidden_size * (1 + deepstack levels)", self.fat_dim),
        ):
            if value % world_size:
                raise CheckpointError(f"{name} = {value}: expected a multiple of {ranks}")
        kv_heads = self.text.num_kv_heads
        if kv_heads % world_size and world_size % kv_heads:
            raise CheckpointError(
                f"text_config.num_key_value_heads = {kv_heads}: expected a multiple or a divisor of {ranks}"
            )

    @classmethod
    def from_folder(cls, folder: Path) -> Qwen3VLConfig:
        """Read config.json and, if there is one, generation_config.json. Raises CheckpointError."""
        root = _Section(json.loads((folder / "config.json").read_text()), "config")
        text, vision = root.section("text_config"), root.section("vision_config")
        generation = folder / "generation_config.json"
        eos = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        if eos is None:
            eos = text.values.get("eos_token_id", root.values.get("eos_token_id"))
        tied = root.values.get("tie_word_embeddings", text.values.get("tie_word_embeddings", False))
        dtype = next(
            (s.values[key] for s in (root, text) for key in ("dtype", "torch_dtype") if s.values.get(key)), "float32"
        )
        config = cls(
            text=_text_config(text),
            vision=_vision_config(vision),
            image_token_id=root.integer("image_token_id"),
            tie_word_embeddings=bool(tied),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            torch_dtype=dtype,
        )
        if config.vision.out_hidden_size != config.text.hidden_size:
            raise CheckpointError(
                f"config.vision_config.out_hidden_size = {config.vision.out_hidden_size}: "
                f"expected text_config.hidden_size = {config.text.hidden_size}"
            )
        if len(config.vision.deepstack_indexes) > config.text.num_layers:
            raise CheckpointError(
                f"config.vision_config.deepstack_visual_indexes = {list(config.vision.deepstack_indexes)}: "
                f"expected at most text_config.num_hidden_layers = {config.text.num_layers} levels"
            )
        return config


def _text_config(section: _Section) -> TextConfig:
    section.choice("hidden_act", TEXT_ACTIVATIONS, "silu")
    section.choice("attention_bias", (False,), False)
    # transformers 5 writes rope_parameters; earlier checkpoints have rope_scaling and rope_theta beside it.
    rope_name = "rope_parameters" if section.values.get("rope_parameters") else "rope_scaling"
    rope = _Section(section.values.get(rope_name) or {}, f"{section.path}.{rope_name}")
    rope.choice("rope_type", ("default",), rope.values.get("type", "default"))
    heads = section.integer("num_attention_heads")
    head_dim = section.integer("head_dim", section.integer("hidden_size") // heads)
    mrope = rope.integers("mrope_section", (24, 20, 20))
    if len(mrope) != 3 or sum(mrope) != head_dim // 2:
        raise CheckpointError(
            f"{rope.path}.mrope_section = {list(mrope)}: expected three numbers, in sum head_dim / 2 = {head_dim // 2}"
        )
    kv_heads = section.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{section.path}.num_key_value_heads = {kv_heads}: expected a divisor of num_attention_heads = {heads}"
        )
    return TextConfig(
        vocab_size=section.integer("vocab_size"),
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_layers=section.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(section.values.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.values.get("rope_theta", section.values.get("rope_theta", 500_000.0))),
        mrope_section=(mrope[0], mrope[1], mrope[2]),
        max_position_embeddings=section.integer("max_position_embeddings", 128_000),
    )


def _vision_config(section: _Section) -> VisionConfig:
    positions = section.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"{section.path}.num_position_embeddings = {positions}: expected a square number")
    depth = section.integer("depth")
    deepstack = section.integers("deepstack_visual_indexes", (8, 16, 24))
    if list(deepstack) != sorted(set(deepstack)) or any(not 0 <= layer < depth for layer in deepstack):
        raise CheckpointError(
            f"{section.path}.deepstack_visual_indexes = {list(deepstack)}: expected ascending layers < depth = {depth}"
        )
    hidden, heads = section.integer("hidden_size"), section.integer("num_heads")
    if hidden % (4 * heads):
        raise CheckpointError(
            f"{section.path}.hidden_size = {hidden}: expected a multiple of 4 * num_heads = {4 * heads}"
        )
    rope = section.values.get("rope_parameters") or {}
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size"),
        num_heads=heads,
        in_channels=section.integer("in_channels", 3),
        patch_size=section.integer("patch_size", 16),
        spatial_merge_size=section.integer("spatial_merge_size", 2),
        out_hidden_size=section.integer("out_hidden_size"),
        position_grid=math.isqrt(positions),
        deepstack_indexes=deepstack,
        hidden_act=section.choice("hidden_act", VISION_ACTIVATIONS, "gelu_pytorch_tanh"),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
    )
