"""Config and registry: what is read, what is refused, and that neither needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuron.models import family_of, load_model_config
from neuron.models.interface import CheckpointError

TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 5120,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}


def write(folder: Path, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **root: Any) -> Path:
    """The published shape of Qwen3-VL-32B, with changes; a value of None leaves the field out."""
    tree = {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "tie_word_embeddings": False,
        "text_config": {k: v for k, v in {**TEXT, **(text or {})}.items() if v is not None},
        "vision_config": {k: v for k, v in {**VISION, **(vision or {})}.items() if v is not None},
        **root,
    }
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_a_published_config(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    config = load_model_config(tmp_path)
    assert config.fat_dim == 20480
    assert config.patch_dim == 768
    assert config.merge_area == 4
    assert config.eos_token_ids == (151645, 151643)
    assert config.torch_dtype == "bfloat16"
    assert [config.num_local_kv_heads(world) for world in (1, 4, 8, 16)] == [8, 2, 1, 1]
    config.validate(16)


def test_every_rank_holds_the_kv_heads_that_its_query_heads_use(tmp_path: Path) -> None:
    config = family_of(write(tmp_path)).load_config(tmp_path)
    for world in (1, 2, 4, 8, 16, 32, 64):
        heads = 64 // world
        for rank in range(world):
            used = {head // 8 for head in range(rank * heads, (rank + 1) * heads)}
            assert used == set(config.local_kv_heads(rank, world))  # type: ignore[attr-defined]


def test_eos_of_the_text_config_without_a_generation_config(tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path)).eos_token_ids == (151645,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': expected one of qwen3_vl"),
        ({"text": {"hidden_size": None}}, r"config.text_config.hidden_size = None: expected an integer"),
        ({"text": {"hidden_act": "relu"}}, r"hidden_act = 'relu': expected 'silu'"),
        ({"text": {"num_key_value_heads": 5}}, r"num_key_value_heads = 5: expected a divisor"),
        ({"text": {"rope_scaling": {"rope_type": "yarn"}}}, r"rope_scaling.rope_type = 'yarn': expected 'default'"),
        ({"text": {"rope_scaling": {"mrope_section": [8, 8, 8]}}}, r"mrope_section = \[8, 8, 8\]"),
        ({"vision": {"num_position_embeddings": 2000}}, "expected a square number"),
        ({"vision": {"deepstack_visual_indexes": [8, 27]}}, "expected ascending layers < depth = 27"),
        ({"vision": {"out_hidden_size": 4096}}, "out_hidden_size = 4096: expected text_config.hidden_size = 5120"),
        ({"vision_config": None}, "config.vision_config = None: expected an object"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ({"num_attention_heads": 40}, 16, r"text_config.num_attention_heads = 40: expected a multiple of .* = 16"),
        ({"intermediate_size": 25608}, 16, "text_config.intermediate_size = 25608"),
        ({"num_attention_heads": 48, "num_key_value_heads": 6}, 4, "num_key_value_heads = 6"),
    ],
)
def test_what_cannot_be_split_is_named(tmp_path: Path, text: dict[str, Any], world_size: int, message: str) -> None:
    config = load_model_config(write(tmp_path, text=text))
    config.validate(1)
    with pytest.raises(CheckpointError, match=message):
        config.validate(world_size)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the folder of a Hugging Face checkpoint"):
        load_model_config(tmp_path / "nowhere")


def test_configs_positions_and_packing_do_not_import_torch(tmp_path: Path) -> None:
    write(tmp_path)
    code = (
        "import sys; from neuron.models import load_model_config; import neuron.vision_packing;"
        f"load_model_config({str(tmp_path)!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
