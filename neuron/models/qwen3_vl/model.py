"""The graphs of Qwen3-VL: encode, exchange and write, prefill, decode. Implements `interface.Model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from neuron.kernels import Kernels
from neuron.kv_blocks import KVBlocks
from neuron.models.interface import DecodeInputs, ImageInputs, PrefillInputs, VisionBlock
from neuron.models.qwen3_vl.config import Qwen3VLConfig
from neuron.models.qwen3_vl.text import TextModel
from neuron.models.qwen3_vl.vision import VisionTower
from neuron.models.qwen3_vl.weights import Checkpoint

if TYPE_CHECKING:
    from neuron.collectives import Collectives


class Qwen3VL(nn.Module):
    """One rank's part of the model. All weights are buffers: nothing here is trained.

    NaN in padding, in scratch or in blocks that nobody owns never reaches a real row: attention does not read such
    slots, and such rows are replaced with torch.where.
    """

    def __init__(
        self, config: Qwen3VLConfig, checkpoint: Checkpoint, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__()
        self.config = config
        self.collectives = collectives
        self.attention = kernels.attention
        self.vision = VisionTower(config.vision, checkpoint, kernels.ops)
        self.text = TextModel(config, checkpoint, collectives, kernels.ops)

    @classmethod
    def load(
        cls,
        folder: Path,
        collectives: Collectives,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Qwen3VL:
        """Read this rank's slice of the checkpoint. Raises CheckpointError."""
        config = Qwen3VLConfig.from_folder(folder)
        config.validate(collectives.world_size)
        with Checkpoint(folder, dtype) as checkpoint:
            return cls(config, checkpoint, collectives, kernels).to(device)

    @property
    def nbytes(self) -> int:
        """Of this rank's weights."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def encode(self, block: VisionBlock[Tensor]) -> Tensor:
        """Embeddings [P / merge_area, fat_dim] of the images in one attention block."""
        return self.vision(block, self.attention)

    def write_embeddings(self, embeddings: Tensor, encoder_cache: Tensor, rows: Tensor) -> None:
        """Exchange a round's embeddings [E, fat_dim] so that each rank has its columns of all, and store these.

        encoder_cache [rows, fat_dim / world]; rows [world * E]: where rank 0's embeddings go, then rank 1's.
        """
        count, world = embeddings.shape[0], self.collectives.world_size
        by_rank = embeddings.view(count, world, -1).transpose(0, 1)
        columns = self.collectives.all_to_all(by_rank.contiguous()).reshape(world * count, -1)
        encoder_cache.index_copy_(0, rows, columns)

    def prefill(self, kv: KVBlocks, inputs: PrefillInputs, images: ImageInputs | None = None) -> Tensor:
        """Compute chunks of prompts: writes their KV, returns logits [S, vocab] float32."""
        x = self.text.embedding(inputs.token_ids)
        deepstack: tuple[Tensor, ...] = ()
        if images is not None:
            columns = images.encoder_cache.index_select(0, images.embed_rows)
            rows = self.collectives.all_gather(columns, dim=-1)
            is_image = images.is_image[:, None]
            main, *levels = rows.split(self.text.hidden_size, dim=-1)
            x = torch.where(is_image, main, x)
            deepstack = tuple(torch.where(is_image, level, 0.0) for level in levels)
        attend = self.attention.prefill(kv, inputs)
        x = self.text(x, inputs.rope_positions, kv, inputs.slot_mapping, attend, deepstack)
        return self.text.logits(x.index_select(0, inputs.logits_index))

    def decode(self, kv: KVBlocks, inputs: DecodeInputs) -> Tensor:
        """Compute one token of each sequence: writes its KV, returns logits [S, vocab] float32."""
        x = self.text.embedding(inputs.token_ids)
        attend = self.attention.decode(kv, inputs)
        return self.text.logits(self.text(x, inputs.rope_positions, kv, inputs.slot_mapping, attend))
