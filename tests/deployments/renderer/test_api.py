"""The routes through the real `openai` client, over a fake engine."""

import time

import msgspec
import openai
import pytest

from actors.messages import EngineOutput, EngineRequest, TokenLogprobs
from deployments.block_hash import HASH_BYTES
from deployments.renderer.engine_client import EngineUnavailableError
from deployments.renderer.tokenizer import PromptTokenizer
from deployments.scheduler.request import Request
from tests.deployments.renderer.conftest import Served, encoded, image_part, picture
from tests.deployments.renderer.fake_engine import finish, say, tokens

MODEL = "digits-vl"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(served: Served, **options):
    return served.client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **options})


def test_answer(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = say(tokenizer.encode("3 1 4"), num_cached_tokens=7)
    answer = chat(served, max_tokens=20, temperature=0.5, top_p=0.9, seed=11, extra_body={"top_k": 5, "min_p": 0.1})
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "3 1 4", "stop")
    assert choice.logprobs is None
    (request,) = served.engine.requests
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens == len(tokenizer.encode("3 1 4")) + 1  # the end of sequence was drawn too
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (20, 0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.logprobs) == (0.1, 11, None)
    assert sampling.stop_token_ids == (507, 505)


def test_defaults(served: Served):
    chat(served)
    chat(served, temperature=0, extra_body={"ignore_eos": True, "cache_salt": "tenant", "min_tokens": 2})
    first, second = served.engine.requests
    assert first.sampling.max_tokens == 512 - len(first.token_ids)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.repetition_penalty) == (1, 1, 1)
    assert first.sampling.seed != second.sampling.seed  # drawn here, so that a recomputation draws the same tokens
    assert second.sampling.stop_token_ids == ()
    assert (second.cache_salt, second.sampling.min_tokens) == ("tenant", 2)
    assert abs(first.arrival_time - time.time()) < 60


def test_neutral_values_of_unsupported_parameters_are_accepted(served: Served):
    chat(
        served,
        tools=[],
        logit_bias={},
        response_format={"type": "text"},
        n=1,
        user="someone",
        metadata={"a": "b"},
        store=False,
        tool_choice="none",
        extra_body={"echo": False, "best_of": 1, "stop": None, "audio": None},
    )
    message = chat(served).choices[0].message.model_dump()  # what clients put back into the history
    chat(served, messages=[*HELLO, {**message, "content": "hi"}, *HELLO])


def test_stream(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = say(tokenizer.encode("3 1 4"), num_cached_tokens=7)
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "3 1 4"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 7
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode("3 1 4")) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None and chunk.choices for chunk in chat(served, stream=True))


def test_stream_on_the_wire(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = say(tokenizer.encode("ab"), per_output=9)
    response = served.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(served: Served, tokenizer: PromptTokenizer, stream):
    def script(request: EngineRequest) -> list:
        index = int(request.request_id.rsplit("-", 1)[1])
        text = tokenizer.encode(f"answer {index}")
        return [
            0.01 * (3 - index),
            *[tokens(request, token) for token in text],
            finish(request, num_cached_tokens=index),
        ]

    served.engine.script = script
    answer = chat(served, n=3, seed=5, stream=stream)
    if stream:
        texts = ["", "", ""]
        reasons: list = [None] * 3
        roles = []
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                roles += [choice.index] if choice.delta.role else []
        assert roles == [0, 1, 2]
        assert reasons == ["stop"] * 3
    else:
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == len(served.engine.requests[0].token_ids)
        assert answer.usage.completion_tokens == sum(len(tokenizer.encode(text)) for text in texts)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert texts == ["answer 0", "answer 1", "answer 2"]
    assert sorted(request.sampling.seed for request in served.engine.requests) == [5, 6, 7]
    assert len({request.request_id for request in served.engine.requests}) == 3
    assert served.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["1 4", ["zzz", " 1 4"], "4 1"])
