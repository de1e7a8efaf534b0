"""One dtype of weights, caches and activations: the checkpoint's on NeuronCores, float32 on the CPU, or what is set."""

from typing import Any

import pytest
import torch

from actors.plan import make_plan
from configs.engine import ConfigError, parse_config
from telemetry.recorder import ENGINE, create_recorder
from tests.support.local_stack import LocalGang


def settings(device: str, dtype: str) -> dict[str, Any]:
    return {
        "model": {"max_model_len": 256, "dtype": dtype},
        "parallel": {"world_size": 1, "device": device},
        "kv_cache": {"num_blocks": 16},
        "encoder_cache": {"num_blocks": 4},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
        "buckets": {"vision_patches": [1664]},
    }


@pytest.mark.parametrize(
    ("device", "dtype", "planned"),
    [
        ("cpu", "auto", "float32"),
        ("neuron", "auto", "bfloat16"),  # the demo checkpoint's own
        ("neuron", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_plan_keeps_the_checkpoints_dtype_unless_told_otherwise(device: str, dtype: str, planned: str) -> None:
    assert make_plan(parse_config(settings(device, dtype))).dtype == planned


def test_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float16'"):
        parse_config(settings("cpu", "float16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_holds_what_was_planned_and_runs_every_bucket(dtype: str) -> None:
    config = parse_config(settings("cpu", dtype))
    gang = LocalGang(make_plan(config), create_recorder(config.model, ENGINE))
    runner, expected = gang.runner, getattr(torch, dtype)
    weights = {name: buffer for name, buffer in runner._model.named_buffers() if buffer.dim() > 1}  # type: ignore[attr-defined]
    tiles = {buffer.dtype for name, buffer in weights.items() if name.endswith(".tiles")}
    assert tiles <= {torch.bfloat16}
    assert {buffer.dtype for name, buffer in weights.items() if not name.endswith(".tiles")} == {expected}
    assert {buffer.dtype for buffer in (*runner._kv.keys, *runner._kv.values, runner._embeddings)} == {expected}
    if tiles:  # the checkpoint's own type, in which they lose nothing
        assert gang.plan.memory.weights / 2 < runner.weight_bytes < gang.plan.memory.weights
    else:
        assert runner.weight_bytes == gang.plan.memory.weights
    gang.warm_up()
