"""Settings: a wrong key says where it is, what it was, and what would have been right."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan import bucket, make_plan
from configs import check
from configs.engine import ConfigError, EngineConfig, load_config, parse_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"kv_cache": {"num_block": 3}}, ["kv_cache.num_block = 3", "num_blocks"]),
        ({"modl": {}}, ["modl = {}", "no such setting", "model"]),
        ({"parallel": {"world_size": 3}}, ["parallel.world_size = 3", "16"]),
        ({"scheduler": {"max_num_seqs": 0}}, ["scheduler.max_num_seqs = 0", "greater than or equal to 1"]),
        ({"kv_cache": {"num_blocks": 3}}, ["kv_cache.num_blocks = 3", "model.max_model_len"]),
        ({"buckets": {"decode_seqs": [4, 2, 16]}}, ["buckets.decode_seqs = [4, 2, 16]", "ascending"]),
        ({"buckets": {"decode_seqs": [4]}}, ["buckets.decode_seqs = [4]", "scheduler.max_num_seqs = 16"]),
    ],
)
def test_a_wrong_setting_is_explained(tree: dict, says: list[str]) -> None:
    for build in (parse_config, EngineConfig.model_validate):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the parts below are the match
            build(tree)
        for part in says:
            assert part in str(raised.value)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"a": 1, "model": {"b": 2}})
    assert "a = 1" in str(raised.value)
    assert "model.b = 2" in str(raised.value)


@pytest.mark.parametrize("name", ["serve_config.yaml", "configs/laptop.yaml"])
def test_the_shipped_configurations_make_a_plan(name: str) -> None:
    plan = make_plan(load_config(ROOT / name))
    assert plan.device == "cpu"
    assert plan.dtype == "float32"
    assert plan.prefill_tokens[-1] == plan.config.scheduler.max_num_batched_tokens
    assert plan.context_tokens[-1] >= plan.config.model.max_model_len
    assert plan.vision_patches[-1] >= plan.max_image_patches
    assert len(set(plan.bucket_names())) == len(plan.bucket_names())


def test_the_reference_deployment_is_valid() -> None:
    config = load_config(ROOT / "configs" / "trn2.yaml")
    assert config.parallel.world_size == 16
    with pytest.raises(ConfigError, match=r"model\.path = '/models/Qwen3-VL-32B-Instruct'"):
        make_plan(config)


def test_compiled_graphs_get_powers_of_two_and_the_cpu_four_sizes_for_each() -> None:
    tree = {"model": {"max_model_len": 4000}, "scheduler": {"max_num_seqs": 7, "max_num_batched_tokens": 100}}
    on_cpu = (64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1664)
    for device, expected in (
        ("cpu", ((16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100), (1, 2, 3, 4, 5, 6, 7), (4000,), on_cpu)),
        ("neuron", ((100,), (1, 2, 4, 7), (1024, 2048, 4000), (128, 256, 512, 1024, 1664))),
    ):
        plan = make_plan(parse_config(tree | {"parallel": {"device": device, "world_size": 1}}))
        assert (plan.prefill_tokens, plan.decode_seqs, plan.context_tokens, plan.vision_patches) == expected
        samples = [name for name in plan.bucket_names() if name.startswith("sample")]
        kinds = ("sample_greedy", "sample", "sample_penalties") if device == "neuron" else ()
        assert samples == [f"{kind}/{seqs}" for kind in kinds for seqs in plan.decode_seqs]
        assert plan.dtype == ("float32" if device == "cpu" else "bfloat16")


def test_a_chosen_neuron_core_count_makes_auto_neuron() -> None:
    config = parse_config({"parallel": {"world_size": 1}})
    assert [make_plan(config, neuron_cores=cores).device for cores in (0, 8)] == ["cpu", "neuron"]


@pytest.mark.parametrize(
    ("buckets", "says"),
    [
        ({"vision_patches": [64]}, "buckets.vision_patches"),
        ({"context_tokens": [256]}, "buckets.context_tokens"),
        ({"context_tokens": [100, 8200]}, "multiples of kv_cache.block_size"),
        ({"prefill_tokens": [1024], "context_tokens": [1008]}, "is padded to 1024"),
        ({"vision_patches": [64, 1664]}, r"buckets.vision_patches = \[64, 1664\]: expected multiples of 128 with"),
    ],
)
def test_a_bucket_that_cannot_work_is_refused(buckets: dict, says: str) -> None:
    device = "neuron" if "multiples of 128" in says else "cpu"
    model = {"max_model_len": 1000} if "padded" in says else {}
    with pytest.raises(ConfigError, match=says):
        make_plan(parse_config({"buckets": buckets, "parallel": {"device": device}, "model": model}))


@given(length=st.integers(32, 5000), budget=st.integers(16, 3000), device=st.sampled_from(["cpu", "neuron"]))
@settings(max_examples=60, deadline=None)
def test_every_prefill_that_may_come_has_a_graph(length: int, budget: int, device: str) -> None:
    """Of the tokens that fit a step, padded, with as much context: whatever the limits, they meet in a bucket."""
    tree = {
        "model": {"max_model_len": length},
        "scheduler": {"max_num_batched_tokens": budget},
        "parallel": {"device": device, "world_size": 1},
    }
    plan = make_plan(parse_config(tree))
    for tokens in {1, 16, 17, length // 2, length - 1, length, budget // 2, budget, plan.context_tokens[-1]}:
        if 1 <= tokens <= min(budget, plan.context_tokens[-1]):
            padded = bucket(plan.prefill_tokens, tokens)
            assert f"prefill/{padded}x{bucket(plan.context_tokens, padded)}" in plan.bucket_names()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        make_plan(parse_config({"model": {"path": str(tmp_path)}}))


def test_a_bucket_is_the_smallest_that_holds() -> None:
    assert [bucket((4, 8), needed) for needed in (1, 4, 5, 8)] == [4, 4, 8, 8]
    with pytest.raises(ValueError, match="9 exceeds"):
        bucket((4, 8), 9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("applications: [{args: {encoder_cache: {num_bloks: 3}, telemetri: {}}}]", "(?s)num_bloks = 3.*telemetri"),
        ("applications: [", "while parsing"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_ends_the_check_with_everything_that_is_wrong(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "wrong.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=says):
        check.main([str(file)])


def test_the_check_of_a_right_file_says_nothing() -> None:
    check.main([str(ROOT / "serve_config.yaml")])
