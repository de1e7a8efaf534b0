"""Whatever a client gets wrong is a 4xx in OpenAI's shape that says what to change."""

import http.client
import json
import socket
from collections.abc import Callable

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.deployments.renderer.conftest import Served, data_url, encoded, image_part, picture
from tests.deployments.renderer.fake_engine import finish

HELLO = [{"role": "user", "content": "Hello"}]
PNG = encoded(picture())


def image_message(url: str) -> list:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def post(served: Served, path: str, **options):
    http = served.http
    return http.post(path, **options)


def check_shape(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1200
    return error


CASES = [
    # changes to a valid body, status, part of the message, param, code
    ({"model": "gpt"}, 404, "'gpt' does not exist: this server serves 'digits-vl'", "model", "model_not_found"),
    ({"frobnicate": 1}, 400, "frobnicate: no such parameter: accepted are model", "frobnicate", "unknown_parameter"),
    ({"tools": [{"type": "function"}]}, 400, "tools = a list is not supported", "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, 400, "tool_choice = 'required' is not supported", "tool_choice", None),
    ({"response_format": {"type": "json_object"}}, 400, '{"type": "text"}', "response_format", None),
    ({"logit_bias": {"5": 100}}, 400, "set it to an empty object", "logit_bias", None),
    ({"audio": {}}, 400, "audio = an empty object is not supported", "audio", None),
    ({"modalities": ["audio"]}, 400, "modalities", "modalities", None),
    ({"functions": [{}]}, 400, "functions", "functions", None),
    ({"best_of": 3}, 400, "best_of = 3 is not supported by this server: leave it out, or set it to 1", "best_of", None),
    ({"echo": True}, 400, "echo = True", "echo", None),
    ({"temperature": -0.1}, 400, "temperature = -0.1: input should be greater than or equal to 0", "temperature", None),
    ({"temperature": 1e300}, 400, "less than or equal to 2", "temperature", None),
    ({"temperature": "hot"}, 400, "temperature = 'hot'", "temperature", None),
    ({"top_p": 0}, 400, "top_p = 0", "top_p", None),
    ({"top_p": 1.1}, 400, "top_p = 1.1", "top_p", None),
    ({"top_k": -2}, 400, "top_k = -2", "top_k", None),
    ({"min_p": 2}, 400, "min_p = 2", "min_p", None),
    ({"presence_penalty": 3}, 400, "presence_penalty = 3", "presence_penalty", None),
    ({"frequency_penalty": -3}, 400, "frequency_penalty = -3", "frequency_penalty", None),
    ({"repetition_penalty": 0}, 400, "repetition_penalty = 0", "repetition_penalty", None),
    ({"seed": 2**63}, 400, "seed = ", "seed", None),
    ({"seed": 1.5}, 400, "seed = 1.5", "seed", None),
    ({"n": 0}, 400, "n = 0", "n", None),
    ({"n": 10**9}, 400, "n = 1000000000", "n", None),
    ({"max_tokens": 0}, 400, "max_tokens = 0", "max_tokens", None),
    ({"max_tokens": 10**40}, 400, "max_tokens = 1", "max_tokens", None),
    ({"max_tokens": 512}, 400, "maximum context length is 512 tokens. However, you requested", "max_tokens", None),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        400,
        "max_tokens and max_completion_tokens differ",
        "max_tokens",
        None,
    ),
    ({"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens = 6: expected at most max_tokens = 5", "min_tokens", None),
    ({"stop": ""}, 400, "stop[0] = ''", "stop[0]", None),
    ({"stop": ["x"] * 1000}, 400, "at most 32", "stop", None),
    ({"stop": "x" * 10_000}, 400, "at most 256", "stop[0]", None),
    ({"stop_token_ids": [512]}, 400, "stop_token_ids: 512: expected token ids below 512", "stop_token_ids", None),
    ({"top_logprobs": 2}, 400, "top_logprobs is accepted only with logprobs", "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs = 21", "top_logprobs", None),
    ({"stream_options": {"include_usage": True}}, 400, "only with stream = true", "stream_options", None),
    ({"cache_salt": ""}, 400, "cache_salt = ''", "cache_salt", None),
    ({"messages": []}, 400, "messages = an empty list", "messages", None),
    ({"messages": None}, 400, "messages", "messages", None),
    ({"messages": [{"role": "root", "content": "x"}]}, 400, "'system', 'developer', 'user'", "messages[0].role", None),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content is missing", "messages[0].content", None),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "a string or a list of parts", "messages[0].content", None),
    (
        {"messages": [{"role": "user", "content": "x", "name": "bob"}]},
        400,
        "is not supported",
        "messages[0].name",
        None,
    ),
    ({"messages": HELLO * 600}, 400, "maximum context length is 512 tokens", "messages", "context_length_exceeded"),
    ({"messages": HELLO * 20_000}, 400, "at most 16384", "messages", None),
    ({"messages": [{"role": "user", "content": "ab " * 900}]}, 400, "maximum context length", "messages", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
        400,
        "part of type 'video_url' is not supported: expected text or image_url",
        "messages[0].content[0]",
        "unsupported_content",
    ),
    (
        {"messages": [{"role": "user", "content": [image_part(PNG)] * 33}]},
        400,
        "33 images: at most 32",
        "messages",
        "too_many_images",
    ),
    (
        {"messages": [{"role": "user", "content": [image_part(encoded(picture(640, 640)))] * 3}]},
        400,
        "maximum context length is 512 tokens",
        "messages",
        "context_length_exceeded",
    ),
]
URL = "messages[0].content[0].image_url.url"
IMAGE_CASES = [
    (data_url(b"not an image at all"), "not an image in a known format", "invalid_image_format"),
    (data_url(PNG[: len(PNG) // 2]), "the PNG image is truncated or corrupted", "invalid_image"),
    (data_url(b""), "the image is empty", "invalid_image"),
    ("data:image/png;base64,####", "not valid base64", "invalid_base64"),
    ("https://example.com/a.png", "multimodal.allowed_url_hosts", "image_url_not_allowed"),
    ("file:///etc/passwd", "'file' is not supported", "invalid_image_url"),
    ("gopher://x", "expected a data: URL", "invalid_image_url"),
    (data_url(encoded(picture(1, 300))), "at most 200 times", "invalid_image_dimensions"),
    (data_url(encoded(Image.new("1", (8000, 8000)))), "64,000,000 pixels", "invalid_image_dimensions"),
]


@pytest.mark.parametrize(("changes", "status", "message", "param", "code"), CASES)
def test_chat_refusals(served: Served, changes, status, message, param, code):
    response = post(served, "/v1/chat/completions", json={"model": "digits-vl", "messages": HELLO, **changes})
    error = check_shape(response, status)
    assert message in error["message"]
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert served.engine.requests == []


@pytest.mark.parametrize(("url", "message", "code"), IMAGE_CASES)
def test_image_refusals(served: Served, url, message, code):
    response = post(served, "/v1/chat/completions", json={"messages": image_message(url)})
    error = check_shape(response, 400)
    assert message in error["message"]
    assert error["message"].startswith(URL)
    assert (error["param"], error["code"]) == (URL, code)
    assert len(served.renderer.processor_cache) == 0


@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"suffix": "x"}, "suffix = 'x' is not supported", "suffix"),
        ({"prompt": []}, "expected a string, a list of token ids, or a list of either", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]: the prompt is empty", "prompt[1]"),
        ({"prompt": [1, 512]}, "prompt[1] = 512: expected token ids below 512", "prompt"),
        ({"prompt": [-1]}, "prompt[0] = -1", "prompt[0]"),
        ({"prompt": [510]}, "stands for media", "prompt"),
        ({"prompt": [5] * 600}, "maximum context length is 512 tokens", "prompt"),
        ({"prompt": ["x"] * 200}, "at most 128", "prompt"),
        ({"prompt": ["x"] * 100, "n": 2}, "at most 128 choices", "n"),
        ({"logprobs": 21}, "logprobs = 21", "logprobs"),
        ({"messages": HELLO}, "messages: no such parameter", "messages"),
    ],
)
def test_completion_refusals(served: Served, changes, message, param):
    error = check_shape(post(served, "/v1/completions", json={"prompt": "x", **changes}), 400)
    assert message in error["message"]
    assert error["param"] == param
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"messages": [}',
        '{"messages": "\\ud800"}',
        "[" * 100_000,
        "\xff\xfe",
        '{"a":' * 300,
    ],
)
def test_bodies_that_are_no_object_of_json(served: Served, body):
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        check_shape(post(served, path, content=body.encode("latin-1")), 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_numbers_that_are_none(served: Served, value):
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {value}}}'
    check_shape(post(served, "/v1/chat/completions", content=body), 400)


