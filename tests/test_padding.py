"""Padding is harmless: whatever scratch, free blocks and padded slots hold, no answer changes."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import neuron.device
from actors.messages import RankOutput, SchedulerOutput
from actors.model_runner import ModelRunner
from configs import dialogues
from configs.engine import parse_config
from tests.support.local_stack import LocalGang, Stack
from tests.test_oracle import SIZES, hold

NAN = float("nan")
CONFIG: dict[str, Any] = {
    "model": {"max_model_len": 512},
    # A prefix hit would read blocks that no request holds yet, which are poisoned here.
    "kv_cache": {"block_size": 8, "num_blocks": 80, "enable_prefix_caching": False},
    "encoder_cache": {"block_size": 16, "num_blocks": 11, "min_hold_time_ms": 2},
    "scheduler": {"max_num_seqs": 5, "max_num_batched_tokens": 48, "max_encoder_embeddings_per_step": 64},
}


class PoisonedGang(LocalGang):
    """Before every step, all that the step may not read is NaN on every rank."""

    num_poisoned = 0

    def step(self, output: SchedulerOutput, *arguments: Any) -> RankOutput:
        for runner in self.runners:
            poison(runner, output)
        type(self).num_poisoned += 1
        return super().step(output, *arguments)


def poison(runner: ModelRunner, output: SchedulerOutput) -> None:
    """Keep the computed tokens of the requests that go on, and the cached images that are not evicted."""
    kv, replaced = runner._kv, {new.request_id for new in output.new_requests}
    slots = [
        request.slots(0, request.num_computed_tokens, kv.block_size)
        for request_id, request in runner._requests.items()
        if request_id not in {*output.finished_request_ids, *replaced}
    ]
    unread = torch.ones(len(kv.keys[0]), dtype=torch.bool)
    if slots:
        unread[torch.from_numpy(np.concatenate(slots))] = False
    assert unread[kv.scratch_slot :].all()
    for buffer in (*kv.keys, *kv.values):
        buffer[unread] = NAN
    cache = runner.encoder_cache
    empty = torch.ones(len(runner._embeddings), dtype=torch.bool)
    for mm_hash in cache.slot_map:
        empty[torch.tensor(cache.rows(mm_hash))] = False
    runner._embeddings[empty] = NAN


def answers(world_size: int, gang: type[LocalGang]) -> list[list[str]]:
    rng = np.random.default_rng(11)
    made = [dialogues.conversation(rng, sizes=SIZES, max_images=3) for _ in range(10)]
    parallel = {"world_size": world_size, "device": "cpu"}
    stack = Stack(parse_config(CONFIG | {"parallel": parallel}), make_gang=gang)

    async def hold_all() -> list[list[str]]:
        return await asyncio.gather(*(hold(number, each, stack.answer) for number, each in enumerate(made)))

    held = asyncio.run(hold_all())
    stack.close()
    assert stack.counts["evicted_blocks"] > 10
    return held


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_no_answer_depends_on_what_padding_holds(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four kinds of graph: tokens are drawn by the sample graphs, and idle ranks encode padding."""
    clean = answers(world_size, LocalGang)
    kinds = {
        "cpu": replace(
            neuron.device.KINDS["cpu"], kernels="masked", kernels_for_high=None, samples=True, same_program=True
        )
    }
    monkeypatch.setattr("actors.plan.KINDS", kinds)
    PoisonedGang.num_poisoned = 0
    assert answers(world_size, PoisonedGang) == clean
    assert PoisonedGang.num_poisoned > 50
