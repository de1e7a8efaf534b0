"""More work than the engine can do: the queue is bounded, and who comes back when told is served."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from configs.engine import EngineConfig, parse_config
from deployments.renderer.checkpoint import load_checkpoint
from deployments.scheduler.queue_rate import MAX_RETRY_S
from tests.support.simulated_stack import QuickRank, SimulatedStack

CLIENTS = 40
BODY = {"prompt": [5] * 20, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"max_waiting_requests": 12}, {"max_waiting_tokens": 240}])
def test_every_client_is_served_that_comes_back_when_told(limit: dict[str, int]) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **limit}
    config = parse_config({"kv_cache": {"num_blocks": 512}, "scheduler": settings})
    with SimulatedStack(config, load_checkpoint(EngineConfig()), QuickRank, step_s=0.01) as stack:

        def ask(_: int) -> tuple[str, list[float]]:
            """The answer, and the waits that were asked for before it."""
            waits: list[float] = []
            with httpx.Client(timeout=30, trust_env=False, verify=False) as http:
                while True:
                    response = http.post(f"{stack.url}/v1/completions", json=BODY)
                    if response.status_code != 429:
                        return response.raise_for_status().json()["choices"][0]["text"], waits
                    assert next(iter(limit)) in response.json()["error"]["message"]
                    waits.append(float(response.headers["Retry-After"]))
                    time.sleep(waits[-1])

        with ThreadPoolExecutor(CLIENTS) as pool:
            served = list(pool.map(ask, range(CLIENTS)))
        assert len({text for text, _ in served}) == 1
        waits = [wait for _, waits in served for wait in waits]
        assert len(waits) > CLIENTS / 6
        assert min(waits) >= 1
        assert max(waits) < MAX_RETRY_S
        assert max(len(waits) for _, waits in served) <= 4  # refused again and again: the rate was of no use
        assert not stack.scheduler.requests
