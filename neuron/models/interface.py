"""What a model family offers to the ModelRunner, and the inputs of its graphs.

A graph is a function of fixed-shape tensors: T, C, S, M and P below are bucket sizes, and rows beyond the real ones are
padding. Index tensors are int64. Every graph writes its buffers in place. Torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

    from neuron.kernels import Kernels
    from neuron.kv_blocks import KVBlocks

A = TypeVar("A")
"""Array or tensor."""

Grid = tuple[int, int, int]
"""(t, h, w) of an image in patches, before merging."""


class CheckpointError(ValueError):
    """A checkpoint folder cannot be served: the message names the file, the field, its value and what was expected."""


class MRopeItem(NamedTuple):
    """Where one image lies in a token sequence."""

    offset: int
    """First image token."""
    length: int
    """Image tokens."""
    grid: Grid


class VisionBlock(NamedTuple, Generic[A]):
    """Inputs of `encode`: images packed into an attention block of P patches. Prepared as arrays, used as tensors."""

    pixels: A
    """[P, patch_dim] float32, each image's patches in the processor's order."""
    position_rows: A
    """[P, 4] rows of the learned position table to mix for each patch."""
    position_weights: A
    """[P, 4] float32, their weights."""
    rope_positions: A
    """[P, 2] (row, column) of each patch in its image."""
    segment_ids: A
    """[P] which patches see each other, those of one image: ascending from 0; -1, at the end: padding."""


class PrefillInputs(NamedTuple):
    """Chunks of several requests, packed flat. `query_seq` and `context_seq` name a request within the step: 0, 1 ...

    Both ascend, padding last, and a request's context is ordered by position and ends with its chunk. The first row is
    real: a step without tokens runs no graph.
    """

    token_ids: torch.Tensor
    """[T]; padding: 0."""
    rope_positions: torch.Tensor
    """[3, T] rotary positions (not the positions in the sequence); padding: 0."""
    slot_mapping: torch.Tensor
    """[T] KV slot of each token, block * block_size + offset; padding: a slot of the scratch block."""
    query_seq: torch.Tensor
    """[T]; padding: -1."""
    query_pos: torch.Tensor
    """[T] position in the sequence; padding: 0."""
    context_slots: torch.Tensor
    """[C] KV slots of every token that a query may read, the step's own among them; padding: anything."""
    context_seq: torch.Tensor
    """[C]; padding: -1."""
    context_pos: torch.Tensor
    """[C] position in the sequence; padding: 0."""
    logits_index: torch.Tensor
    """[S] rows of T whose logits are wanted; padding: 0."""


class ImageInputs(NamedTuple):
    """The image tokens of a prefill step. A step without any passes None and runs a graph without the gather."""

    encoder_cache: torch.Tensor
    """[rows, fat_dim / world_size] this rank's columns: all of EncoderCacheBlocks' buffer, its blocks flattened."""
    embed_rows: torch.Tensor
    """[T] row of each image token; a scratch row where there is none."""
    is_image: torch.Tensor
    """[T] bool."""


class DecodeInputs(NamedTuple):
    """One new token of each of S sequences."""

    token_ids: torch.Tensor
    """[S]; padding: 0."""
    rope_positions: torch.Tensor
    """[3, S]; padding: 0."""
    slot_mapping: torch.Tensor
    """[S] KV slot of the new token; padding: a slot of the scratch block."""
    block_tables: torch.Tensor
    """[S, M] KV blocks in order; entries behind the last block: any block."""
    context_lens: torch.Tensor
    """[S] tokens to read, the new one included; padding: 0."""


class RankMemory(Protocol):
    """Bytes that one rank needs. The four graphs' are upper estimates of their activations, inputs included."""

    def weights(self) -> int:
        """Exactly `Model.nbytes` where weights have the model's dtype; kernels that keep them in less need less."""

    def encode(self, patches: int) -> int:
        """Of `encode` and `write_embeddings` on an attention block of so many patches."""

    def prefill(self, tokens: int, context: int, num_logits: int, images: bool) -> int:
        """Of T tokens that read C and S rows of logits, with or without the gather of image tokens."""

    def decode(self, seqs: int, context: int) -> int:
        """Of S sequences that read so many tokens each."""


class ModelConfig(Protocol):
    """What config.json says, beside the family's own fields."""

    model_type: str
    vocab_size: int
    num_layers: int
    head_dim: int
    num_kv_heads: int
    max_position_embeddings: int
    patch_dim: int
    """Values of one patch of a still image: channels * patch * patch."""
    merge_area: int
    """Patches that become one embedding."""
    fat_dim: int
    """Values of one embedding: out_hidden_size * (1 + deepstack levels)."""
    image_token_id: int
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    """The checkpoint's own: "float32", "bfloat16" or "float16"."""

    def validate(self, world_size: int) -> None:
        """Raises CheckpointError naming the field that does not split over `world_size` ranks."""

    def num_local_kv_heads(self, world_size: int) -> int:
        """KV heads that one rank holds."""

    def num_embeddings(self, width: int, height: int) -> int:
        """Of an image of so many pixels that the processor leaves at its size."""

    def memory(self, world_size: int, itemsize: int) -> RankMemory:
        """What one of `world_size` ranks needs, at `itemsize` bytes for a value."""


class Model(Protocol):
    """One rank's part of a model, with its weights."""

    config: ModelConfig

    @property
    def nbytes(self) -> int:
        """Of this rank's weights."""

    def encode(self, block: VisionBlock[torch.Tensor]) -> torch.Tensor:
        """Embeddings of one attention block, [P / merge_area, fat_dim]; rows of padding are finite."""

    def write_embeddings(self, embeddings: torch.Tensor, encoder_cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Exchange a round's embeddings, "my images, all columns" to "all images, my columns", and store them.

        embeddings: [E, fat_dim] of this rank's block, zeros if it has none. rows: [world_size * E] of `encoder_cache`
        [rows, fat_dim / world_size], rank 0's block first; scratch rows where there is no embedding.
        """

    def prefill(self, kv: KVBlocks, inputs: PrefillInputs, images: ImageInputs | None = None) -> torch.Tensor:
        """Compute chunks of prompts: writes their KV, returns logits [S, vocab_size] float32."""

    def decode(self, kv: KVBlocks, inputs: DecodeInputs) -> torch.Tensor:
        """Compute one token of each sequence: writes its KV, returns logits [S, vocab_size] float32."""


class Family(Protocol):
    """The module of one model family, registered in `neuron.models`. Importing it does not import torch."""

    def load_config(self, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json. Raises CheckpointError."""

    def load_model(
        self,
        folder: Path,
        collectives: object,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Model:
        """Read this rank's slice of the weights. Raises CheckpointError."""

    def mrope_positions(
        self, config: ModelConfig, num_tokens: int, items: Sequence[MRopeItem]
    ) -> tuple[np.ndarray, int]:
        """Rotary positions [3, num_tokens] int64, and the delta: token i behind them sits at position i + delta."""

    def prepare_vision_block(
        self, config: ModelConfig, images: Sequence[tuple[np.ndarray, Grid]], num_patches: int
    ) -> VisionBlock[np.ndarray]:
        """Pack images (pixels [patches, patch_dim], grid), in order and without gaps, into a block of `num_patches`."""
