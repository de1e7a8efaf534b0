"""Model families by the `model_type` of config.json.

A family is a folder whose `__init__` offers what `interface.Family` describes; adding one is that folder and one line
in `FAMILIES`. Nothing here imports torch: the scheduler and the renderer read model configs too.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import cast

from neuron.models.interface import CheckpointError, Family, ModelConfig

FAMILIES = {"qwen3_vl": "neuron.models.qwen3_vl"}


def family_of(folder: str | Path) -> Family:
    """The family that serves the checkpoint in `folder`. Raises CheckpointError if there is none."""
    path = Path(folder) / "config.json"
    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: expected the folder of a Hugging Face checkpoint") from None
    except (json.JSONDecodeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from None
    if model_type not in FAMILIES:
        raise CheckpointError(f"{path}: model_type = {model_type!r}: expected one of {', '.join(sorted(FAMILIES))}")
    return cast(Family, importlib.import_module(FAMILIES[model_type]))


def load_model_config(folder: str | Path) -> ModelConfig:
    """The model's config, read without torch. Raises CheckpointError."""
    return family_of(folder).load_config(Path(folder))
