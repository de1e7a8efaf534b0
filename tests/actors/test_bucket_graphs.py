"""Every bucket of a configuration, of all four kinds of graph, as torch.compile sees it on the CPU: whole, and once."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import actors.model_runner
import neuron.device
from actors.messages import WarmUp
from actors.plan import make_plan
from configs.engine import parse_config
from neuron.device.cpu import CpuDevice
from telemetry.recorder import ENGINE, create_recorder
from tests.support.local_stack import LocalGang

CONFIG = {
    "model": {"max_model_len": 256},
    "parallel": {"world_size": 1, "device": "cpu"},
    "kv_cache": {"num_blocks": 64},
    "encoder_cache": {"num_blocks": 8},
    "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
    "debug": {"fail_on_new_shape": True},
}


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalGang]:
    """A rank whose graphs, the sampler's among them, go through torch.compile: traced whole and run as they are."""
    torch.compiler.reset()
    masked = {"kernels": "masked", "kernels_for_high": None}
    kinds = {"cpu": replace(neuron.device.KINDS["cpu"], **masked, samples=True, same_program=True)}
    monkeypatch.setattr(neuron.device, "KINDS", kinds)
    monkeypatch.setattr("actors.plan.KINDS", kinds)
    monkeypatch.setattr(actors.model_runner, "create_device", lambda *_: CpuDevice("aot_eager"))
    config = parse_config(CONFIG)
    with torch._dynamo.config.patch(recompile_limit=64):
        yield LocalGang(make_plan(config), create_recorder(config.model, ENGINE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_bucket_is_one_graph_and_compiles_once(gang: LocalGang) -> None:
    names = gang.plan.bucket_names()
    kinds = {name.partition("/")[0] for name in names}
    samples = {"sample_greedy", "sample", "sample_penalties"}
    assert kinds == {"encode", "prefill", "prefill_images", "decode"} | samples
    gang.warm_up()
    assert gang.runner.device.num_compilations() == len(names)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name in names:
            gang.runner.warm_up(WarmUp(step_id=-1, bucket=name))
    assert gang.runner.device.num_compilations() == len(names)
