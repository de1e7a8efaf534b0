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
        """[3, T] -> cos and sin [T, 1, head_dim]; sin is negative in its first half, as `rotate` wants it."""
        angles = positions.index_select(0, self.axis).t() * self.frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def matrix(*rows: Tensor) -> nn.Buffer:
    """Of a linear map [out, in], in memory input by input: on the CPU the product with 16 rows takes a third to two
    thirds of the time, that with one or with hundreds no longer."""
    return nn.Buffer(torch.cat(rows).t().contiguous().t())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [T, heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Projections(nn.Module):
    """Around attention, for this rank's heads: to queries, keys and values, and back."""

    def __init__(self, config: Qwen3VLConfig, checkpoint: Checkpoint, name: str, collectives: Collectives) -> None:
        super().__init__()
        rank, world = collectives.rank, collectives.world_size
        self.collectives = collectives
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_local_kv_heads(world)
        self.num_heads = config.text.num_heads // world
        self.eps = config.text.rms_norm_eps
        kv_heads = config.local_kv_heads(rank, world)
        kv_rows = (kv_heads.start * self.head_dim, kv_heads.stop * self.head_dim)
        self.qkv = matrix(
            checkpoint.rows(f"{name}.q_proj.weight", rank, world),
            checkpoint.row_range(f"{name}.k_proj.weight", *kv_rows),
            checkpoint.row_range(f"{name}.v_proj.weight", *kv_rows),
        )
        self.out = matrix(checkpoint.columns(f"{name}.o_proj.weight", rank, world))
        q_norm, k_norm = checkpoint.whole(f"{name}.q_norm.weight"), checkpoint.whole(f"{name}.k_norm.weight")
        self.qk_norm = nn.Buffer(torch.cat((q_norm.expand(self.num_heads, -1), k_norm.expand(self.num_kv_heads, -1))))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> q [T, heads, head_dim], k and v [T, kv heads, head_dim], normed and turned."""
        qkv = F.linear(x, self.qkv).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        qk = rotate(F.rms_norm(qk, (self.head_dim,), eps=self.eps) * self.qk_norm, cos, sin)
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v


class TextLayer(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(
        self, config: Qwen3VLConfig, checkpoint: Checkpoint, index: int, name: str, collectives: Collectives
    ) -> None:
        super().__init__()
        rank, world = collectives.rank, collectives.world_size
        self.index = index
        self.collectives = collectives
        self.eps = config.text.rms_norm_eps
        self.projections = Projections(config, checkpoint, f"{name}.self_attn", collectives)
        self.norm1 = nn.Buffer(checkpoint.whole(f"{name}.input_layernorm.weight"))
        self.norm2 = nn.Buffer(checkpoint.whole(f"{name}.post_attention_layernorm.weight"))
        self.gate_up = matrix(
            *(checkpoint.rows(f"{name}.mlp.{part}_proj.weight", rank, world) for part in ("gate", "up"))
        )
        self.down = matrix(checkpoint.columns(f"{name}.mlp.down_proj.weight", rank, world))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv: KVBlocks,
        write_slots: Tensor,
        attend: ReadsBlocks,
    ) -> Tensor:
        """x [T, hidden]; the keys at write_slots [T] are stored before attention reads them."""
        q, k, v = self.projections(F.rms_norm(x, self.norm1.shape, self.norm1, self.eps), *rope)
        kv.write(self.index, write_slots, k, v)
        x = x + self.collectives.all_reduce(F.linear(attend(self.index, q), self.projections.out))
        gate, up = F.linear(F.rms_norm(x, self.norm2.shape, self.norm2, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + self.collectives.all_reduce(F.linear(F.silu(gate) * up, self.down))


class TextModel(nn.Module):
    """Token ids, or rows that replace them, to logits."""

    def __init__(self, config: Qwen3VLConfig, checkpoint: Checkpoint, collectives: Collectives) -> None:
        super().__init__()
        prefix = "model.language_model"
        self.collectives = collectives
        self.vocab_size = config.vocab_size
        self.hidden_size = config.text.hidden_size
        self.eps = config.text.rms_norm_eps
        self.embedding = VocabEmbedding(checkpoint, f"{prefix}.embed_tokens.weight", collectives)
        self.rope = MRope(config.text)
        self.layers = nn.ModuleList(
            TextLayer(config, checkpoint, i, f"{prefix}.layers.{i}", collectives) for i in range(config.num_layers)
        )
        self.norm = nn.Buffer(checkpoint.whole(f"{prefix}.norm.weight"))
        head = None  # the embedding's
        if not config.tie_word_embeddings:
            head = nn.Buffer(checkpoint.padded_rows("lm_head.weight", collectives.rank, collectives.world_size))
        self.lm_head: Tensor | None = head

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
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, kv, write_slots, attend)
            if index < len(deepstack):
                x = x + deepstack[index]
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] float32, complete on every rank."""
        head = self.embedding.weight if self.lm_head is None else self.lm_head
        logits = F.linear(F.rms_norm(x, self.norm.shape, self.norm, self.eps), head)
        return self.collectives.all_gather(logits, dim=-1)[:, : self.vocab_size].float()