def test_stop_string_across_tokens(served: Served, tokenizer: PromptTokenizer, stop, stream):
    served.engine.script = say([token for letter in "3 1 4 1 5" for token in tokenizer.encode(letter)])
    answer = chat(served, stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        choice = chunks[-1].choices[0]
    else:
        choice = answer.choices[0]
        text = choice.message.content
    expected = "3 1 4 1 5".split(stop if isinstance(stop, str) else stop[1])[0]
    assert (text, choice.finish_reason) == (expected, "stop")
    assert choice.model_dump()["stop_reason"] == (stop if isinstance(stop, str) else stop[1])
    assert served.engine.abort_seen.wait(5)


@pytest.mark.parametrize("stream", [False, True])
def test_characters_split_across_tokens(served: Served, tokenizer: PromptTokenizer, stream):
    text = "né 🎉!"
    assert len(tokenizer.encode(text)) > len(text)
    served.engine.script = say(tokenizer.encode(text))
    answer = chat(served, stream=stream)
    if stream:
        pieces = [c.choices[0].delta.content or "" for c in answer]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text
    else:
        assert answer.choices[0].message.content == text


def test_length_and_stop_token(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = say(tokenizer.encode("abc"), reason="length")
    answer = chat(served, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == len(tokenizer.encode("abc"))
    served.engine.script = say(tokenizer.encode("abc"), eos=64)
    answer = chat(served, extra_body={"stop_token_ids": [64]})
    assert served.engine.requests[-1].sampling.stop_token_ids == (507, 505, 64)
    assert answer.choices[0].model_dump()["stop_reason"] == 64


def with_logprobs(tokenizer: PromptTokenizer, text: str):
    def script(request: EngineRequest) -> list:
        steps: list = [
            tokens(
                request, token, logprobs=(TokenLogprobs(token_id=token, logprob=-0.5, top=((token, -0.5), (64, -1.5))),)
            )
            for token in tokenizer.encode(text)
        ]
        return [*steps, finish(request)]

    return script


def test_logprobs(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = with_logprobs(tokenizer, "hé")
    answer = chat(served, logprobs=True, top_logprobs=2)
    assert served.engine.requests[0].sampling.logprobs == 2
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == "hé"
    assert [entry.logprob for entry in content] == [-0.5] * len(content)
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.5]
    assert (content[0].token, content[0].bytes) == ("h", [104])
    assert chat(served, logprobs=True).choices[0].logprobs.content
    assert served.engine.requests[-1].sampling.logprobs == 0

    streamed = []
    for chunk in chat(served, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_completion_logprobs(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = with_logprobs(tokenizer, "ab c")
    answer = served.client.completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text == "ab c"
    assert [answer.choices[0].text[offset] for offset in logprobs.text_offset] == [
        token[0] for token in logprobs.tokens
    ]
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5


def test_completions(served: Served, tokenizer: PromptTokenizer):
    served.engine.script = lambda request: [tokens(request, *request.token_ids), finish(request, "length")]
    create = served.client.completions.create
    answer = create(model=MODEL, prompt="a prompt")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "a prompt",
        "length",
    )
    assert served.engine.requests[0].sampling.max_tokens == 16
    assert create(model=MODEL, prompt=tokenizer.encode("ids")).choices[0].text == "ids"
    many = create(model=MODEL, prompt=["one", "two"], n=2)
    assert [choice.text for choice in many.choices] == ["one", "one", "two", "two"]
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage.prompt_tokens == len(tokenizer.encode("one")) + len(tokenizer.encode("two"))
    lists = create(model=MODEL, prompt=[tokenizer.encode("x"), tokenizer.encode("yy")])
    assert [choice.text for choice in lists.choices] == ["x", "yy"]
    streamed = create(model=MODEL, prompt="a prompt", stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "a prompt"
    assert chunks[-1].usage.prompt_tokens == len(tokenizer.encode("a prompt"))


def test_images_reach_the_engine_and_are_cached(served: Served):
    a, b = (encoded(picture(96, 64, seed)) for seed in (1, 2))

    def ask(*contents: bytes) -> EngineRequest:
        parts = [image_part(content) for content in contents]
        chat(served, messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "Read."}]}])
        return served.engine.requests[-1]

    request = ask(a, b)
    assert served.counters.values == (2, 0)
    assert [item.grid for item in request.mm_items] == [(1, 4, 6)] * 2
    assert [item.length for item in request.mm_items] == [6, 6]
    assert set(request.pixels) == {item.mm_hash for item in request.mm_items}
    assert all(pixels.shape == (24, 768) for pixels in request.pixels.values())
    again = ask(a, b, b)
    assert served.counters.values == (5, 3)
    assert [item.mm_hash for item in again.mm_items] == [
        item.mm_hash for item in (*request.mm_items, request.mm_items[1])
    ]
    assert len(again.pixels) == 2
    assert all(again.pixels[key] is request.pixels[key] for key in again.pixels)
    new = encoded(picture(96, 64, 3))
    ask(new, new)
    assert served.counters.values == (7, 4)


def test_a_prompt_is_hashed_once_as_the_engine_would(served: Served):
    parts = [image_part(encoded(picture(96, 64, 5))), {"type": "text", "text": "Read. " * 20}]
    for salt in ({}, {"cache_salt": "tenant"}):
        chat(served, messages=[{"role": "user", "content": parts}], n=2, extra_body=salt)
    plain, sibling, salted, _ = served.engine.requests
    assert sibling.block_hashes is plain.block_hashes
    assert len(plain.block_hashes) == HASH_BYTES * (len(plain.token_ids) // 16)
    assert salted.token_ids == plain.token_ids
    for request in (plain, salted):
        made_by_engine = Request(msgspec.structs.replace(request, block_hashes=b""), 1, 512)
        made_by_engine.extend_block_hashes(16)
        assert Request(request, 1, 512).block_hashes == made_by_engine.block_hashes
    assert salted.block_hashes != plain.block_hashes


def test_models_version_health_metrics(served: Served):
    (model,) = served.client.models.list().data
    assert (model.id, model.object, model.model_dump()["max_model_len"]) == (MODEL, "model", 512)
    assert served.client.models.retrieve(MODEL).id == MODEL
    http = served.http
    assert http.get("/health").status_code == 200
    served.engine.healthy = False
    unhealthy = http.get("/health")
    assert unhealthy.status_code == 503
    assert int(unhealthy.headers["retry-after"]) >= 1
    assert set(http.get("/version").json()) == {"version"}
    metrics = http.get("/metrics")
    assert (metrics.text, metrics.headers["content-type"]) == ("a_metric 1\n", "text/plain; version=0.0.4")
    document = http.get("/openapi.json").json()
    assert "ChatCompletionRequest" in document["components"]["schemas"]


def test_tokenize_and_detokenize(served: Served, tokenizer: PromptTokenizer):
    http = served.http
    got = http.post("/tokenize", json={"model": MODEL, "prompt": "Hello 1", "return_token_strs": True}).json()
    assert got["tokens"] == tokenizer.encode("Hello 1")
    assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), 512)
    assert len(got["token_strs"]) == got["count"]
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "Hello 1"}
    chat(served)
    as_chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert tuple(as_chat["tokens"]) == served.engine.requests[0].token_ids
    with_image = {"role": "user", "content": [image_part(encoded(picture()))]}
    assert http.post("/tokenize", json={"messages": [with_image]}).json()["tokens"].count(510) == 6
    assert http.post("/detokenize", json={"tokens": [99999]}).status_code == 400


