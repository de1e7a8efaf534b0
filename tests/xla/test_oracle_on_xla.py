"""The wrong-answer oracle on the XLA device: the answers of the CPU, and nothing compiled after the warm-up."""

import asyncio
from typing import Any

import pytest

from configs import dialogues
from configs.engine import parse_config
from tests.support.local_stack import Stack
from tests.test_oracle import CONCURRENCY, TINY, conversations, hold

pytestmark = pytest.mark.xla

BUCKETS = {
    "prefill_tokens": [32, 64],
    "decode_seqs": [2, 8],
    "context_tokens": [256, 512],
    "vision_patches": [128, 512, 1664],
}


def answer(stack: Stack, made: list[dialogues.Conversation]) -> list[list[str]]:
    """Every answer of every conversation, many held at a time."""

    async def hold_all() -> list[list[str]]:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(number: int, conversation: dialogues.Conversation) -> list[str]:
            async with gate:
                return await hold(number, conversation, stack.answer)

        return await asyncio.gather(*(one(number, conversation) for number, conversation in enumerate(made)))

    return asyncio.run(hold_all())


def make_stack(device: str) -> Stack:
    tree: dict[str, Any] = {**TINY, "buckets": BUCKETS, "debug": {"fail_on_new_shape": True}}
    tree["model"] = {**TINY["model"], "dtype": "float32"}
    tree["parallel"] = {**TINY["parallel"], "device": device}
    stack = Stack(parse_config(tree))
    stack.gang.warm_up()
    return stack


@pytest.mark.timeout(1800)
def test_no_answer_differs_from_the_cpus_and_nothing_compiles_after_the_warm_up() -> None:
    made = conversations()
    cpu = make_stack("cpu")
    expected = answer(cpu, made)
    cpu.close()

    xla = make_stack("neuron")
    device = xla.gang.runner.device
    assert device.torch_device.type == "xla"
    compiled = device.num_compilations()
    assert compiled >= len(xla.gang.plan.bucket_names())
    got = answer(xla, made)
    xla.close()
    assert device.num_compilations() == compiled
    assert xla.counts["evicted_blocks"] > 100
    assert xla.counts["preemptions"] > 5
    assert xla.counts["prefix_hits"] > 1000
    assert xla.counts["encoder_hits"] > 50
    wrong = [index for index, answers in enumerate(got) if answers != expected[index]]
    assert not wrong, [(index, got[index], expected[index]) for index in wrong[:3]]
