"""A client that does not read holds nobody up, and what waits for it is one output."""

import gc
from collections.abc import Iterator

import httpx
import pytest

from configs.engine import EngineConfig, parse_config
from deployments.output_buffer import OutputBuffer
from deployments.renderer.checkpoint import load_checkpoint
from tests.support.raw_client import RawClient
from tests.support.simulated_stack import QuickRank, SimulatedStack, wait_until

TOKENS = 6000
"""150 KB even as one event: more than the kernel and the server's own buffers take for one who does not read."""

SLOW = {"prompt": [5] * 12, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 5}
CONFIG = {
    "model": {"max_model_len": 8192},
    "kv_cache": {"num_blocks": 1024},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
}


def all_buffers() -> list[OutputBuffer]:
    return [each for each in gc.get_objects() if isinstance(each, OutputBuffer)]


@pytest.fixture(scope="module")
def others() -> list[OutputBuffer]:
    """Of earlier tests in this process, whose event loops ended with something unread."""
    return all_buffers()


@pytest.fixture(scope="module")
def stack(others: list[OutputBuffer]) -> Iterator[SimulatedStack]:
    with SimulatedStack(parse_config(CONFIG), load_checkpoint(EngineConfig()), QuickRank) as stack:
        yield stack


def test_it_is_computed_to_its_end_and_everyone_else_is_served(
    stack: SimulatedStack, others: list[OutputBuffer]
) -> None:
    whole = httpx.post(f"{stack.url}/v1/completions", json=SLOW, timeout=60).json()
    assert whole["usage"]["completion_tokens"] == TOKENS

    slow = [RawClient(stack.port, receive_buffer=4096) for _ in range(2)]
    for client in slow:
        client.send("/v1/completions", {**SLOW, "stream": True, "stream_options": {"include_usage": True}})
    for _ in range(5):  # beside them
        answer = httpx.post(f"{stack.url}/v1/completions", json={**SLOW, "max_tokens": 20}, timeout=20).json()
        assert whole["choices"][0]["text"].startswith(answer["choices"][0]["text"])
    wait_until(lambda: not stack.scheduler.requests, 30, "the end of the requests that nobody reads")
    assert stack.scheduler.kv.usage == 0

    def unread() -> list[int]:
        return [len(each) for each in all_buffers() if each not in others]

    # The last answer's own buffer ends a moment after its client has it.
    wait_until(lambda: unread() == [1] * len(slow), what="one output for each of those that do not read")

    for client in slow:
        events = list(client.events(chunk=2048))
        assert "".join(each["choices"][0]["text"] for each in events[:-1]) == whole["choices"][0]["text"]
        logprobs = [token for each in events[:-1] for token in each["choices"][0]["logprobs"]["tokens"]]
        assert logprobs == whole["choices"][0]["logprobs"]["tokens"]
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
        assert len(events) < TOKENS / 2  # what came while it did not read is one event
        client.leave()


def test_one_that_leaves_without_having_read_leaves_nothing(stack: SimulatedStack, others: list[OutputBuffer]) -> None:
    client = RawClient(stack.port, receive_buffer=4096)
    client.send("/v1/completions", {**SLOW, "stream": True})
    wait_until(lambda: bool(stack.scheduler.requests))
    wait_until(lambda: not stack.scheduler.requests, 30)
    client.leave(abruptly=True)

    wait_until(lambda: all(each in others for each in all_buffers()), what="the end of its buffer")
