"""The wrong-answer oracle.

Several hundred random conversations about digits, many at a time under tiny caches, so that images are evicted,
requests preempted and prefixes hit all the while; against the same conversations one request at a time with every
cache off. The answers must be identical.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from configs import dialogues
from configs.engine import parse_config
from tests.support.local_stack import Stack

SIZES = ((64, 64), (96, 64), (128, 64), (128, 128), (224, 224), (256, 64))
NUM_CONVERSATIONS = 240
CONCURRENCY = 12

TINY = {
    "model": {"max_model_len": 512},
    "parallel": {"world_size": 1, "threads_per_rank": 1, "device": "cpu"},
    "kv_cache": {"block_size": 4, "num_blocks": 128},
    "encoder_cache": {"block_size": 16, "num_blocks": 11, "min_hold_time_ms": 2},
    "processor_cache": {"max_bytes": 4_000_000},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_encoder_embeddings_per_step": 64},
    "debug": {"fail_on_new_shape": True},
}
ALONE = {
    "model": {"max_model_len": 512},
    "parallel": {"world_size": 1, "threads_per_rank": 1, "device": "cpu"},
    "kv_cache": {"num_blocks": 256, "enable_prefix_caching": False},
    "processor_cache": {"max_bytes": 0},
    "scheduler": {"max_num_batched_tokens": 1024},
}


def conversations() -> list[dialogues.Conversation]:
    """Seeded; drawn from few images, so that different conversations share them."""
    rng = np.random.default_rng(5)
    made = [dialogues.conversation(rng, sizes=SIZES, max_images=3) for _ in range(NUM_CONVERSATIONS)]
    pool = [scene for conversation in made[:12] for turn in conversation.turns for scene in turn.scenes]
    for conversation in made[12:]:
        for turn in conversation.turns:
            turn.scenes = [pool[int(rng.integers(len(pool)))] if rng.random() < 0.7 else s for s in turn.scenes]
    return made


async def hold(number: int, conversation: dialogues.Conversation, ask: Callable[..., Awaitable[str]]) -> list[str]:
    """Every answer of a conversation, each turn seeing the answers before it.

    Every second conversation goes on talking behind its answers: short ones alone would never run out of KV blocks.
    """
    length = {"max_tokens": 24, "min_tokens": 24} if number % 2 else {}
    answers: list[str] = []
    for turn in range(len(conversation.turns)):
        answers.append(await ask(conversation.messages(turn, answers), **length))
    return answers


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_answer_depends_on_caches_or_company() -> None:
    made = conversations()
    together = Stack(parse_config(TINY))
    together.gang.warm_up()

    async def run_together() -> list[list[str]]:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(number: int, conversation: dialogues.Conversation) -> list[str]:
            async with gate:
                return await hold(number, conversation, together.answer)

        return await asyncio.gather(*(one(number, conversation) for number, conversation in enumerate(made)))

    got = asyncio.run(run_together())
    together.close()
    assert together.counts["evicted_blocks"] > 100
    assert together.counts["preemptions"] > 10
    assert together.counts["prefix_hits"] > 1000
    assert together.counts["encoder_hits"] > 100

    alone = Stack(parse_config(ALONE))

    async def ask_alone(messages: list[dict], **length: int) -> str:
        answer = await alone.answer(messages, **length)
        await alone.renderer.engine.reset_encoder_cache()
        return answer

    async def run_alone() -> list[list[str]]:
        return [await hold(number, conversation, ask_alone) for number, conversation in enumerate(made)]

    expected = asyncio.run(run_alone())
    alone.close()
    assert alone.counts["prefix_hits"] == 0
    wrong = [index for index, answers in enumerate(got) if answers != expected[index]]
    assert not wrong, [(index, got[index], expected[index]) for index in wrong[:3]]
