"""How requests ended, as the Renderer counts it."""

import time

import httpx
import pytest

from deployments.renderer.engine_client import EngineUnavailableError
from deployments.renderer.tokenizer import PromptTokenizer
from tests.deployments.renderer.conftest import Served
from tests.deployments.renderer.fake_engine import finish, tokens

BODY = {"messages": [{"role": "user", "content": "Hello"}]}


def ended(served: Served) -> dict[str, float]:
    prefix = "vllm:request_success,"
    return {key.removeprefix(prefix): n for key, n in served.counters.counts.items() if key.startswith(prefix) and n}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        lambda request: finish(request, "error", error="full", error_status=429),
        lambda request: EngineUnavailableError("gone"),
        lambda request: RuntimeError("a bug"),
        lambda request: tokens(request, 2**40),  # no such token: the Renderer itself fails
    ],
)
def test_whatever_fails_is_an_error_and_no_abort(served: Served, tokenizer: PromptTokenizer, failure, stream):
    served.engine.script = lambda request: [tokens(request, *tokenizer.encode("a")), failure(request)]
    with served.connect() as http:  # a connection of its own: uvicorn closes it where the application raises
        http.post("/v1/chat/completions", json={**BODY, "stream": stream})
    assert ended(served) == {"error": 1}


def test_choices_are_counted_one_by_one(served: Served, tokenizer: PromptTokenizer):
    def script(request):
        last = request.request_id[-1]
        return [tokens(request, *tokenizer.encode("ab")), finish(request, "length" if last == "0" else "stop")]

    served.engine.script = script
    served.http.post("/v1/chat/completions", json={**BODY, "n": 3, "stop": ["b"]})
    assert ended(served) == {"stop": 3}
    served.http.post("/v1/chat/completions", json={**BODY, "n": 3})
    assert ended(served) == {"stop": 5, "length": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_an_abort_of_each_choice(served: Served, stream):
    served.engine.script = lambda request: [60.0]
    with pytest.raises(httpx.ReadTimeout), served.connect() as http:
        http.post("/v1/chat/completions", json={**BODY, "n": 3, "stream": stream}, timeout=0.5)
    deadline = time.monotonic() + 5
    while ended(served) != {"abort": 3} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended(served) == {"abort": 3}
