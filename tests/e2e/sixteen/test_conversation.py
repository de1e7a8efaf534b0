"""One conversation against sixteen ranks: which cache layer counts what, and when.

Two 448x448 images (196 embeddings each) begin the first message; every step re-sends the history.
EXACT and GREW say how a counter of `/metrics` must move in a step; what a step does not name is not checked, because
an image whose last tokens fall into a KV block that was not yet full is looked up again in the scheduler.
"""

import numpy as np
import pytest

from configs import digits
from tests.support.application import Application

GREW = ">0"

STEPS = [
    (
        "turn 1, cold",
        {
            "vllm:mm_cache_queries": 2,
            "vllm:mm_cache_hits": 0,
            "vllm:prefix_cache_hits": 0,
            "vllm_neuron:scheduler_encoder_cache_hits": 0,
            "vllm:encoder_cache_queries": 2,
            "vllm:encoder_cache_hits": 0,
            "vllm_neuron:device_encoder_cache_queries": 2,
            "vllm_neuron:device_encoder_cache_misses": 2,
            "vllm_neuron:device_encoder_cache_evictions": 0,
        },
    ),
    (
        "turn 2, text follow-up",
        {
            "vllm:mm_cache_queries": 2,
            "vllm:mm_cache_hits": 2,
            "vllm:prefix_cache_hits": GREW,
            "vllm_neuron:device_encoder_cache_misses": 0,
        },
    ),
    (
        "turn 3, an image again at a new position",
        {
            "vllm:mm_cache_queries": 3,
            "vllm:mm_cache_hits": 3,
            "vllm:prefix_cache_hits": GREW,
            "vllm_neuron:scheduler_encoder_cache_hits": GREW,
            "vllm:encoder_cache_hits": GREW,
            "vllm_neuron:device_encoder_cache_misses": 0,
        },
    ),
    (
        "replay of turn 3",
        {
            "vllm:mm_cache_queries": 3,
            "vllm:mm_cache_hits": 3,
            "vllm:prefix_cache_hits": GREW,
            "vllm_neuron:device_encoder_cache_misses": 0,
        },
    ),
    (
        "fresh, same images, other text",
        {
            "vllm:mm_cache_queries": 2,
            "vllm:mm_cache_hits": 2,
            "vllm:prefix_cache_hits": GREW,
            "vllm_neuron:device_encoder_cache_misses": 0,
        },
    ),
]

OCCUPANCY = tuple(f"vllm_neuron:device_encoder_cache_{state}_blocks" for state in ("active", "free", "held"))


def image(labels: list[int], seed: int) -> dict:
    rng = np.random.default_rng(seed)
    picture = digits.strip(digits.scans_of(labels, rng), (448, 448), rng)
    return {"type": "image_url", "image_url": {"url": digits.data_url(picture)}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def converse(application: Application) -> dict[str, dict[str, float]]:
    """How every counter moved in each step, by the step's name."""
    a, b = image([3, 1, 4, 1], 1), image([5, 9], 2)
    messages: list[dict] = [{"role": "user", "content": [a, b, text("Read the digits.")]}]
    found: dict[str, dict[str, float]] = {}

    def ask(step: str, conversation: list[dict]) -> str:
        before = application.metrics()
        answer = application.client.chat.completions.create(
            model="digits-vl", messages=conversation, temperature=0, max_tokens=32
        )
        after = application.metrics()
        found[step] = {name: value - before.get(name, 0) for name, value in after.items()}
        content = answer.choices[0].message.content
        assert content
        return content

    names = [name for name, _ in STEPS]
    first = ask(names[0], messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": [text("How many digits are in the first image?")]},
    ]
    second = ask(names[1], messages)
    messages += [{"role": "assistant", "content": second}, {"role": "user", "content": [b, text("And this one?")]}]
    third = ask(names[2], messages)
    assert ask(names[3], messages) == third
    ask(names[4], [{"role": "user", "content": [a, b, text("Which image has fewer digits?")]}])
    return found


@pytest.fixture(scope="module")
def deltas(sixteen: Application) -> dict[str, dict[str, float]]:
    return converse(sixteen)


@pytest.mark.parametrize(("step", "expected"), STEPS, ids=[name for name, _ in STEPS])
def test_each_layer_counts_as_the_contract_says(
    step: str, expected: dict[str, object], deltas: dict[str, dict[str, float]]
) -> None:
    moved = deltas[step]
    for name, value in expected.items():
        if value == GREW:
            assert moved[name] > 0, name
        else:
            assert moved[name] == value, name


def test_blocks_add_up_over_sixteen_ranks(sixteen: Application, deltas: dict[str, dict[str, float]]) -> None:
    values = sixteen.metrics()
    num_blocks = sixteen.args["encoder_cache"]["num_blocks"]
    assert sum(values[name] for name in OCCUPANCY) == 16 * (num_blocks - 1)
    # Two images of 196 embeddings: four blocks of 64 each, on every rank.
    assert values["vllm_neuron:device_encoder_cache_active_blocks"] == 16 * 8
    assert values["vllm_neuron:device_encoder_cache_active_real_tokens"] == 16 * 392
