"""EnginePlan: everything that is derived from the configuration and the checkpoint, once, before anything starts."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from actors.memory_plan import ITEMSIZE, MemoryPlan, plan_memory
from configs.engine import ConfigError, EngineConfig
from neuron.device import KINDS, DeviceKind
from neuron.models import load_model_config
from neuron.models.interface import CheckpointError

PROCESSOR = "preprocessor_config.json"
_STOP_TOKENS = 64
_VISION_MULTIPLE = 128
"""Patches of an attention block on hardware are a multiple of it."""
_SAMPLE_GRAPHS = ("sample_greedy", "sample", "sample_penalties")


@dataclass(frozen=True)
class EnginePlan:
    """Settings with every derived value filled in. The same on every process of an engine."""

    config: EngineConfig
    """With every setting that is derived from the memory plan."""
    memory: MemoryPlan
    device: Literal["cpu", "neuron"]
    dtype: Literal["float32", "bfloat16"]
    max_image_patches: int
    """Patches of the largest image that the checkpoint's processor makes."""
    merge_area: int
    """Patches that become one embedding."""
    prefill_tokens: tuple[int, ...]
    decode_seqs: tuple[int, ...]
    context_tokens: tuple[int, ...]
    vision_patches: tuple[int, ...]

    @property
    def kind(self) -> DeviceKind:
        return KINDS[self.device]

    @property
    def num_logit_changes(self) -> int:
        """Tokens whose logits the sample graph may change in a row: those of a longest request, and stop tokens."""
        return min(self.memory.model.vocab_size, self.config.model.max_model_len + _STOP_TOKENS)

    @property
    def cpus_per_rank(self) -> float:
        """Ray CPUs that each rank reserves: fractions on a CPU host, so that sixteen ranks fit two cores."""
        return 1.0 if self.device == "neuron" else 0.01

    @property
    def rank_bundle(self) -> dict[str, float]:
        """Ray resources of each rank: its bundle of the placement group."""
        neuron_cores = {"neuron_cores": 1.0} if self.device == "neuron" else {}
        return {"CPU": self.cpus_per_rank, **neuron_cores}

    def bucket_names(self) -> list[str]:
        """Every graph that a step can run, smallest first."""
        buckets = (self.prefill_tokens, self.decode_seqs, self.context_tokens, self.vision_patches)
        return _bucket_names(*buckets, samples=self.kind.samples)

    def describe(self) -> dict[str, Any]:
        """The derived values, for the log at start."""
        config = self.config
        return {
            "model": config.model.name,
            "ranks": config.parallel.world_size,
            "device": self.device,
            "dtype": self.dtype,
            "kv_blocks": config.kv_cache.planned_num_blocks,
            "kv_tokens": config.kv_cache.planned_num_blocks * config.kv_cache.block_size,
            "encoder_cache_blocks": config.encoder_cache.num_blocks,
            "encoder_cache_embeddings": (config.encoder_cache.num_blocks - 1) * config.encoder_cache.block_size,
            "prefill_tokens": self.prefill_tokens,
            "decode_seqs": self.decode_seqs,
            "context_tokens": self.context_tokens,
            "vision_patches": self.vision_patches,
            "graphs": len(self.bucket_names()),
        }


def make_plan(config: EngineConfig, neuron_cores: int = 0) -> EnginePlan:
    """Derive the plan; `neuron_cores` is what the cluster has. Raises ConfigError naming the setting."""
    device = config.parallel.device
    if device == "auto":
        device = "neuron" if neuron_cores else "cpu"
    return _derive(config, device)


def preview_plan(config: EngineConfig) -> EnginePlan:
    """The plan for a device that need not be here, and a model of which config.json may be all there is.

    Without an image processor, buckets.vision_patches must be set. Raises ConfigError naming the setting.
    """
    device: Literal["cpu", "neuron"] = "neuron" if config.parallel.device == "neuron" else "cpu"
    if config.buckets.vision_patches is None or (config.model.folder / PROCESSOR).exists():
        return _derive(config, device)
    return _derive(config, device, max_image_patches=config.buckets.vision_patches[-1])


def _derive(config: EngineConfig, device: Literal["cpu", "neuron"], max_image_patches: int | None = None) -> EnginePlan:
    """max_image_patches: None: as the checkpoint's image processor says."""
    folder = config.model.folder
    try:
        model_config = load_model_config(folder)
        model_config.validate(config.parallel.world_size)
    except CheckpointError as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from error
    if max_image_patches is None:
        max_image_patches = _largest_image(folder / PROCESSOR)
    dtype: Any = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model_config.torch_dtype
        if dtype not in ITEMSIZE:
            raise ConfigError(f"model.dtype = 'auto': the checkpoint's is {dtype}, expected {' or '.join(ITEMSIZE)}")
    prefill_tokens, decode_seqs, context_tokens, vision_patches = _buckets(config, device, max_image_patches)
    names = _bucket_names(prefill_tokens, decode_seqs, context_tokens, vision_patches, samples=KINDS[device].samples)
    memory = plan_memory(config, model_config, device, dtype, names)
    plan = EnginePlan(
        config=memory.config,
        memory=memory,
        device=device,
        dtype=dtype,
        max_image_patches=max_image_patches,
        merge_area=model_config.merge_area,
        prefill_tokens=prefill_tokens,
        decode_seqs=decode_seqs,
        context_tokens=context_tokens,
        vision_patches=vision_patches,
    )
    _check(plan)
    return plan


