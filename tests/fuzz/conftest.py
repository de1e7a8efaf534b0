"""The whole request path in this process, under small limits, for as many cases as there is time.

`make fuzz` sets FUZZ_CASES; the fast suite tries a few hundred.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from configs.engine import parse_config
from tests.deployments.renderer.conftest import encoded, image_part, picture
from tests.support.local_stack import Stack

CASES = int(os.environ.get("FUZZ_CASES", "240"))

SETTINGS = {
    # Short, so that a case that is answered takes a few steps only.
    "model": {"max_model_len": 64},
    "parallel": {"world_size": 1, "device": "cpu"},
    "kv_cache": {"block_size": 4, "num_blocks": 64},
    "encoder_cache": {"block_size": 16, "num_blocks": 8},
    "processor_cache": {"max_bytes": 1_000_000},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_waiting_requests": 8},
    "multimodal": {"max_images_per_prompt": 4, "max_image_bytes": 200_000},
    "limits": {"max_messages": 20, "max_prompts": 4, "max_choices": 4, "max_stop_strings": 4},
    "server": {"development_mode": True, "max_body_bytes": 1_000_000},
}


def cases(share: float) -> int:
    """How many of all cases a test with this share of them tries."""
    return max(1, round(CASES * share))


@dataclass
class Fuzzed:
    """A stack, and an event loop to speak to it."""

    stack: Stack
    runner: asyncio.Runner
    statuses: dict[int, int] = field(default_factory=dict)

    def request(self, method: str, path: str, **options: object) -> httpx.Response:
        """The response; an exception that the application let out is raised here."""
        response = self.runner.run(self.stack.http.request(method, path, **options))  # type: ignore[arg-type]
        self.statuses[response.status_code] = self.statuses.get(response.status_code, 0) + 1
        return response


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    """Ends with a look whether the engine is as it was: idle, whole, and of the same opinion."""
    stack = Stack(parse_config(SETTINGS))
    with asyncio.Runner() as runner:
        content = [image_part(encoded(picture(96, 64))), {"type": "text", "text": "Read the digits."}]
        messages = [{"role": "user", "content": content}]
        before = runner.run(stack.answer(messages, min_tokens=12))
        assert before
        yield Fuzzed(stack, runner)
        assert runner.run(stack.answer(messages, min_tokens=12)) == before
        assert stack.engine.healthy
        state = stack.engine.call(lambda scheduler: (scheduler.check_integrity(), len(scheduler.running))).result(10)
        assert state == (None, 0)
        runner.run(stack.http.aclose())
    stack.close()
