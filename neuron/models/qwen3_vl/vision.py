"""The vision tower: one attention block of patches in, merged embeddings out. Every rank has all of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron.attention.interface import Attention, ReadsPatches
from neuron.models.interface import VisionBlock
from neuron.models.qwen3_vl.config import VisionConfig
from neuron.models.qwen3_vl.weights import Checkpoint

NORM_EPS = 1e-6


class Affine(nn.Module):
    """Weight and bias of a linear map or of a layer norm."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        super().__init__()
        self.weight = nn.Buffer(checkpoint.whole(f"{name}.weight"))
        self.bias = nn.Buffer(checkpoint.whole(f"{name}.bias"))

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPS)


class VisionLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint, name: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.gelu = "tanh" if config.hidden_act == "gelu_pytorch_tanh" else "none"
        self.norm1 = Affine(checkpoint, f"{name}.norm1")
        self.norm2 = Affine(checkpoint, f"{name}.norm2")
        self.qkv = Affine(checkpoint, f"{name}.attn.qkv")
        self.proj = Affine(checkpoint, f"{name}.attn.proj")
        self.fc1 = Affine(checkpoint, f"{name}.mlp.linear_fc1")
        self.fc2 = Affine(checkpoint, f"{name}.mlp.linear_fc2")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: ReadsPatches) -> Tensor:
        """x [P, hidden]; cos, sin [P, 1, 1, head_dim], sin negative in its first half."""
        qkv = self.qkv.linear(self.norm1.norm(x)).view(len(x), 3, self.num_heads, -1)
        qk, v = qkv[:, :2], qkv[:, 2]
        qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin).to(v.dtype)
        x = x + self.proj.linear(attend(qk[:, 0], qk[:, 1], v))
        return x + self.fc2.linear(F.gelu(self.fc1.linear(self.norm2.norm(x)), approximate=self.gelu))


class PatchMerger(nn.Module):
    """merge x merge patches, which follow one another, to one embedding."""

    def __init__(self, checkpoint: Checkpoint, name: str, merge_area: int, norm_after_merge: bool) -> None:
        super().__init__()
        self.merge_area = merge_area
        self.norm_after_merge = norm_after_merge
        self.norm = Affine(checkpoint, f"{name}.norm")
        self.fc1 = Affine(checkpoint, f"{name}.linear_fc1")
        self.fc2 = Affine(checkpoint, f"{name}.linear_fc2")

    def forward(self, x: Tensor) -> Tensor:
        """[P, hidden] -> [P / merge_area, out_hidden]."""
        rows = x.shape[0] // self.merge_area
        merged = self.norm.norm(x.view(rows, -1)) if self.norm_after_merge else self.norm.norm(x).view(rows, -1)
        return self.fc2.linear(F.gelu(self.fc1.linear(merged)))


class VisionTower(nn.Module):
    """The encoder graph."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint, prefix: str = "model.visual") -> None:
        super().__init__()
        self.deepstack_indexes = config.deepstack_indexes
        patch = checkpoint.whole(f"{prefix}.patch_embed.proj.weight")  # [hidden, channels, frames, patch, patch]
        # The kernel covers a patch exactly, and the frames of a still image are the same: each value comes once.
        self.patch_weight = nn.Buffer(patch.float().sum(2).flatten(1).to(patch.dtype))
        self.patch_bias = nn.Buffer(checkpoint.whole(f"{prefix}.patch_embed.proj.bias"))
        self.position_table = nn.Buffer(checkpoint.whole(f"{prefix}.pos_embed.weight"))
        axis_dim = config.head_dim // 2
        exponents = torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim
        self.rope_frequencies = nn.Buffer(1.0 / config.rope_theta**exponents)
        self.layers = nn.ModuleList(
            VisionLayer(config, checkpoint, f"{prefix}.blocks.{i}") for i in range(config.depth)
        )
        merge_area = config.spatial_merge_size**2
        self.merger = PatchMerger(checkpoint, f"{prefix}.merger", merge_area, norm_after_merge=False)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(checkpoint, f"{prefix}.deepstack_merger_list.{i}", merge_area, norm_after_merge=True)
            for i in range(len(config.deepstack_indexes))
        )

    def forward(self, block: VisionBlock[Tensor], attention: Attention) -> Tensor:
        """Embeddings [P / merge_area, fat_dim]: the main part, then one part for each deepstack level."""
        pixels, position_rows, position_weights, rope_positions, segment_ids = block
        dtype = self.patch_weight.dtype
        x = F.linear(pixels.to(dtype), self.patch_weight, self.patch_bias)
        x = x + (self.position_table[position_rows] * position_weights[:, :, None]).sum(1).to(dtype)
        # Padding may hold anything, and 0 * NaN would reach the attention's sums.
        x = torch.where((segment_ids >= 0)[:, None], x, 0.0)

        angles = (rope_positions[:, :, None] * self.rope_frequencies).flatten(1)  # [P, head_dim / 2]: rows, columns
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1)[:, None, None]
        sin = torch.cat((-sin, sin), dim=-1)[:, None, None]
        attend = attention.patches(segment_ids, dtype)
        levels = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend)
            if index in self.deepstack_indexes:
                levels.append(self.deepstack_mergers[self.deepstack_indexes.index(index)](x))
        return torch.cat((self.merger(x), *levels), dim=-1)
