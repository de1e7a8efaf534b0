"""Bytes that one rank of Qwen3-VL needs, from the config alone: weights exactly, activations as an upper estimate.

The estimate counts what `text`, `vision` and masked attention allocate, operation by operation, with attention that is
not fused: a change there that moves memory belongs here too. A compiler, or attention by sequence, may need less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuron.models.qwen3_vl.config import Qwen3VLConfig

FLOAT32, INT64 = 4, 8
"""Bytes of a value."""
PER_SCORE = 2 * FLOAT32
"""Bytes of an attention score and its probability: without a fused kernel both are kept, in float32 at any dtype."""


@dataclass(frozen=True)
class Qwen3VLMemory:
    """Implements `interface.RankMemory`. An estimate is what lives through a graph plus its hungriest stage."""

    config: Qwen3VLConfig
    world_size: int
    itemsize: int
    """Bytes of a weight, an activation, or a cached value."""

    @property
    def _heads(self) -> int:
        """Query heads of this rank."""
        return self.config.text.num_heads // self.world_size

    @property
    def _kv_heads(self) -> int:
        return self.config.num_local_kv_heads(self.world_size)

    @property
    def _vocab_rows(self) -> int:
        """This rank's part of the vocabulary, padding included."""
        return -(-self.config.text.vocab_size // self.world_size)

    def weights(self) -> int:
        """Equal to the loaded model's `nbytes` with torch's operators; what keeps its own type, too: rotary tables, the
        first row.
        """
        text_table = INT64 + self.config.text.head_dim // 2 * (FLOAT32 + INT64)
        vision_table = len(range(0, self.config.vision.head_dim // 2, 2)) * FLOAT32
        return (self._text_values() + self._vision_values()) * self.itemsize + text_table + vision_table

    def _text_values(self) -> int:
        """Split: heads, MLP, vocabulary. KV heads are repeated where there are fewer than ranks; norms are whole."""
        text = self.config.text
        attention = (2 * self._heads + 2 * self._kv_heads) * text.head_dim * text.hidden_size
        qk_norm = (self._heads + self._kv_heads) * text.head_dim
        mlp = 3 * text.hidden_size * (text.intermediate_size // self.world_size)
        layer = attention + qk_norm + mlp + 2 * text.hidden_size
        return text.num_layers * layer + text.hidden_size + 2 * self._vocab_rows * text.hidden_size

    def _vision_values(self) -> int:
        """The whole tower: the encoder is data parallel."""
        vision = self.config.vision
        hidden, merged = vision.hidden_size, vision.hidden_size * self.config.merge_area
        attention = _affine(hidden, 3 * hidden) + _affine(hidden, hidden)
        mlp = _affine(hidden, vision.intermediate_size) + _affine(vision.intermediate_size, hidden)
        layer = attention + mlp + 2 * 2 * hidden
        merger = _affine(merged, merged) + _affine(merged, vision.out_hidden_size)
        levels = len(vision.deepstack_indexes)
        norms = 2 * hidden + levels * 2 * merged
        inputs = _affine(self.config.patch_dim, hidden) + vision.position_grid**2 * hidden
        return inputs + vision.depth * layer + (1 + levels) * merger + norms

    def encode(self, patches: int) -> int:
        """Throughout: pixels, hidden states, rotary tables, mask [P, P], embeddings. Stages: the position table's
        rows, attention with the scores of all heads, MLP, mergers, the exchange with its copies.
        """
        vision, size = self.config.vision, self.itemsize
        hidden = patches * vision.hidden_size
        embeddings = patches // self.config.merge_area * self.config.fat_dim * size
        rotary = 4 * patches * vision.head_dim * FLOAT32
        throughout = patches * self.config.patch_dim * FLOAT32 + 2 * hidden * size + rotary + embeddings
        throughout += patches**2 * (size + 1)
        positions = patches * self.config.patch_dim * size + 4 * hidden * (size + FLOAT32)
        # normed, qkv; q and k while they turn, in float32; q, k, v and the result of attention, in float32
        attention = hidden * (4 * size + 6 * FLOAT32 + 4 * FLOAT32) + vision.num_heads * patches**2 * PER_SCORE
        mlp = (2 * hidden + 2 * patches * vision.intermediate_size) * size
        mergers = 3 * hidden * size + embeddings
        exchange = 3 * embeddings
        return throughout + max(positions, attention, mlp, mergers, exchange)

    def prefill(self, tokens: int, context: int, num_logits: int, images: bool) -> int:
        """Throughout: hidden states, mask [T, C]; with images, their rows, gathered and taken apart. Stages: a layer,
        with keys and values repeated for every query head; the gather; logits of the whole vocabulary.
        """
        size = self.itemsize
        rows = tokens * self.config.fat_dim * size if images else 0
        hidden = tokens * self.config.text.hidden_size * size
        mask = tokens * context * (size + 2)
        layer = self._layer(tokens, context, tokens * context, self._heads)
        return hidden + 2 * rows + max(rows // self.world_size, mask + layer, self._logits(num_logits))

    def decode(self, seqs: int, context: int) -> int:
        """Throughout: hidden states, mask, slots. Stages: a layer, logits of the whole vocabulary."""
        hidden = seqs * self.config.text.hidden_size * self.itemsize
        mask = seqs * context * (self.itemsize + 2 + 3 * INT64)
        layer = self._layer(seqs, seqs * context, seqs * context, self._kv_heads)
        return hidden + max(mask + layer, self._logits(seqs))

    def _layer(self, rows: int, keys: int, scores: int, key_heads: int) -> int:
        """One text layer on `rows` tokens: attention, with `scores` of each query head, or MLP.

        keys: tokens gathered of each KV head, and in float32 copied for `key_heads` heads: k, k scaled, v.
        """
        text, size = self.config.text, self.itemsize
        hidden = rows * text.hidden_size * size
        rotary = 4 * rows * text.head_dim * size
        heads = rows * (self._heads + 2 * self._kv_heads) * text.head_dim
        read = keys * text.head_dim * (2 * self._kv_heads * (size + FLOAT32) + 3 * key_heads * FLOAT32)
        # normed; qkv; q and k while they are normed and turned; q and the result of attention, in float32
        attention = hidden + heads * (5 * size + 2 * FLOAT32) + read + self._heads * scores * PER_SCORE
        mlp = 3 * hidden + 4 * rows * (text.intermediate_size // self.world_size) * size
        return rotary + max(attention, mlp)

    def _logits(self, rows: int) -> int:
        """This rank's part, all parts gathered and joined, and all in float32."""
        whole = rows * self._vocab_rows * self.world_size
        return 2 * rows * self.config.text.hidden_size * self.itemsize + whole * (3 * self.itemsize + FLOAT32)


def _affine(inputs: int, outputs: int) -> int:
    """Values of a linear map with its bias."""
    return inputs * outputs + outputs
