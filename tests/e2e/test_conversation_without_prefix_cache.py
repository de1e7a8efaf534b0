"""The same conversation on sixteen ranks with the prefix cache off: every image of every turn is looked up again."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import DEBUG
from tests.e2e.sixteen.test_conversation import STEPS, converse
from tests.support.application import Application

IMAGES = dict(zip([name for name, _ in STEPS], (2, 2, 3, 3, 2), strict=True))


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, float]]]:
    log = tmp_path_factory.mktemp("sixteen-without") / "serve.log"
    few_buckets = {"model": {"max_model_len": 2048}, "scheduler": {"max_num_seqs": 2}}  # less to warm up
    changes = DEBUG | few_buckets | {"kv_cache": {"enable_prefix_caching": False}}
    with Application("serve_config.yaml", changes, log) as application:
        yield converse(application)


@pytest.mark.parametrize("step", IMAGES)
def test_every_image_is_looked_up_and_none_is_encoded_twice(step: str, deltas: dict[str, dict[str, float]]) -> None:
    moved, images = deltas[step], IMAGES[step]
    new = 2 if step == STEPS[0][0] else 0
    expected = {
        "vllm:mm_cache_queries": images,
        "vllm:mm_cache_hits": images - new,
        "vllm:prefix_cache_queries": 0,
        "vllm:prefix_cache_hits": 0,
        "vllm_neuron:scheduler_encoder_cache_queries": images,
        "vllm_neuron:scheduler_encoder_cache_hits": images - new,
        "vllm:encoder_cache_queries": images,
        "vllm:encoder_cache_hits": images - new,
        "vllm_neuron:device_encoder_cache_queries": new,
        "vllm_neuron:device_encoder_cache_misses": new,
        "vllm_neuron:device_encoder_cache_evictions": 0,
    }
    assert {name: moved[name] for name in expected} == expected