def _buckets(config: EngineConfig, device: str, max_image_patches: int) -> tuple[tuple[int, ...], ...]:
    """Tokens, sequences, context and patches, those that are not set derived.

    Where graphs are compiled, powers of two from sizes below which a step takes no less time. The CPU compiles nothing
    and pays for what is padded: four sizes for each doubling, from smaller ones. Attention that reads no padding needs
    no sizes of context.
    """
    set_buckets, block_size, kind = config.buckets, config.kv_cache.block_size, KINDS[device]
    compiles, steps = kind.compiles, 1 if kind.compiles else 4
    prefill_tokens = set_buckets.prefill_tokens or _ladder(
        128 if compiles else 16, config.scheduler.max_num_batched_tokens, steps
    )
    longest = _round_up(config.model.max_model_len, block_size)
    longest = _round_up(max(longest, _padded_prefill(prefill_tokens, longest)), block_size)
    contexts = _ladder(_round_up(1024, block_size), longest, steps) if kind.kernels == "masked" else (longest,)
    largest_image = _round_up(max_image_patches, _VISION_MULTIPLE)
    return (
        prefill_tokens,
        set_buckets.decode_seqs or _ladder(1, config.scheduler.max_num_seqs, steps),
        set_buckets.context_tokens or contexts,
        set_buckets.vision_patches or _ladder(_VISION_MULTIPLE if compiles else 64, largest_image, steps),
    )


def _padded_prefill(prefill_tokens: tuple[int, ...], context: int) -> int:
    """Tokens, padding included, of the largest prefill whose attention reads `context` tokens."""
    return bucket(prefill_tokens, min(context, prefill_tokens[-1]))


def _largest_image(processor: Path) -> int:
    """Patches of the largest image that a checkpoint's processor makes."""
    try:
        settings = json.loads(processor.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path: {processor} does not exist: expected a checkpoint's folder") from None
    return settings["size"]["longest_edge"] // settings["patch_size"] ** 2


def _bucket_names(
    prefill_tokens: tuple[int, ...],
    decode_seqs: tuple[int, ...],
    context_tokens: tuple[int, ...],
    vision_patches: tuple[int, ...],
    samples: bool,
) -> list[str]:
    """Context is at least as long as the step's own tokens. samples: whether graphs draw the tokens."""
    sizes = product(prefill_tokens, context_tokens)
    prefill = [(tokens, context) for tokens, context in sizes if context >= tokens]
    return [
        *(f"encode/{patches}" for patches in vision_patches),
        *(f"prefill/{tokens}x{context}" for tokens, context in prefill),
        *(f"prefill_images/{tokens}x{context}" for tokens, context in prefill),
        *(f"decode/{seqs}x{context}" for seqs, context in product(decode_seqs, context_tokens)),
        *(f"{graph}/{seqs}" for graph, seqs in product(_SAMPLE_GRAPHS if samples else (), decode_seqs)),
    ]


def _check(plan: EnginePlan) -> None:
    config = plan.config
    if plan.device == "cpu" and config.parallel.collectives == "xla":
        raise ConfigError(
            "parallel.collectives = 'xla': it joins ranks on NeuronCores, and the ranks run on the CPU; "
            "expected auto, shared_memory or gloo"
        )
    if plan.vision_patches[-1] < plan.max_image_patches:
        raise ConfigError(
            f"buckets.vision_patches = {list(plan.vision_patches)}: the largest must hold the largest image of "
            f"{plan.max_image_patches} patches"
        )
    if plan.kind.compiles and any(size % _VISION_MULTIPLE for size in plan.vision_patches):
        raise ConfigError(
            f"buckets.vision_patches = {list(plan.vision_patches)}: expected multiples of {_VISION_MULTIPLE} with "
            f"parallel.device = {plan.device!r}"
        )
    padded = _padded_prefill(plan.prefill_tokens, plan.context_tokens[-1])
    if plan.context_tokens[-1] < padded:
        raise ConfigError(
            f"buckets.context_tokens = {list(plan.context_tokens)}: a prefill of {plan.context_tokens[-1]} tokens is "
            f"padded to {padded} (buckets.prefill_tokens = {list(plan.prefill_tokens)}): expected a largest of at "
            "least that"
        )
    if plan.context_tokens[-1] < config.model.max_model_len:
        raise ConfigError(
            f"buckets.context_tokens = {list(plan.context_tokens)}: the largest must hold model.max_model_len = "
            f"{config.model.max_model_len}"
        )
    if any(size % config.kv_cache.block_size for size in plan.context_tokens):
        raise ConfigError(
            f"buckets.context_tokens = {list(plan.context_tokens)}: expected multiples of kv_cache.block_size = "
            f"{config.kv_cache.block_size}"
        )


def bucket_size(name: str) -> int:
    """Tokens, sequences or patches that a bucket of `EnginePlan.bucket_names` holds."""
    return int(name.partition("/")[2].partition("x")[0])


def _ladder(smallest: int, largest: int, steps: int) -> tuple[int, ...]:
    """From `smallest`, each doubling in `steps` equal steps, the whole numbers below `largest`; then `largest`."""
    sizes = []
    size = smallest
    while size < largest:
        sizes += [size + size * step // steps for step in range(steps) if size * step % steps == 0]
        size *= 2
    return (*(size for size in sizes if size < largest), largest)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest of the ascending `sizes` that holds `needed`. Raises ValueError when none does."""
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(f"{needed} exceeds the largest bucket of {list(sizes)}")
