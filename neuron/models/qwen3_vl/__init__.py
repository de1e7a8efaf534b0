"""Qwen3-VL: `config`, `positions` (M-RoPE), `vision` and `text` towers, `model` (the graphs), `weights` (the reader),
`memory` (bytes per rank).

The text model is tensor parallel over all ranks; every rank has the whole vision tower. Torch is imported by
`load_model` only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuron.models.qwen3_vl.config import Qwen3VLConfig
from neuron.models.qwen3_vl.positions import mrope_positions, prepare_vision_block

if TYPE_CHECKING:
    import torch

    from neuron.collectives import Collectives
    from neuron.kernels import Kernels
    from neuron.models.qwen3_vl.model import Qwen3VL

__all__ = ["load_config", "load_model", "mrope_positions", "prepare_vision_block"]


def load_config(folder: Path) -> Qwen3VLConfig:
    """Read config.json and generation_config.json. Raises CheckpointError."""
    return Qwen3VLConfig.from_folder(folder)


def load_model(
    folder: Path,
    collectives: Collectives,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Qwen3VL:
    """Read this rank's slice of the weights. Raises CheckpointError."""
    from neuron.models.qwen3_vl.model import Qwen3VL

    return Qwen3VL.load(folder, collectives, kernels, dtype, device)
