"""Bodies that are nearly right: never a 5xx, and every refusal has OpenAI's shape."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.deployments.renderer.conftest import data_url, encoded, picture
from tests.fuzz.conftest import Fuzzed, cases

pytestmark = pytest.mark.timeout(900)

SPECIAL = [
    "<|image_pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "\0",
    "\x1b[2J",
    "\u202e",
    "\ue000",
    "{{ 7*7 }}",
]
TEXT = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(SPECIAL), max_size=4).map("".join))
PICTURES = [data_url(encoded(picture(*size))) for size in ((64, 64), (96, 64), (224, 224), (1, 400))]
URLS = st.one_of(
    st.sampled_from([*PICTURES, "http://127.0.0.1/a", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,"]),
    st.binary(max_size=40).map(data_url),
    st.text(max_size=20),
)
IMAGE = st.builds(lambda url, detail: {"type": "image_url", "image_url": {"url": url, **detail}}, URLS,
                  st.sampled_from([{}, {"detail": "low"}, {"detail": "x"}]))  # fmt: skip
PART = st.one_of(TEXT.map(lambda text: {"type": "text", "text": text}), IMAGE)
RUBBISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, -(2**63) - 1, 10**400])
    | st.floats()
    | TEXT
    | st.sampled_from(["user", "text", "image_url", "json_object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROLE = st.sampled_from(["user", "user", "user", "system", "developer", "assistant", "tool", "root", "<|im_start|>", ""])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": st.one_of(TEXT, st.lists(PART, max_size=3), RUBBISH)},
    optional={"name": RUBBISH, "tool_calls": RUBBISH, "refusal": st.none()},
)
MESSAGES = st.one_of(
    st.lists(MESSAGE, max_size=3),
    TEXT.map(lambda text: [{"role": "user", "content": text}]),
    st.lists(PART, min_size=1, max_size=3).map(lambda parts: [{"role": "user", "content": parts}]),
    st.just([{"role": "user", "content": "x"}] * 30),
)
TOKENS = st.lists(st.integers(-1, 520), max_size=70)
PROMPT = st.one_of(TEXT, TOKENS, st.lists(TEXT, max_size=6), st.lists(TOKENS, max_size=6), RUBBISH)
SAMPLING = {
    "model": st.sampled_from(["digits-vl", "other"]),
    "max_tokens": st.integers(-1, 70),
    "max_completion_tokens": st.integers(-1, 70),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 600),
    "min_p": st.floats(-0.5, 1.5),
    "seed": st.integers(-(2**64), 2**64),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=6), st.just("x" * 1000)),
    "stop_token_ids": st.lists(st.integers(-1, 600), max_size=6),
    "n": st.integers(-1, 6),
    "presence_penalty": st.floats(-2.5, 2.5),
    "frequency_penalty": st.floats(-2.5, 2.5),
    "repetition_penalty": st.floats(-0.5, 11),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 70),
    "stream": st.booleans(),
    "stream_options": st.sampled_from([{}, {"include_usage": True}, {"include_usage": 1}]),
    "cache_salt": TEXT,
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 22)),
    "top_logprobs": st.integers(-1, 22),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "return_token_strs": st.booleans(),
    "add_special_tokens": st.booleans(),
    "tools": RUBBISH,
    "response_format": RUBBISH,
    "logit_bias": RUBBISH,
}
"""Values around their bounds; any of them may also be rubbish."""
NAMES = st.one_of(st.sampled_from(sorted(SAMPLING)), TEXT)
ACCEPTED = {
    "max_tokens": st.integers(1, 12),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.one_of(st.integers(-1, 600), st.integers(0, 2**31 - 1)),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(TEXT.filter(bool), st.lists(TEXT.filter(bool), max_size=4)),
    "stop_token_ids": st.lists(st.integers(0, 511), max_size=4),
    "n": st.integers(1, 4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "cache_salt": TEXT.filter(bool),
}
"""What is taken in every combination."""
GOOD_IMAGE = st.sampled_from(PICTURES[:2]).map(lambda url: {"type": "image_url", "image_url": {"url": url}})
GOOD_PART = st.one_of(TEXT.map(lambda text: {"type": "text", "text": text}), GOOD_IMAGE)
GOOD_CONTENT = st.one_of(TEXT, st.lists(GOOD_PART, min_size=1, max_size=2))
GOOD_PROMPT = st.one_of(
    TEXT.filter(bool),
    st.lists(st.integers(0, 509), min_size=1, max_size=40),
    st.just(["a", "b"]),
)


@st.composite
def accepted(draw: st.DrawFn) -> tuple[str, dict]:
    """A body that is right, if its prompt is not too long."""
    chat = draw(st.integers(0, 3)) > 0
    names = draw(st.lists(st.sampled_from(sorted(ACCEPTED)), max_size=6, unique=True))
    body = {"max_tokens": 3} | {name: draw(ACCEPTED[name]) for name in names}
    if chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": draw(GOOD_CONTENT)}]}
    if isinstance(prompt := draw(GOOD_PROMPT), list) and isinstance(prompt[0], str):
        body.pop("n", None)
    return "/v1/completions", body | {"prompt": prompt}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict]:
    path = draw(st.sampled_from(["/v1/chat/completions"] * 3 + ["/v1/completions", "/tokenize", "/detokenize"]))
    body: dict = {}
    if path == "/v1/chat/completions" or (path == "/tokenize" and draw(st.booleans())):
        body["messages"] = draw(MESSAGES)
    elif path == "/detokenize":
        body["tokens"] = draw(st.one_of(TOKENS, RUBBISH))
    else:
        body["prompt"] = draw(PROMPT)
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        rubbish = name not in SAMPLING or draw(st.integers(0, 9)) == 0
        body[name] = draw(RUBBISH if rubbish else SAMPLING[name])
    return path, body


def check(response: httpx.Response, asked: object) -> None:
    """What a client may rely on, whatever it sent."""
    assert response.status_code < 500, asked
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n"), asked
            assert '"error"' not in response.text, asked
        else:
            assert "error" not in response.json()
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, asked
    assert error["message"], asked
    assert len(error["message"]) < 2000, asked


many = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def test_bodies(fuzzed: Fuzzed) -> None:
    @settings(many, max_examples=cases(0.42))
    @given(st.one_of(requests(), accepted()))
    def run(asked: tuple[str, dict]) -> None:
        path, body = asked
        check(fuzzed.request("POST", path, content=json.dumps(body)), asked)

    run()
    for status in (200, 400):  # both sides of the border
        assert fuzzed.statuses.get(status, 0) > cases(0.42) / 8, fuzzed.statuses


WHOLE = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stop": ["x"]}).encode()


@settings(many, max_examples=cases(0.08))
@given(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 4), st.binary(max_size=4)), max_size=4), st.data())
def test_bytes(fuzzed: Fuzzed, edits: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    """A valid body with a few of its bytes cut out or replaced, sent to any path by any method."""
    content = bytearray(WHOLE)
    for position, length, new in edits:
        content[position : position + length] = new
    path = data.draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/x"]))
    method = data.draw(st.sampled_from(["POST"] * 5 + ["PUT", "PATCH", "DELETE", "OPTIONS"]))
    check(fuzzed.request(method, path, content=bytes(content)), (method, path, bytes(content)))
