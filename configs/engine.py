"""EngineConfig: every setting of the application as one typed tree.

A wrong or unknown key stops the start with the key's path, the value and what was expected.
Values left at None are derived; `deployments.app` logs each derived value once at start.
"""

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

ROOT = Path(__file__).resolve().parent.parent


class ConfigError(ValueError):
    """A setting is wrong; the message names its path, its value and what was expected."""


class Settings(BaseModel):
    """Base of every section: unknown keys are errors and nothing changes after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSettings(Settings):
    path: str = "configs/models/digits-vl"
    """A Hugging Face checkpoint folder; relative paths are taken from the project's root."""
    served_name: str | None = None
    """The name clients use; the folder's name by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on the CPU, the checkpoint's own on Neuron devices."""
    matmul_precision: Literal["highest", "high"] = "high"
    """CPU device, float32, by torch's names. high: with AMX a product is made of those of bfloat16 halves, which keep
    16 bits of mantissa together; without, and with highest, as torch computes float32."""
    max_model_len: int = Field(8192, ge=16)
    """Prompt and output tokens of one request together."""

    @property
    def folder(self) -> Path:
        path = Path(self.path)
        return path if path.is_absolute() else ROOT / path

    @property
    def name(self) -> str:
        return self.served_name or self.folder.name


class ParallelSettings(Settings):
    world_size: Literal[1, 2, 4, 8, 16, 32, 64] = 16
    """Ranks of the gang: the text model is tensor parallel over all of them, the vision encoder data parallel."""
    device: Literal["auto", "cpu", "neuron"] = "auto"
    """auto: NeuronCores when the Ray cluster has them, else the CPU."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU device: torch threads of each rank."""
    step_channel: Literal["auto", "socket", "actor_call"] = "auto"
    """How a step reaches the ranks. auto: local sockets for a gang on one node, actor calls between nodes."""
    logical_neuroncore_config: Literal[1, 2] = 2
    """NeuronCores: physical cores of a logical one (LNC), as NEURON_LOGICAL_NC_CONFIG has it on every node."""
    collectives: Literal["auto", "shared_memory", "gloo", "xla"] = "auto"
    """auto: xla for ranks on NeuronCores, shared memory for CPU ranks on one node, gloo between nodes."""
    collective_timeout_s: float = Field(60.0, gt=0)
    """A collective or a step that takes longer ends with an error."""
    compile_timeout_s: float = Field(3600.0, gt=0)
    """NeuronCores: the same for one graph of the warm-up, whose compilation may take many minutes."""
    start_timeout_s: float = Field(600.0, gt=0)
    """A gang whose ranks are not all placed, or have not all read their weights, after so long has failed to start."""


class CompilerSettings(Settings):
    cache_dir: str | None = None
    """NeuronCores: the folder of compiled graphs, a shared file system for a fleet. None: NEURON_COMPILE_CACHE_URL, or
    the Neuron runtime's own default. What `make compile` made is listed there, too."""
    require_compiled: bool = False
    """NeuronCores: refuse to start unless `make compile` has compiled every graph of this configuration."""


class KVCacheSettings(Settings):
    block_size: int = Field(16, ge=1)
    """Tokens of one KV block."""
    num_blocks: int | None = Field(None, ge=2)
    """KV blocks, beside the scratch block. None: what remains of each rank's memory; 4096 where no limit is known."""
    enable_prefix_caching: bool = True

    @property
    def planned_num_blocks(self) -> int:
        """num_blocks, which `actors.plan` fills in where it is derived. Raises ConfigError before."""
        if self.num_blocks is None:
            raise ConfigError("kv_cache.num_blocks is not derived yet: use the plan's config")
        return self.num_blocks


class MemorySettings(Settings):
    hbm_bytes_per_rank: int | None = Field(None, ge=1)
    """Device memory of a rank. None: 24 GiB on Neuron devices (a Trn2 logical core at LNC=2), no limit on the CPU."""
    utilization: float = Field(0.9, gt=0, le=1)
    """Part of it that weights, caches and activations may take; programs and the runtime need the rest."""


class EncoderCacheSettings(Settings):
    block_size: int = Field(64, ge=1)
    """Embeddings of one encoder cache block."""
    num_blocks: int = Field(512, ge=2)
    """Blocks of each rank's shard, the last of which is scratch and never allocated."""
    min_hold_time_ms: float = Field(0.0, ge=0)
    """A freed block is not allocated again before so long after it was written."""


class ProcessorCacheSettings(Settings):
    max_bytes: int = Field(2 * 1024**3, ge=0)
    """Pixels kept by each Renderer replica; 0 turns the cache off."""


