"""MemoryPlan: what each rank's memory holds, worked out from the model's config before any weight is read.

    python -m actors.memory_plan CONFIG.yaml [--model-config path/to/config.json]

prints the table for a Serve config file, or says why it does not fit. `parallel.device: auto` counts as the CPU.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.engine import ConfigError, EngineConfig, load_config, parse_config
from neuron.models.interface import ModelConfig, RankMemory

GIB = 2**30
TRN2_HBM_BYTES_PER_RANK = 24 * GIB
"""Of a logical core at LNC=2: a Trn2 chip has 96 GiB and four of them."""
DEFAULT_KV_BLOCKS = 4096
"""Where no limit is known, as on the CPU."""
_SAMPLE_BYTES = 8 * 4
"""Of a sample graph for each logit: the logits, what they are compared by, and masks."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank. Exact, but for `workspace`, which is an upper estimate.

    Not counted: compiled programs, the runtime's own memory, and the collectives' transfer buffers. They live in the
    part that `memory.utilization` leaves.
    """

    config: EngineConfig
    """With the final kv_cache.num_blocks."""
    model: ModelConfig
    itemsize: int
    """Bytes of a value: weights, caches and activations have one dtype."""
    weights: int
    encoder_cache: int
    """This rank's columns of every block, the scratch block included."""
    workspace: int
    """The largest of the graphs' activations (see the family's RankMemory): one graph runs at a time."""
    workspace_graph: str
    """The bucket that takes them."""
    hbm: int | None
    """None: no limit is known."""

    @property
    def num_kv_blocks(self) -> int:
        return self.config.kv_cache.planned_num_blocks

    @property
    def kv_block(self) -> int:
        """Of one KV block, over all layers."""
        values = self.model.num_local_kv_heads(self.config.parallel.world_size) * self.model.head_dim
        return 2 * self.model.num_layers * self.config.kv_cache.block_size * values * self.itemsize

    @property
    def kv_blocks(self) -> int:
        """The scratch block included."""
        return (self.num_kv_blocks + 1) * self.kv_block

    @property
    def total(self) -> int:
        return self.weights + self.encoder_cache + self.kv_blocks + self.workspace

    @property
    def available(self) -> int | None:
        """memory.utilization of the HBM; None: no limit is known."""
        return None if self.hbm is None else int(self.hbm * self.config.memory.utilization)

    @property
    def num_fitting_kv_blocks(self) -> int:
        """Largest kv_cache.num_blocks that fits; negative when the rest alone is too large. Needs a limit."""
        assert self.available is not None
        return (self.available - self.weights - self.encoder_cache - self.workspace) // self.kv_block - 1

    def images_held(self, width: int, height: int) -> tuple[int, int]:
        """Images of so many pixels that the encoder cache holds: as it is, and with a full copy per rank instead of
        a column shard, in the same memory.
        """
        cache = self.config.encoder_cache
        blocks = -(-self.model.num_embeddings(width, height) // cache.block_size)
        full_blocks = cache.num_blocks // self.config.parallel.world_size
        return (cache.num_blocks - 1) // blocks, max(0, full_blocks - 1) // blocks

    def table(self) -> list[str]:
        """Lines for the log at start."""
        config, ranks = self.config, self.config.parallel.world_size
        cache, kv, fat_dim = config.encoder_cache, config.kv_cache, self.model.fat_dim
        cache_shape = f"{cache.num_blocks:,} blocks x {cache.block_size} embeddings x {fat_dim // ranks:,}"
        tokens = self.num_kv_blocks * kv.block_size
        kv_shape = f"{self.num_kv_blocks:,} blocks x {kv.block_size} = {tokens:,} tokens, and a scratch block"
        sharded, copied = self.images_held(512, 512)
        copies = f"; a full copy on each of {ranks} ranks would hold {copied:,}" if ranks > 1 else ""
        rows = (
            ("weights", _gib(self.weights), f"{config.model.name}, rank's part of {ranks}"),
            ("encoder cache shard", _gib(self.encoder_cache), f"{cache_shape} of {fat_dim:,} columns"),
            ("KV blocks", _gib(self.kv_blocks), kv_shape),
            ("workspace (estimate)", _gib(self.workspace), self.workspace_graph),
            ("total", _gib(self.total), ""),
            ("available", "no limit" if self.available is None else _gib(self.available), self._limit()),
        )
        return [
            "memory per rank",
            *(f"  {name:<20} {size:>12}  {note}".rstrip() for name, size, note in rows),
            f"  the encoder cache holds {sharded:,} images of 512x512{copies}",
        ]

    def check(self) -> None:
        """Raises ConfigError, with the arithmetic, when a rank cannot hold the plan."""
        if self.available is None or self.total <= self.available:
            return
        config, least, most = self.config, _least_kv_blocks(self.config), self.num_fitting_kv_blocks
        if most >= least:
            raise ConfigError(
                f"kv_cache.num_blocks = {self.num_kv_blocks}: {self._arithmetic(self.num_kv_blocks)}; lower it to "
                f"{most} or less, or leave it out to have it derived"
            )
        raise ConfigError(
            f"no room for the KV blocks of one request of model.max_model_len = {config.model.max_model_len}: "
            f"{self._arithmetic(least)}; lower encoder_cache.num_blocks = {config.encoder_cache.num_blocks}, "
            f"{_workspace_setting(self.workspace_graph)} (the workspace is that of {self.workspace_graph}) or "
            f"model.max_model_len, or raise parallel.world_size = {config.parallel.world_size}"
        )

    def _arithmetic(self, num_kv_blocks: int) -> str:
        """What is needed with so many KV blocks, against what is available."""
        kv_blocks = (num_kv_blocks + 1) * self.kv_block
        total = self.weights + self.encoder_cache + self.workspace + kv_blocks
        return (
            f"each rank needs {_gib(self.weights)} for weights + {_gib(self.encoder_cache)} for its encoder cache + "
            f"{_gib(self.workspace)} of workspace + {_gib(kv_blocks)} for {num_kv_blocks} KV blocks and scratch = "
            f"{_gib(total)}, and {_gib(self.available or 0)} are available ({self._limit()})"
        )

    def _limit(self) -> str:
        if self.hbm is None:
            return "memory.hbm_bytes_per_rank is not set"
        return f"{_gib(self.hbm)} of HBM x memory.utilization = {self.config.memory.utilization:g}"


def plan_memory(
    config: EngineConfig, model: ModelConfig, device: str, dtype: str, bucket_names: Sequence[str]
) -> MemoryPlan:
    """Add up what a rank holds, and derive kv_cache.num_blocks where it is None. Raises ConfigError if it can't fit.

    bucket_names: every graph that will run, see `EnginePlan.bucket_names`.
    """
    world_size, cache, itemsize = config.parallel.world_size, config.encoder_cache, ITEMSIZE[dtype]
    memory = model.memory(world_size, itemsize)
    workspaces = {
        name: _workspace(memory, model.vocab_size, name, config.scheduler.max_num_seqs) for name in bucket_names
    }
    largest = max(workspaces, key=lambda name: workspaces[name])
    hbm = config.memory.hbm_bytes_per_rank or (TRN2_HBM_BYTES_PER_RANK if device == "neuron" else None)
    asked = config.kv_cache.num_blocks
    plan = MemoryPlan(
        config=_with_kv_blocks(config, asked or _least_kv_blocks(config)),
        model=model,
        itemsize=itemsize,
        weights=memory.weights(),
        encoder_cache=cache.num_blocks * cache.block_size * (model.fat_dim // world_size) * itemsize,
        workspace=workspaces[largest],
        workspace_graph=largest,
        hbm=hbm,
    )
    plan.check()
    if asked is not None:
        return plan
    derived = DEFAULT_KV_BLOCKS if hbm is None else plan.num_fitting_kv_blocks
    return replace(plan, config=_with_kv_blocks(config, derived))


def _workspace(memory: RankMemory, vocab_size: int, name: str, max_num_seqs: int) -> int:
    """Of a graph by its bucket's name; a prefill has a row of logits for every sequence that may run."""
    graph, _, size = name.partition("/")
    if graph == "encode":
        return memory.encode(int(size))
    if graph.startswith("sample"):
        return int(size) * vocab_size * _SAMPLE_BYTES
    rows, context = map(int, size.split("x"))
    if graph == "decode":
        return memory.decode(rows, context)
    return memory.prefill(rows, context, max_num_seqs, images=graph == "prefill_images")


def _workspace_setting(name: str) -> str:
    """What makes a graph's activations smaller."""
    settings = {"encode": "the largest of buckets.vision_patches", "decode": "scheduler.max_num_seqs"}
    return settings.get(name.partition("/")[0], "scheduler.max_num_batched_tokens")


def _least_kv_blocks(config: EngineConfig) -> int:
    """Those of one request of the greatest length."""
    return max(2, -(-config.model.max_model_len // config.kv_cache.block_size))


def _with_kv_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Raises ConfigError when so many blocks contradict other settings."""
    tree = config.model_dump()
    tree["kv_cache"]["num_blocks"] = num_blocks
    return parse_config(tree)


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"


def main(arguments: Sequence[str] | None = None) -> None:
    from actors.plan import preview_plan

    parser = argparse.ArgumentParser(
        prog="python -m actors.memory_plan", description="Print the memory plan of a rank."
    )
    parser.add_argument("config", help="a Serve config file")
    parser.add_argument("--model-config", type=Path, help="the model's config.json, instead of model.path's")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        if options.model_config is not None:
            if options.model_config.name != "config.json":
                parser.error(f"--model-config {options.model_config}: expected a file of the name config.json")
            folder = str(options.model_config.resolve().parent)
            model = config.model.model_copy(update={"path": folder, "served_name": config.model.name})
            config = config.model_copy(update={"model": model})
        print("\n".join(preview_plan(config).memory.table()))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
