"""A client that leaves takes its engine requests along, whatever they were doing."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from configs.engine import EngineConfig
from deployments.renderer.routes import build_api
from deployments.renderer.tokenizer import PromptTokenizer
from tests.deployments.renderer.conftest import Served
from tests.deployments.renderer.fake_engine import tokens

BODY = {"messages": [{"role": "user", "content": "Hello"}]}


def wait_for_aborts(served: Served, count: int) -> None:
    deadline = time.monotonic() + 5
    while len(served.engine.aborted) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(served.engine.aborted) == count


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_while_the_engine_has_not_begun(served: Served, n, stream):
    served.engine.script = lambda request: [60.0]
    with pytest.raises(httpx.ReadTimeout), served.connect() as http:
        http.post("/v1/chat/completions", json={**BODY, "n": n, "stream": stream}, timeout=0.5)
    wait_for_aborts(served, n)


@pytest.mark.parametrize("n", [1, 3])
def test_between_tokens(served: Served, tokenizer: PromptTokenizer, n):
    (token,) = tokenizer.encode("a")
    served.engine.script = lambda request: [tokens(request, token), 60.0]
    with (
        served.connect() as http,
        http.stream("POST", "/v1/chat/completions", json={**BODY, "n": n, "stream": True}) as response,
    ):
        for line in response.iter_lines():
            if '"content":"a"' in line:
                break
    wait_for_aborts(served, n)


@pytest.mark.parametrize("n", [1, 3])
def test_while_tokens_pour(served: Served, tokenizer: PromptTokenizer, n):
    (token,) = tokenizer.encode("a")
    served.engine.script = lambda request: [step for _ in range(100_000) for step in (tokens(request, token), 0.001)]
    with (
        served.connect() as http,
        http.stream("POST", "/v1/chat/completions", json={**BODY, "n": n, "stream": True}) as response,
    ):
        next(response.iter_lines())
    wait_for_aborts(served, n)


def test_a_client_that_does_not_read_is_not_read_ahead_for(served: Served, tokenizer: PromptTokenizer):
    """What waits for a slow client is bounded by the buffers of its connection."""
    (token,) = tokenizer.encode("a")
    given = []

    def script(request):
        for index in range(200_000):
            given.append(index)
            yield tokens(request, token)

    served.engine.script = script
    with served.connect() as http, http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}):
        before = -1
        while before != len(given):
            before = len(given)
            assert before < 150_000
            time.sleep(0.5)
    wait_for_aborts(served, 1)


@pytest.mark.parametrize(
    ("before", "status"),
    [
        pytest.param([], 499, id="before the body"),
        pytest.param([{"type": "http.request", "body": b'{"mess', "more_body": True}], 499, id="inside the body"),
        pytest.param([{"type": "http.request", "body": json.dumps(BODY).encode()}], 499, id="while it waits"),
        pytest.param(
            [{"type": "http.request", "body": json.dumps({**BODY, "stream": True}).encode()}, {"type": "late"}],
            200,
            id="inside the stream",
        ),
    ],
)
def test_a_server_that_raises_where_its_client_left(
    served: Served, tokenizer: PromptTokenizer, before: list[dict[str, Any]], status: int
):
    """Ray Serve's `receive` does, when it has cancelled the request: nothing of it may surface as a failure."""
    (token,) = tokenizer.encode("a")
    served.engine.script = lambda request: [tokens(request, token), 60.0] if status == 200 else [60.0]
    answered: list[dict[str, Any]] = []
    messages = iter(before)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.1)
        if (message := next(messages, None)) is None:
            raise RuntimeError("the task was cancelled")
        return message

    async def send(message: dict[str, Any]) -> None:
        answered.append(message)

    api = build_api(served.renderer, EngineConfig(), lambda: (b"", ""))
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    asyncio.run(api(scope, receive, send))
    assert answered[0]["status"] == status
    assert len(served.engine.aborted) == len(served.engine.requests)
