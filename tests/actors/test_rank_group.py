"""A gang of real rank actors on a local Ray: both step channels, a killed rank, and a diverging one."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import ray

from actors.messages import MMItem, NewRequest, SamplingParams, SchedulerOutput
from actors.pixel_memory import PixelMemory
from actors.plan import EnginePlan, make_plan
from actors.rank_group import RankGroup
from actors.step_channel import RankFailure
from configs.engine import parse_config
from deployments.scheduler.readers import find_lost

HANG_S = 20
"""More than the ranks of a busy machine need to meet for the first time: importing torch alone takes some seconds."""
ITEM = MMItem(mm_hash="image", offset=2, length=4, num_embeddings=4, grid=(1, 4, 4))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


Token = tuple[int, float]
"""Its id and its log probability."""


@dataclass
class Gang:
    """Two ranks that have run step 1, and work again whenever a test is done with them."""

    group: RankGroup
    reported: list[tuple[str, int, int]]
    first: Token


@pytest.fixture(scope="module")
def gang(cluster: None) -> Iterator[Gang]:
    group, reported = started("socket", "shared_memory", collective_timeout_s=HANG_S)
    yield Gang(group, reported, run(group, 1))
    group.shutdown()


def plan(channel: str, collectives: str, **parallel: Any) -> EnginePlan:
    return make_plan(
        parse_config(
            {
                "model": {"max_model_len": 256},
                "parallel": {"world_size": 2, "device": "cpu", "step_channel": channel, "collectives": collectives}
                | parallel,
                "kv_cache": {"num_blocks": 64},
                "encoder_cache": {"num_blocks": 8},
                "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
                "buckets": {"vision_patches": [64, 1664]},
                "debug": {"rank_digest": True},
            }
        )
    )


def started(channel: str, collectives: str, **parallel: Any) -> tuple[RankGroup, list[tuple[str, int, int]]]:
    reported: list[tuple[str, int, int]] = []
    group = RankGroup(plan(channel, collectives, **parallel), lambda *report: reported.append(report[:3]))
    group.start()
    return group, reported


def prefill(step_id: int) -> SchedulerOutput:
    """A prompt of one image between text, computed whole."""
    new = NewRequest(
        request_id=f"r{step_id}",
        token_ids=(5, 508, 510, 510, 510, 510, 509, 6),
        num_prompt_tokens=8,
        num_computed_tokens=0,
        block_ids=(step_id,),
        sampling=SamplingParams(max_tokens=4, temperature=0, logprobs=2),
        mm_items=(ITEM,),
    )
    encode = {new.request_id: (0,)} if step_id == 1 else {}
    return SchedulerOutput(
        step_id=step_id,
        clock=float(step_id),
        phase="prefill",
        new_requests=(new,),
        num_scheduled_tokens={new.request_id: 8},
        scheduled_encoder_inputs=encode,
    )


def run(group: RankGroup, step_id: int, memory: PixelMemory | None = None) -> Token:
    """Run the step; step 1 alone encodes the image, whose pixels are Ray's object or `memory`."""
    step = prefill(step_id)
    pixels = np.random.default_rng(1).standard_normal((16, 768), dtype=np.float32)
    items = [("image", 16)] if step.scheduled_encoder_inputs else []
    output = group.step(step, {"image": memory or ray.put(pixels)}, items)
    token = output.sampled[f"r{step_id}"]
    assert output.occupancy is not None
    assert output.occupancy.active_real_tokens == 4
    return token.token_id, token.logprob


@pytest.mark.slow
def test_both_channels_give_the_same(gang: Gang) -> None:
    buckets = len(gang.group.plan.bucket_names())
    assert gang.reported[1::2][:1] == [("placed", 2, 2)]
    assert gang.reported[-1] == ("warmed", buckets, buckets)
    assert run(gang.group, 2) == gang.first  # from the encoder cache now

    by_calls, _ = started("actor_call", "gloo")
    memory = PixelMemory.create(np.random.default_rng(1).standard_normal((16, 768), dtype=np.float32))
    token, logprob = run(by_calls, 1, memory)
    assert token == gang.first[0]
    assert logprob == pytest.approx(gang.first[1], abs=1e-4)
    by_calls.shutdown()


def test_a_dead_gang_starts_anew(gang: Gang) -> None:
    os.kill(gang.group._pids[1], signal.SIGKILL)
    with pytest.raises(RankFailure) as raised:
        run(gang.group, 2)
    assert raised.value.rank == 1
    gang.group.restart()
    assert run(gang.group, 1) == gang.first


def test_one_that_hangs_is_named_and_ended(gang: Gang) -> None:
    pids = list(gang.group._pids)
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run(gang.group, 2)
    assert (raised.value.rank, raised.value.kind) == (1, "hung")
    assert time.monotonic() - begin < HANG_S + 12
    gang.group.restart()
    assert not any(psutil.pid_exists(pid) and "RankActor" in " ".join(psutil.Process(pid).cmdline()) for pid in pids)
    assert run(gang.group, 1) == gang.first


def test_a_rank_that_differs_is_named(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    group = gang.group
    receive = group._channel.receive

    def tampered(timeout_s: float) -> bytes:
        output = group._decoder.decode(receive(timeout_s))
        digest = "other" if output.rank == 1 else output.digest
        return group._encoder.encode(msgspec.structs.replace(output, digest=digest))

    monkeypatch.setattr(group._channel, "receive", tampered)
    with pytest.raises(RankFailure, match="rank 1 differs from rank 0 after step 2"):
        run(group, 2)


def encode_again(step_id: int) -> SchedulerOutput:
    encode = {f"r{step_id}": (0,)}
    return msgspec.structs.replace(prefill(step_id), free_encoder_mm_hashes=("image",), scheduled_encoder_inputs=encode)


@ray.remote(num_cpus=0)
class Owner:
    """Of an object, which is lost with it."""

    def put(self, array: np.ndarray) -> list[ray.ObjectRef]:
        return [ray.put(array)]


def test_pixels_in_this_nodes_memory_are_the_same(gang: Gang) -> None:
    memory = PixelMemory.create(np.random.default_rng(1).standard_normal((16, 768), dtype=np.float32))
    token = gang.group.step(encode_again(2), {"image": memory}, [("image", 16)]).sampled["r2"]
    assert (token.token_id, token.logprob) == gang.first


def test_ranks_stay_in_step_without_lost_pixels(gang: Gang) -> None:
    pixels = np.random.default_rng(1).standard_normal((16, 768), dtype=np.float32)
    owner = Owner.remote()
    here, gone = ray.put(pixels), *ray.get(owner.put.remote(pixels))
    assert find_lost({"a": here, "b": gone}) == []
    ray.kill(owner)
    deadline = time.monotonic() + 10
    while not find_lost({"b": gone}):
        assert time.monotonic() < deadline, "the object outlives its owner"
    assert find_lost({"a": here, "b": gone}) == ["b"]

    without = encode_again(2)
    gang.group.step(without, {}, [("image", 16)])  # both ranks go on, with the same bookkeeping
    token = gang.group.step(encode_again(3), {"image": here}, [("image", 16)]).sampled["r3"]
    assert (token.token_id, token.logprob) == gang.first