def test_more_choices_than_may_wait_are_refused_for_good(serve: Callable[..., Served]):
    served = serve(scheduler={"max_waiting_requests": 3})
    for n, status in ((3, 200), (4, 400)):
        response = post(served, "/v1/completions", json={"prompt": "x", "n": n})
        assert response.status_code == status
    assert "at most 3 choices (scheduler.max_waiting_requests)" in check_shape(response, 400)["message"]


def test_more_tokens_than_may_wait_are_refused_for_good(serve: Callable[..., Served]):
    served = serve(scheduler={"max_waiting_tokens": 40})
    for n, length, status in ((2, 20, 200), (1, 60, 200), (3, 20, 400)):  # an empty queue takes any single one
        response = post(served, "/v1/completions", json={"prompt": [5] * length, "n": n})
        assert response.status_code == status
    assert "at most 40 prompt tokens over all choices" in check_shape(response, 400)["message"]


def test_body_over_the_limit(served: Served):
    error = check_shape(post(served, "/v1/chat/completions", content=b" " * (3 * 1024**2)), 413)
    assert "at most 2,097,152 bytes are accepted (server.max_body_bytes)" in error["message"]
    chunks = (b" " * 1024**2 for _ in range(3))  # no content-length
    check_shape(post(served, "/v1/chat/completions", content=chunks), 413)
    with pytest.raises(openai.APIStatusError) as caught:
        served.client.chat.completions.create(model="digits-vl", messages=image_message(data_url(b"x" * 10_000_000)))
    assert caught.value.status_code == 413


