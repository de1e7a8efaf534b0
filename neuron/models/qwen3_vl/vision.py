"""The vision tower: one attention block of patches in, merged embeddings out. Every rank has all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuron.attention.interface import Attention, ReadsPatches
from neuron.models.interface import VisionBlock
from neuron.models.qwen3_vl.config import VisionConfig
from neuron.models.qwen3_vl.weights import Checkpoint
from neuron.ops.before import Gelu, LayerNorm
from neuron.ops.interface import LayerParts, Ops

NORM_EPS = 1e-6


def affine(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor]:
    """Weight and bias."""
    return checkpoint.whole(f"{name}.weight"), checkpoint.whole(f"{name}.bias")


class VisionLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint, name: str, ops: Ops) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.ops = ops
        norm1, norm2 = (LayerNorm(*affine(checkpoint, f"{name}.norm{i}"), NORM_EPS) for i in (1, 2))
        gelu = Gelu("tanh" if config.hidden_act == "gelu_pytorch_tanh" else "none")
        self.qkv = ops.linear(*affine(checkpoint, f"{name}.attn.qkv"), before=norm1)
        self.proj = ops.linear(*affine(checkpoint, f"{name}.attn.proj"))
        self.fc1 = ops.linear(*affine(checkpoint, f"{name}.mlp.linear_fc1"), before=norm2)
        self.fc2 = ops.linear(*affine(checkpoint, f"{name}.mlp.linear_fc2"), before=gelu)
        maps = self.qkv, self.proj, self.fc1, self.fc2
        self.parts = LayerParts(*maps, config.num_heads, config.num_heads, config.head_dim, head_norm=None)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: ReadsPatches) -> Tensor:
        """x [P, hidden]; cos, sin [P, 1, head_dim], sin negative in its first half."""
        q, k, v = self.ops.rotate(self.qkv(x).view(len(x), 3, self.num_heads, -1), cos, sin)
        x = self.proj(attend(q, k, v), x)
        return self.fc2(self.fc1(x), x)


class PatchMerger(nn.Module):
    """merge x merge patches, which follow one another, to one embedding."""

    def __init__(self, checkpoint: Checkpoint, name: str, merge_area: int, norm_after_merge: bool, ops: Ops) -> None:
        super().__init__()
        self.merge_area = merge_area
        norm = LayerNorm(*affine(checkpoint, f"{name}.norm"), NORM_EPS)
        self.norm = None if norm_after_merge else norm
        self.fc1 = ops.linear(*affine(checkpoint, f"{name}.linear_fc1"), before=norm if norm_after_merge else None)
        self.fc2 = ops.linear(*affine(checkpoint, f"{name}.linear_fc2"), before=Gelu("none"))

    def forward(self, x: Tensor) -> Tensor:
        """[P, hidden] -> [P / merge_area, out_hidden]."""
        if self.norm is not None:
            x = self.norm(x)
        return self.fc2(self.fc1(x.view(len(x) // self.merge_area, -1)))


class VisionTower(nn.Module):
    """The encoder graph."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint, ops: Ops, prefix: str = "model.visual") -> None:
        super().__init__()
        self.deepstack_indexes = config.deepstack_indexes
        patch = checkpoint.whole(f"{prefix}.patch_embed.proj.weight")  # [hidden, channels, frames, patch, patch]
        # The kernel covers a patch exactly, and the frames of a still image are the same: each value comes once.
        patch_weight = patch.float().sum(2).flatten(1).to(patch.dtype)
        self.embedding = ops.linear(patch_weight, checkpoint.whole(f"{prefix}.patch_embed.proj.bias"))
        self.position_table = nn.Buffer(checkpoint.whole(f"{prefix}.pos_embed.weight"))
        axis_dim = config.head_dim // 2
        exponents = torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim
        self.rope_frequencies = nn.Buffer(1.0 / config.rope_theta**exponents)
        layers = [VisionLayer(config, checkpoint, f"{prefix}.blocks.{i}", ops) for i in range(config.depth)]
        self.layers = nn.ModuleList(layers)
        self.ops = ops
        self.at_once = ops.layers([layer.parts for layer in layers])
        merge_area = config.spatial_merge_size**2
        self.merger = PatchMerger(checkpoint, f"{prefix}.merger", merge_area, norm_after_merge=False, ops=ops)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(checkpoint, f"{prefix}.deepstack_merger_list.{i}", merge_area, norm_after_merge=True, ops=ops)
            for i in range(len(config.deepstack_indexes))
        )

    def forward(self, block: VisionBlock[Tensor], attention: Attention) -> Tensor:
        """Embeddings [P / merge_area, fat_dim]: the main part, then one part for each deepstack level."""
        pixels, position_rows, position_weights, rope_positions, segment_ids = block
        dtype = self.position_table.dtype
        x = self.embedding(pixels.to(dtype))
        x = x + self.ops.weighted_rows(self.position_table, position_rows, position_weights).to(dtype)
        # Padding may hold anything, and 0 * NaN would reach the attention's sums.
        x = torch.where((segment_ids >= 0)[:, None], x, 0.0)

        angles = (rope_positions[:, :, None] * self.rope_frequencies).flatten(1)  # [P, head_dim / 2]: rows, columns
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1)[:, None]
        sin = torch.cat((-sin, sin), dim=-1)[:, None]
        attend = attention.patches(segment_ids, dtype)
        levels, done = [], 0
        for index in sorted(self.deepstack_indexes):
            x = self._through(range(done, index + 1), x, cos, sin, attend)
            levels.append(self.deepstack_mergers[self.deepstack_indexes.index(index)](x))
            done = index + 1
        x = self._through(range(done, len(self.layers)), x, cos, sin, attend)
        return torch.cat((self.merger(x), *levels), dim=-1)

    def _through(self, layers: range, x: Tensor, cos: Tensor, sin: Tensor, attend: ReadsPatches) -> Tensor:
        if self.at_once is not None and layers:
            return self.at_once(layers, x, (cos, sin), attend)
        for index in layers:
            x = self.layers[index](x, cos, sin, attend)
        return x
