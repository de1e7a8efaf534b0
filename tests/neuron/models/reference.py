"""Checkpoints to test with, and what `transformers` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.engine import ROOT
from tests.neuron.models.gang import Image

DEMO = ROOT / "configs/models/digits-vl"


def make_checkpoint(
    folder: Path,
    *,
    kv_heads: int = 4,
    tied: bool = True,
    layers: int = 3,
    shard_size: str = "1GB",
    seed: int = 0,
) -> Path:
    """A small random Qwen3-VL whose outputs are far from flat: no weight is at its usual initial value."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 300,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": kv_heads,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
            "tie_word_embeddings": tied,
        },
        vision_config={
            "depth": layers + 1,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 96,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=299,
        video_token_id=298,
        vision_start_token_id=297,
        vision_end_token_id=296,
        tie_word_embeddings=tied,
    )
    model = Qwen3VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * (1.5 * weight[0].numel() ** -0.5))
            else:
                weight.copy_(noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


class Reference:
    """transformers' implementation of a checkpoint, in float32."""

    def __init__(self, folder: Path):
        from transformers import Qwen3VLForConditionalGeneration

        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.config = self.model.config

    def _pixels(self, images: Sequence[Image]) -> Tensor:
        """As transformers takes them: every frame, of a still image the same again."""
        vision = self.config.vision_config
        pixels = np.concatenate([image.pixels for image in images])
        one = pixels.reshape(len(pixels), vision.in_channels, 1, -1)
        return torch.from_numpy(one.repeat(vision.temporal_patch_size, axis=2).reshape(len(pixels), -1))

    def _inputs(self, tokens: Sequence[int], images: Sequence[Image]) -> dict[str, Tensor]:
        ids = torch.tensor([list(tokens)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = (ids == self.config.image_token_id).int()
        if images:
            inputs["pixel_values"] = self._pixels(images)
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        return inputs

    @torch.no_grad()
    def greedy(self, tokens: Sequence[int], images: Sequence[Image], count: int) -> tuple[list[int], Tensor]:
        """`count` tokens behind the prompt, and the logits [len(tokens) + count - 1, vocab] that lead to them."""
        inputs = self._inputs(tokens, images)
        prompt = self.model(**inputs).logits[0]
        out = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(tokens) :].tolist(), torch.cat((prompt[:-1], *out.logits))

    @torch.no_grad()
    def embeddings(self, image: Image) -> Tensor:
        """[tokens, fat_dim]: the main part, then the deepstack levels."""
        grids = torch.tensor([image.grid])
        out = self.model.model.get_image_features(self._pixels([image]), grids, return_dict=True)
        return torch.cat([out.pooler_output[0], *(level[0] for level in out.deepstack_features)], dim=-1)


def make_image(name: str, h: int, w: int, patch_dim: int, seed: int) -> Image:
    """h x w patches of noise."""
    pixels = np.random.default_rng(seed).standard_normal((h * w, patch_dim)).astype(np.float32)
    return Image(name, (1, h, w), pixels)
