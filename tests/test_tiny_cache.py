"""Thousands of random images, small and large, through the whole path under an encoder cache that holds a handful.

No request may stall or fail: the scheduler counts blocks exactly as the rank does.
"""

import asyncio

import numpy as np
import pytest
from PIL import Image

from configs import digits
from configs.engine import parse_config
from tests.support.local_stack import Stack

NUM_IMAGES = 2000
POOL = 400
SIZES = ((64, 64), (64, 64), (96, 64), (128, 96), (128, 128), (160, 160), (256, 192))

NUM_BLOCKS = 5

CONFIG = {
    "model": {"max_model_len": 1024},
    "parallel": {"world_size": 1, "threads_per_rank": 1, "device": "cpu"},
    "kv_cache": {"num_blocks": 96},
    "encoder_cache": {"block_size": 16, "num_blocks": NUM_BLOCKS, "min_hold_time_ms": 3},
    "processor_cache": {"max_bytes": 16_000_000},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_encoder_embeddings_per_step": 56},
}


def messages(rng: np.random.Generator, pool: list[dict]) -> list[dict]:
    count = int(rng.integers(1, 7))
    # Images of 4 to 48 embeddings: at most three blocks of 16, and there are four.
    parts = [pool[int(index)] for index in rng.integers(0, len(pool), count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Read the digits."}]}]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_stalls_and_nothing_fails() -> None:
    rng = np.random.default_rng(3)
    pool = []
    for _ in range(POOL):
        width, height = SIZES[int(rng.integers(len(SIZES)))]
        noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        pool.append({"type": "image_url", "image_url": {"url": digits.data_url(noise)}})
    stack = Stack(parse_config(CONFIG))
    asked = []
    while sum(len(m[0]["content"]) - 1 for m in asked) < NUM_IMAGES:
        asked.append(messages(rng, pool))

    async def run() -> list[str]:
        gate = asyncio.Semaphore(16)

        async def one(conversation: list[dict]) -> str:
            async with gate:
                return await asyncio.wait_for(stack.answer(conversation, max_tokens=2), 120)

        return await asyncio.gather(*map(one, asked))

    answers = asyncio.run(run())
    assert len(answers) == len(asked)
    assert stack.counts["evicted_blocks"] > 1000
    cache = stack.gang.runner.encoder_cache
    cache.check_integrity()
    assert cache.num_active_blocks + cache.num_free_blocks + cache.num_held_blocks == NUM_BLOCKS - 1
    stack.close()