def test_unknown_routes_and_methods(served: Served):
    http = served.http
    assert "no such route" in check_shape(http.get("/v1/nothing"), 404)["message"]
    check_shape(http.get("/health/"), 404)  # not a redirect, which clients follow without their body
    assert "expected POST" in check_shape(http.get("/v1/chat/completions"), 405)["message"]
    check_shape(http.get("/v1/models/other"), 404)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        served.client.embeddings.create(model="digits-vl", input="x")


def test_bad_header_values(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    connection.request("POST", "/v1/completions", body=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert connection.getresponse().status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("messages", "prompt", "tokens", "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n"),
        *("logprobs", "top_logprobs", "max_tokens", "min_tokens", "ignore_eos", "stream", "stream_options"),
        *("tools", "response_format", "logit_bias", "cache_salt"),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    st.dictionaries(NAMES, JSON, max_size=4),
    st.booleans(),
)
def test_no_body_makes_the_server_fail(served: Served, path, body, valid):
    served.engine.script = lambda request: [finish(request)]
    if valid:
        body.setdefault("prompt" if path != "/v1/chat/completions" else "messages", HELLO if "chat" in path else "x")
    content = json.dumps(body)
    response = post(served, path, content=content)
    assert response.status_code < 500, content
    if response.status_code >= 400:
        check_shape(response, response.status_code)
