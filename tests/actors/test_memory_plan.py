"""The memory plan against what is really allocated, its refusals, and the reference deployment's numbers."""

import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.memory_plan import GIB, main
from actors.model_runner import ModelRunner
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan, make_plan, preview_plan
from configs.engine import ConfigError, EngineConfig, load_config, parse_config
from deployments.scheduler.scheduler import Scheduler
from deployments.scheduler.stats import EngineStats
from neuron.collectives import create_collectives
from neuron.kernels import load_kernels
from neuron.kv_blocks import KVBlocks
from neuron.models import family_of, load_model_config
from neuron.models.interface import DecodeInputs, ImageInputs, Model, PrefillInputs, VisionBlock
from telemetry.metrics import Metric
from telemetry.recorder import ENGINE, Recorder, create_recorder

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "configs" / "models" / "digits-vl"
QWEN = Path(__file__).parent / "qwen3-vl-32b"
MIB = 2**20


class OneOf:
    """Stands in for the collectives of one rank: what it returns has the right shapes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.world_size, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live; `peak` is the most at any time."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._storages:
                self._storages.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, storage: int, nbytes: int) -> None:
        self._storages.discard(storage)
        self.live -= nbytes


def load(rank: int, world_size: int, dtype: torch.dtype) -> Model:
    return family_of(DIGITS).load_model(DIGITS, OneOf(rank, world_size), load_kernels("masked"), dtype, "cpu")


def digits(**sections: Any) -> EngineConfig:
    """One rank of the demo model, small in every respect."""
    tree = {
        "model": {"max_model_len": 256},
        "parallel": {"world_size": 1, "device": "cpu"},
        "encoder_cache": {"num_blocks": 32},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
        "buckets": {"vision_patches": [64, 1664]},
    }
    return parse_config(tree | sections)


def limited(hbm: int, **sections: Any) -> EngineConfig:
    return digits(memory={"hbm_bytes_per_rank": hbm}, **sections)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trn2() -> EnginePlan:
    return preview_plan(reference())


def reference(**updates: Any) -> EngineConfig:
    """configs/trn2.yaml, for the config.json beside this file."""
    tree = load_config(ROOT / "configs" / "trn2.yaml").model_dump()
    tree["model"]["path"] = str(QWEN)
    for name, value in updates.items():
        section, _, key = name.partition("__")
        tree[section][key] = value
    return parse_config(tree)


# What is counted is what is allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_the_weights_are_those_that_a_rank_loads(world_size: int, dtype: torch.dtype) -> None:
    planned = load_model_config(DIGITS).memory(world_size, dtype.itemsize).weights()
    assert {load(rank, world_size, dtype).nbytes for rank in {0, world_size // 2, world_size - 1}} == {planned}


def test_the_weights_of_the_32b_model_are_its_parameters() -> None:
    """transformers' implementation counts 33,357,390,064; here norms of q and k are repeated for each head, and patches
    have a kernel for one frame instead of two."""
    config = load_model_config(QWEN)
    repeated = 64 * (64 + 8 - 2) * 128
    other_frame = 1152 * 3 * 16 * 16
    rotary_tables = 64 * (4 + 8) + 18 * 4
    first_row = 8  # of this rank's part of the vocabulary, an int64
    assert config.memory(1, 2).weights() == 2 * (33_357_390_064 + repeated - other_frame) + rotary_tables + first_row


def test_a_model_runner_holds_what_the_plan_says() -> None:
    model = {"max_model_len": 256, "matmul_precision": "highest"}  # kernels for AMX may hold weights in less
    plan = make_plan(digits(model=model, kv_cache={"num_blocks": 40}))
    collectives = create_collectives("shared_memory", 0, 1, "memory-plan", 5.0)
    runner = ModelRunner(plan, collectives, PixelMailbox(), create_recorder(plan.config.model, ENGINE))
    assert plan.memory.weights == runner.weight_bytes
    assert plan.memory.kv_blocks == runner._kv.nbytes
    assert plan.memory.encoder_cache == runner._embeddings.nbytes


@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (4, torch.bfloat16)])
def test_no_graph_takes_more_than_its_workspace(world_size: int, dtype: torch.dtype) -> None:
    """Nor less than two fifths of it: an estimate that is far too high would cost KV blocks."""
    family, model = family_of(DIGITS), load(0, world_size, dtype)
    config = family.load_config(DIGITS)
    memory = config.memory(world_size, dtype.itemsize)
    kv = KVBlocks(config.num_layers, 80, 16, config.num_local_kv_heads(world_size), config.head_dim, dtype)
    cache = torch.zeros(1024, config.fat_dim // world_size, dtype=dtype)
    lasting = [*model.buffers(), *kv.keys, *kv.values, cache]  # type: ignore[attr-defined]

    def encode(patches: int) -> None:
        arrays = family.prepare_vision_block(config, [], patches)
        embeddings = model.encode(VisionBlock(*(torch.from_numpy(array).clone() for array in arrays)))
        model.write_embeddings(embeddings, cache, zeros(world_size * len(embeddings)))

    def prefill(tokens: int, context: int, images: bool) -> None:
        inputs = PrefillInputs(
            zeros(tokens), zeros(3, tokens), *(zeros(tokens) for _ in range(3)), *(zeros(context),) * 3, zeros(16)
        )
        found = ImageInputs(cache, zeros(tokens), torch.zeros(tokens, dtype=torch.bool)) if images else None
        model.prefill(kv, inputs, found)

    def decode(seqs: int, context: int) -> None:
        tables = zeros(seqs, context // kv.block_size)
        model.decode(kv, DecodeInputs(zeros(seqs), zeros(3, seqs), zeros(seqs), tables, zeros(seqs) + 1))

    def check(estimate: int, graph: Callable[..., None], *sizes: Any) -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Allocations(lasting) as allocations:
            graph(*sizes)
        assert allocations.peak <= estimate <= 2.5 * allocations.peak, (graph.__name__, sizes)

    for patches in (64, 512):
        check(memory.encode(patches), encode, patches)
    for tokens, context, images in ((16, 512, False), (128, 256, True), (256, 256, True)):
        check(memory.prefill(tokens, context, 16, images), prefill, tokens, context, images)
    for seqs, context in ((1, 512), (16, 128)):
        check(memory.decode(seqs, context), decode, seqs, context)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


# KV blocks


def test_without_a_limit_there_are_4096_kv_blocks() -> None:
    plan = make_plan(digits())
    assert plan.config.kv_cache.num_blocks == 4096
    assert plan.memory.available is None
    with pytest.raises(ConfigError, match=r"kv_cache\.num_blocks = 4096 .* model\.max_model_len = 80000"):
        make_plan(digits(model={"max_model_len": 80_000}))


@pytest.mark.parametrize("utilization", [0.9, 1.0])
def test_kv_blocks_take_what_remains(utilization: float) -> None:
    memory = make_plan(digits(memory={"hbm_bytes_per_rank": 300 * MIB, "utilization": utilization})).memory
    assert memory.available == int(300 * MIB * utilization)
    assert memory.total <= memory.available < memory.total + memory.kv_block


def test_every_side_gets_the_derived_number() -> None:
    plan = make_plan(limited(300 * MIB))
    derived = plan.memory.num_kv_blocks
    assert derived not in (None, 4096)
    recorded: list[dict[str, Any]] = []

    class Gauges(Recorder):
        def set(self, metric: Metric, value: float, **labels: str) -> None:
            recorded.append(labels)

    EngineStats(plan.config, Gauges([]), ENGINE, 0.0)
    assert recorded[0]["num_gpu_blocks"] == str(derived)
    assert Scheduler(plan.config).kv.pool.num_blocks == derived
    assert plan.describe()["kv_blocks"] == derived
    with pytest.raises(ConfigError, match="not derived yet"):
        Scheduler(digits())


# Refusals


def test_too_many_kv_blocks_are_refused_with_the_arithmetic() -> None:
    most = make_plan(limited(300 * MIB)).memory.num_kv_blocks
    make_plan(limited(300 * MIB, kv_cache={"num_blocks": most}))
    with pytest.raises(ConfigError) as raised:
        make_plan(limited(300 * MIB, kv_cache={"num_blocks": most + 1}))
    message = str(raised.value)
    for part in (
        f"kv_cache.num_blocks = {most + 1}",
        "0.016 GiB for weights",
        "0.264 GiB are available",
        "0.293 GiB of HBM x memory.utilization = 0.9",
        f"lower it to {most} or less",
    ):
        assert part in message


@pytest.mark.parametrize("num_blocks", [None, 4096])
def test_no_room_for_one_request_is_refused_before_weights_load(tmp_path: Path, num_blocks: int | None) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(DIGITS / name, tmp_path)
    model = {"path": str(tmp_path), "max_model_len": 256}
    with pytest.raises(ConfigError) as raised:
        make_plan(limited(20 * MIB, model=model, kv_cache={"num_blocks": num_blocks}))
    for part in (
        "model.max_model_len = 256",
        "16 KV blocks",
        "encoder_cache.num_blocks = 32",
        "buckets.vision_patches",
    ):
        assert part in str(raised.value)


# The reference deployment


def test_the_reference_deployment_fits_a_logical_core(trn2: EnginePlan) -> None:
    memory = trn2.memory
    assert memory.hbm == 24 * GIB
    assert (trn2.device, trn2.dtype) == ("neuron", "bfloat16")
    assert (
        memory.weights == 5_369_234_736
    )  # 5.000 GiB: 1.107 for the whole vision tower, the rest a sixteenth but for k, v and norms
    assert memory.encoder_cache == 4096 * 64 * 1280 * 2
    assert memory.kv_block == 16 * 64 * 2 * 128 * 2  # tokens, layers, k and v, one head of 128, bf16
    assert memory.total <= memory.available
    # Every sequence that may run can have its greatest length.
    assert memory.num_kv_blocks * 16 >= trn2.config.scheduler.max_num_seqs * trn2.config.model.max_model_len


def test_column_shards_hold_sixteen_times_the_images(trn2: EnginePlan) -> None:
    assert trn2.memory.images_held(512, 512) == (1023, 63)
    assert trn2.memory.images_held(1024, 1024) == (255, 15)
    assert trn2.memory.images_held(100_000, 100_000) == (0, 0)


def test_the_reference_deployments_comment_is_the_table(trn2: EnginePlan) -> None:
    comments = (ROOT / "configs" / "trn2.yaml").read_text()
    for line in trn2.memory.table()[1:]:
        assert f"# {line}\n" in comments


def test_a_vision_bucket_whose_scores_no_rank_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"33\.885 GiB of workspace.*buckets\.vision_patches.*encode/16384"):
        preview_plan(reference(buckets__vision_patches=[1024, 4096, 16384]))


# The command


def test_the_command_prints_the_table(trn2: EnginePlan, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(ROOT / "configs" / "trn2.yaml"), "--model-config", str(QWEN / "config.json")])
    assert capsys.readouterr().out.splitlines() == trn2.memory.table()
    main([str(ROOT / "configs" / "laptop.yaml")])
    assert "no limit  memory.hbm_bytes_per_rank is not set" in capsys.readouterr().out


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "trn2.yaml")
    with pytest.raises(SystemExit, match=r"config\.json does not exist"):
        main([config, "--model-config", str(tmp_path / "config.json")])
    with pytest.raises(SystemExit):
        main([config, "--model-config", str(tmp_path)])