def test_resets(served: Served, serve):
    http = served.http
    image = {"role": "user", "content": [image_part(encoded(picture()))]}
    chat(served, messages=[image])
    assert len(served.renderer.processor_cache) == 1
    for name in ("prefix", "mm", "encoder"):
        assert http.post(f"/reset_{name}_cache").status_code == 200
    assert served.engine.resets == ["prefix", "encoder"]
    assert len(served.renderer.processor_cache) == 0
    closed = serve()
    http = closed.http
    for name in ("prefix", "mm", "encoder"):
        response = http.post(f"/reset_{name}_cache")
        assert response.status_code == 403
        assert "server.development_mode" in response.json()["error"]["message"]
    assert closed.engine.resets == []


def test_trace_context_is_passed_on(served: Served):
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    served.http.post("/v1/chat/completions", json={"messages": HELLO}, headers={"traceparent": header})
    assert served.engine.requests[0].trace_context == {"traceparent": header}
    state = ",".join(f"vendor{index}=value" for index in range(50))
    served.http.post(
        "/v1/chat/completions", json={"messages": HELLO}, headers={"traceparent": header, "tracestate": state}
    )
    passed_on = served.engine.requests[1].trace_context["tracestate"]
    assert 480 < len(passed_on) <= 512
    assert state.startswith(passed_on + ",")  # whole members only


@pytest.mark.parametrize("stream", [False, True])
def test_engine_errors_have_their_status(served: Served, stream):
    for status, kind in ((400, openai.BadRequestError), (429, openai.RateLimitError), (503, openai.APIStatusError)):
        served.engine.script = lambda request, status=status: [
            EngineOutput(request_id=request.request_id, finish_reason="error", error="say why", error_status=status)
        ]
        with pytest.raises(kind, match="say why") as caught:
            chat(served, stream=stream)
        assert caught.value.status_code == status
        assert ("retry-after" in caught.value.response.headers) == (status != 400)
    served.engine.script = lambda request: [
        finish(request, "error", error="say why", error_status=429, retry_after_s=12.2)
    ]
    with pytest.raises(openai.RateLimitError) as caught:
        chat(served, stream=stream)
    assert caught.value.response.headers["retry-after"] == "13"
    served.engine.script = lambda request: [EngineUnavailableError("restarting", retry_after=7)]
    with pytest.raises(openai.APIStatusError, match="restarting") as caught:
        chat(served, stream=stream)
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "7")
    served.engine.script = lambda request: []  # ends without a finish reason
    with pytest.raises(openai.APIStatusError) as caught:
        chat(served, stream=stream)
    assert caught.value.status_code == 503


@pytest.mark.parametrize(
    "failure",
    [lambda request: finish(request, "error", error="say why", error_status=429), lambda _: RuntimeError("a bug")],
)
def test_error_in_the_middle_of_a_stream_is_its_last_event(served: Served, tokenizer: PromptTokenizer, failure):
    served.engine.script = lambda request: [tokens(request, *tokenizer.encode("ab")), 0.05, failure(request)]
    text = ""
    with pytest.raises(openai.APIError, match=r"say why|the server failed"):  # noqa: PT012
        for chunk in chat(served, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "ab"


def test_error_of_one_choice_aborts_the_others(served: Served, tokenizer: PromptTokenizer):
    def script(request: EngineRequest) -> list:
        if request.request_id.endswith("-1"):
            return [0.05, finish(request, "error", error="full", error_status=429)]
        return [tokens(request, *tokenizer.encode("a")), 30.0]

    served.engine.script = script
    with pytest.raises(openai.RateLimitError):
        chat(served, n=3)
    assert len(served.engine.aborted) == 2
