"""The real openai client against sixteen ranks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from configs import dialogues, digits
from tests.support.application import Application

MODEL = "digits-vl"


def question(labels: list[int], size: tuple[int, int], seed: int, words: str = "Read the digits.") -> list[dict]:
    rng = np.random.default_rng(seed)
    picture = digits.strip(digits.scans_of(labels, rng), size, rng)
    image = {"type": "image_url", "image_url": {"url": digits.data_url(picture)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": words}]}]


def greedy(client: openai.OpenAI, messages: list[dict], **options: object) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24, **options)
    return answer.choices[0].message.content


def test_it_reads_digits(sixteen: Application) -> None:
    """Position by position over held-out scans; the model card has the figures for many more."""
    rng = np.random.default_rng(17)
    sizes = [(64, 64), (192, 64), (224, 224), (448, 448), (640, 160), (896, 448)] * 6
    wanted = [[int(digit) for digit in rng.integers(0, 10, rng.integers(1, digits.max_digits(s) + 1))] for s in sizes]

    def read(seed: int) -> list[str]:
        return greedy(sixteen.client, question(wanted[seed], sizes[seed], seed)).split()

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(read, range(len(sizes))))
    pairs = [pair for labels, got in zip(wanted, answers, strict=True) for pair in zip(labels, got, strict=False)]
    right = sum(str(label) == got for label, got in pairs)
    asked = sum(map(len, wanted))
    assert right / asked > 0.93


def test_streaming_gives_the_same_tokens_and_usage(sixteen: Application) -> None:
    messages = question([4, 2], (128, 64), 9)
    whole = sixteen.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    chunks = list(
        sixteen.client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_a_seed_reproduces_and_choices_differ(sixteen: Application) -> None:
    def sampled() -> list[str]:
        answer = sixteen.client.completions.create(
            model=MODEL, prompt="hello", temperature=1.5, seed=11, n=3, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    first = sampled()
    assert sampled() == first
    assert len(set(first)) > 1


def test_logprobs(sixteen: Application) -> None:
    answer = sixteen.client.chat.completions.create(
        model=MODEL, messages=question([6], (64, 64), 3), temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens or len(content) == answer.usage.completion_tokens - 1
    for token in content:
        assert token.logprob <= 0
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert token.top_logprobs[0].token == token.token


def test_sixteen_at_a_time_answer_as_one_by_one(sixteen: Application) -> None:
    rng = np.random.default_rng(21)
    asked = [
        dialogues.conversation(rng, sizes=((64, 64), (128, 64), (224, 224)), turns=1, max_images=2).messages()
        for _ in range(24)
    ]
    with ThreadPoolExecutor(16) as pool:
        together = list(
            pool.map(lambda messages: greedy(sixteen.client, messages, extra_body={"cache_salt": "t"}), asked)
        )
    alone = [greedy(sixteen.client, messages, extra_body={"cache_salt": "a"}) for messages in asked]
    assert together == alone


def test_what_cannot_be_served_is_a_400_and_the_engine_goes_on(sixteen: Application) -> None:
    url = {"url": "data:image/png;base64,aGVsbG8="}
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    with pytest.raises(openai.BadRequestError):
        greedy(sixteen.client, bad)
    with pytest.raises(openai.BadRequestError):
        greedy(sixteen.client, [{"role": "user", "content": "x" * 100_000}])
    with pytest.raises(openai.NotFoundError):
        sixteen.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="no_such_parameter"):
        greedy(sixteen.client, [{"role": "user", "content": "x"}], extra_body={"no_such_parameter": 1})
    assert greedy(sixteen.client, question([7], (64, 64), 0))


def test_clients_that_go_away_free_their_places(sixteen: Application) -> None:
    """All sixteen sequences of the engine are taken by long answers whose clients leave; the next one is served."""
    streams = [
        sixteen.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"{number}"}], max_tokens=3000, stream=True,
            extra_body={"ignore_eos": True},
        )
        for number in range(16)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
        stream.close()
    # One of those answers takes minutes on sixteen ranks and two cores.
    client = sixteen.client.with_options(timeout=60)
    assert greedy(client, question([7], (64, 64), 0))
