"""The text model, tensor parallel over the gang: attention heads, MLP and vocabulary are split, KV heads replicated
when there are fewer of them than ranks. Two all-reduces a layer, one for the embedding, one all-gather for the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron.attention.interface import ReadsBlocks
from neuron.kv_blocks import KVBlocks
from neuron.models.qwen3_vl.config import Qwen3VLConfig, TextConfig
from neuron.models.qwen3_vl.weights import Checkpoint
from neuron.ops.before import HeadNorm, RmsNorm, SwiGlu
from neuron.ops.interface import LayerParts, Linear, Ops

if TYPE_CHECKING:
    from neuron.collectives import Collectives


class VocabEmbedding(nn.Module):
    """This rank's rows of the token table, [ceil(vocab / world), hidden]."""

    def __init__(self, checkpoint: Checkpoint, name: str, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives
        self.weight = nn.Buffer(checkpoint.padded_rows(name, collectives.rank, collectives.world_size))
        # A tensor, not a number: a program that is compiled with it is the same on every rank.
        self.first = nn.Buffer(torch.tensor(collectives.rank * self.weight.shape[0]))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden], complete on every rank."""
        if self.collectives.world_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.collectives.all_reduce(torch.where(mine[:, None], rows, 0.0))


class MRope(nn.Module):
    """Rotary angles of three-axis positions; the axes' frequencies are interleaved (T H W T H W ... T T)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.frequencies = nn.Buffer(1.0 / config.rope_theta**exponents)
        axis = torch.zeros(half, dtype=torch.int64)
        for which in (1, 2):
            axis[which : 3 * config.mrope_section[which] : 3] = which
        self.axis = nn.Buffer(axis)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[3, T] -> cos and sin [T, 1, head_dim]; sin is negative in its first half, as the operators want it."""
        angles = positions.index_select(0, self.axis).t() * self.frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


class TextLayer(nn.Module):
    """Pre-norm attention and gated MLP, this rank's part."""

    def __init__(
        self, config: Qwen3VLConfig, checkpoint: Checkpoint, index: int, name: str, collectives: Collectives, ops: Ops
    ) -> None:
        super().__init__()
        rank, world, eps = collectives.rank, collectives.world_size, config.text.rms_norm_eps
        self.index = index
        self.collectives = collectives
        self.ops = ops
        num_heads, kv_heads = config.text.num_heads // world, config.local_kv_heads(rank, world)
        kv_rows = (kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim)
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = (
            checkpoint.rows(f"{attention}.q_proj.weight", rank, world),
            checkpoint.row_range(f"{attention}.k_proj.weight", *kv_rows),
            checkpoint.row_range(f"{attention}.v_proj.weight", *kv_rows),
        )
        gate_up = [checkpoint.rows(f"{mlp}.{part}_proj.weight", rank, world) for part in ("gate", "up")]
        q_norm, k_norm = (checkpoint.whole(f"{attention}.{which}_norm.weight") for which in ("q", "k"))
        norm1 = RmsNorm(checkpoint.whole(f"{name}.input_layernorm.weight"), eps)
        norm2 = RmsNorm(checkpoint.whole(f"{name}.post_attention_layernorm.weight"), eps)
        self.qkv = ops.linear(torch.cat(qkv), before=norm1)
        self.head_norm = HeadNorm(torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(len(kv_heads), -1))), eps)
        self.out = ops.linear(checkpoint.columns(f"{attention}.o_proj.weight", rank, world))
        self.gate_up = ops.linear(torch.cat(gate_up), before=norm2)
        self.down = ops.linear(checkpoint.columns(f"{mlp}.down_proj.weight", rank, world), before=SwiGlu())
        maps = self.qkv, self.out, self.gate_up, self.down
        self.parts = LayerParts(*maps, num_heads, len(kv_heads), config.head_dim, self.head_norm)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv: KVBlocks,
        write_slots: Tensor,
        attend: ReadsBlocks,
    ) -> Tensor:
        """x [T, hidden]; the keys at write_slots [T] are stored before attention reads them."""
        q = self.ops.rotate_and_store(self.qkv(x), self.head_norm, *rope, kv, self.index, write_slots)
        x = self._join(self.out, attend(self.index, q), x)
        return self._join(self.down, self.gate_up(x), x)

    def _join(self, linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
        """The residual and the sum over all ranks."""
        if self.collectives.world_size == 1:
            return linear(x, residual)
        return residual + self.collectives.all_reduce(linear(x))


class TextModel(nn.Module):
    """Token ids, or rows that replace them, to logits."""

    def __init__(self, config: Qwen3VLConfig, checkpoint: Checkpoint, collectives: Collectives, ops: Ops) -> None:
        super().__init__()
        prefix = "model.language_model"
        self.collectives = collectives
        self.vocab_size = config.vocab_size
        self.hidden_size = config.text.hidden_size
        self.embedding = VocabEmbedding(checkpoint, f"{prefix}.embed_tokens.weight", collectives)
        self.rope = MRope(config.text)
        names = [f"{prefix}.layers.{i}" for i in range(config.num_layers)]
        layers = [TextLayer(config, checkpoint, i, name, collectives, ops) for i, name in enumerate(names)]
        self.layers = nn.ModuleList(layers)
        # Where no other rank has to be asked between them.
        self.at_once = ops.layers([layer.parts for layer in layers]) if collectives.world_size == 1 else None
        norm = RmsNorm(checkpoint.whole(f"{prefix}.norm.weight"), config.text.rms_norm_eps)
        head: Tensor = self.embedding.weight  # lies in memory once more: linear maps keep weights as they read them
        if not config.tie_word_embeddings:
            head = checkpoint.padded_rows("lm_head.weight", collectives.rank, collectives.world_size)
        self.head = ops.linear(head, before=norm)

    def forward(
        self,
        x: Tensor,
        rope_positions: Tensor,
        kv: KVBlocks,
        write_slots: Tensor,
        attend: ReadsBlocks,
        deepstack: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """x [T, hidden] through all layers; deepstack [T, hidden] parts are added behind the first ones."""
        rope = self.rope(rope_positions, x.dtype)
        if self.at_once is not None:
            return self.at_once(range(len(self.layers)), x, rope, attend, write_slots, deepstack)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, kv, write_slots, attend)
            if index < len(deepstack):
                x = x + deepstack[index]
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] float32, complete on every rank."""
        logits = self.head(x)
        return self.collectives.all_gather(logits, dim=-1)[:, : self.vocab_size].float()