class SchedulerSettings(Settings):
    max_num_seqs: int = Field(16, ge=1)
    """Requests running at a time."""
    max_num_batched_tokens: int = Field(1024, ge=16)
    """Tokens of one prefill step: a longer prompt is prefilled in chunks."""
    max_encoder_embeddings_per_step: int = Field(4096, ge=1)
    """Encoder compute budget of one step, in embeddings; an image larger than it is encoded alone in its step."""
    max_waiting_requests: int = Field(1024, ge=1)
    """A request that would make more wait gets 429, with the time when there will be room in Retry-After."""
    max_waiting_tokens: int = Field(1024 * 1024, ge=1)
    """The same for the tokens of the requests that wait, images among them; an empty queue takes any request."""


class BucketSettings(Settings):
    """The shapes that graphs are made for: ascending, the largest equal to the limit it serves. None: derived."""

    prefill_tokens: tuple[int, ...] | None = None
    """Tokens of a prefill step; the largest is scheduler.max_num_batched_tokens."""
    decode_seqs: tuple[int, ...] | None = None
    """Sequences of a decode step; the largest is scheduler.max_num_seqs."""
    context_tokens: tuple[int, ...] | None = None
    """Tokens that attention reads; the largest holds scheduler.max_num_seqs or one request of model.max_model_len."""
    vision_patches: tuple[int, ...] | None = None
    """Patches of a vision attention block; the largest holds the largest image."""


class MultimodalSettings(Settings):
    max_images_per_prompt: int = Field(32, ge=0)
    max_image_bytes: int = Field(32 * 1024**2, ge=1)
    max_total_image_bytes: int = Field(64 * 1024**2, ge=1)
    """Of all images of one request together."""
    max_image_pixels: int = Field(50_000_000, ge=1)
    """Width times height as the header says, checked before anything is decoded."""
    max_aspect_ratio: float = Field(200.0, ge=1)
    salt_images: bool = False
    """A request's cache_salt also keeps its images apart: they are then processed and encoded once per salt."""
    allowed_url_hosts: tuple[str, ...] = ()
    """Hosts from which https images may be fetched: "images.example.com" or, for a port that is not the scheme's own,
    "images.example.com:8443"; none by default. Only public addresses are ever connected to."""
    allow_http_urls: bool = False
    """Fetch from those hosts over plain http, too."""
    url_timeout_s: float = Field(10.0, gt=0)
    """For a remote image, from looking its host up to its last byte, redirects included."""
    max_url_redirects: int = Field(3, ge=0)
    """Each is held to the same rules as the first URL."""
    max_url_fetches: int = Field(16, ge=1)
    """Remote images that a Renderer replica fetches at a time; more wait, within their own time limit."""

    @field_validator("allowed_url_hosts")
    @classmethod
    def _plain_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", host):
                raise ValueError(f"{host!r}: expected a host name or address, with :port or without")
        return tuple(host.lower() for host in hosts)


class LimitSettings(Settings):
    """What one request may hold, checked before any of it is worked on; `server.max_body_bytes` bounds it all."""

    max_messages: int = Field(16384, ge=1)
    max_prompts: int = Field(128, ge=1)
    """Of one /v1/completions request."""
    max_choices: int = Field(128, ge=1)
    """`n` times the number of prompts."""
    max_stop_strings: int = Field(32, ge=0)
    """Also the number of `stop_token_ids`."""
    max_stop_length: int = Field(256, ge=1)
    """Characters of one stop string."""


class ServerSettings(Settings):
    development_mode: bool = False
    """Opens /reset_prefix_cache, /reset_mm_cache and /reset_encoder_cache."""
    metrics: Literal["key", "open", "off"] = "key"
    """GET /metrics. key: with an API key, where there are some, as for other endpoints; open: without one; off: 403."""
    api_keys_file: str | None = None
    """A file of API keys, one a line; a line that begins with # is none. Read at start, on the Renderer's node."""
    api_keys_variable: str | None = None
    """Name of an environment variable of the Renderer's process that holds API keys, separated by spaces or commas.
    With keys from either place, every endpoint but /health asks for `Authorization: Bearer <one of them>`."""
    max_body_bytes: int = Field(64 * 1024**2, ge=1)
    engine_wait_s: float = Field(120.0, ge=0)
    """While no Scheduler replica takes a request (the only one is being replaced) it waits so long, then gets 503."""
    engine_channel: Literal["auto", "serve"] = "auto"
    """How a Renderer and an engine talk. auto: over a local socket where both are on one node that runs Linux, up to
    scheduler.max_num_seqs requests at a time; beyond that, and where they are not, as serve: each request is a call of
    Serve's, which chooses among all engines and counts what runs on each. Tokens come back a message per step for all
    requests over the socket, else as items of a stream for each."""
    shutdown_timeout_s: float = Field(20.0, ge=0)
    """On SIGTERM, or when a replica is replaced: requests that run get so long to finish."""

    @property
    def needs_key(self) -> bool:
        """Whether clients have to send an API key."""
        return self.api_keys_file is not None or self.api_keys_variable is not None


class DebugSettings(Settings):
    rank_digest: bool = False
    """Compare a digest of every rank's bookkeeping after each step; the first rank that differs is named."""
    check_invariants: bool = False
    """Run the scheduler's integrity checks after every step, not only when it goes idle."""
    fail_on_new_shape: bool = False
    """A graph that meets a new shape after the warm-up fails the step; otherwise it is logged and counted."""
    log_prompts: bool = False
    """Log every request's prompt; without it no log line holds anything that a client wrote."""
    fault_dir: str | None = None
    """Tests: a folder of faults that ranks meet, see actors/faults.py."""


class TelemetrySettings(Settings):
    multiproc_dir: str = "/tmp/trn-vision-serve/metrics"
    """Folder of this node's metric files; one application per node and folder. Wiped at start."""
    stats_interval_s: float = Field(10.0, gt=0)
    """Seconds between two lines of an engine's statistics while it works."""
    spans_file: str | None = None
    """A file that gets every span as a line of JSON. Over OTLP they go with OTEL_EXPORTER_OTLP_ENDPOINT."""


class EngineConfig(Settings):
    model: ModelSettings = ModelSettings()
    parallel: ParallelSettings = ParallelSettings()
    memory: MemorySettings = MemorySettings()
    compiler: CompilerSettings = CompilerSettings()
    kv_cache: KVCacheSettings = KVCacheSettings()
    encoder_cache: EncoderCacheSettings = EncoderCacheSettings()
    processor_cache: ProcessorCacheSettings = ProcessorCacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    buckets: BucketSettings = BucketSettings()
    multimodal: MultimodalSettings = MultimodalSettings()
    limits: LimitSettings = LimitSettings()
    server: ServerSettings = ServerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    debug: DebugSettings = DebugSettings()

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, tree: Any, validate: Any) -> "EngineConfig":
        """Say for every wrong key what would have been right, whoever validates (Serve's builder does)."""
        try:
            return validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error))) from None

    @model_validator(mode="after")
    def _consistent(self) -> "EngineConfig":
        for name, limit_name, limit in (
            ("prefill_tokens", "scheduler.max_num_batched_tokens", self.scheduler.max_num_batched_tokens),
            ("decode_seqs", "scheduler.max_num_seqs", self.scheduler.max_num_seqs),
        ):
            bucket = getattr(self.buckets, name)
            if bucket is not None and bucket[-1:] != (limit,):
                raise ValueError(f"buckets.{name} = {list(bucket)}: the largest must equal {limit_name} = {limit}")
        for name in ("prefill_tokens", "decode_seqs", "context_tokens", "vision_patches"):
            bucket = getattr(self.buckets, name)
            if bucket is not None and (not bucket or list(bucket) != sorted(set(bucket)) or bucket[0] < 1):
                raise ValueError(f"buckets.{name} = {list(bucket)}: expected positive sizes in ascending order")
        if self.compiler.require_compiled and self.compiler.cache_dir is None:
            raise ValueError(
                "compiler.require_compiled = True: expected compiler.cache_dir, where `make compile` lists what it made"
            )
        num_blocks, block_size = self.kv_cache.num_blocks, self.kv_cache.block_size
        if num_blocks is not None and num_blocks * block_size < self.model.max_model_len:
            raise ValueError(
                f"kv_cache.num_blocks = {num_blocks} blocks of {block_size} hold {num_blocks * block_size} tokens: "
                f"expected at least model.max_model_len = {self.model.max_model_len}"
            )
        return self


def load_config(path: str | Path) -> EngineConfig:
    """The settings in a Serve config file: the `args` of its first application. Raises ConfigError."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        args = tree["applications"][0].get("args", {})
    except (TypeError, KeyError, IndexError):
        raise ConfigError(f"{path}: expected a Serve config file with applications[0].args") from None
    return parse_config(args)


def parse_config(tree: dict[str, Any]) -> EngineConfig:
    """Build the tree from plain values. Raises ConfigError naming every wrong key."""
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def _explain(error: ValidationError) -> list[str]:
    """One line per problem: the key's path, the value, what was expected."""
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path} = {problem['input']!r}: no such setting; {_known(problem['loc'])}")
        elif path:
            lines.append(f"{path} = {problem['input']!r}: {problem['msg']}")
        else:
            lines.append(problem["msg"].removeprefix("Value error, "))
    return lines


def _known(location: tuple[Any, ...]) -> str:
    """The names that would have been accepted beside an unknown one."""
    section: Any = EngineConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    return f"{'.'.join(map(str, location[:-1])) or 'the top level'} has {', '.join(section.model_fields)}"
