"""Every metric of the application, defined once. Exporters read DEFINITIONS; nothing else creates a metric.

Units are in the documentation strings. Counters gain `_total` in Prometheus text. The serving metrics carry vLLM's
names, labels and bucket boundaries, so that what was made to read those reads these.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...] = ()
    """Beside `model_name` and `engine`."""
    buckets: tuple[float, ...] = ()
    """Histograms: upper bounds. Empty: 1, 2, 5, 10, ... up to `model.max_model_len`."""

    def boundaries(self, max_model_len: int) -> tuple[float, ...]:
        """A histogram's upper bounds, ascending, without infinity."""
        if self.buckets:
            return self.buckets
        series = (mantissa * 10**exponent for exponent in range(9) for mantissa in (1, 2, 5))
        return tuple(float(bound) for bound in series if bound <= max_model_len)


# The cache layers, in the order of a request's way

MM_CACHE_QUERIES = Metric("vllm:mm_cache_queries", "counter", "Media items looked up in the processor cache, in items.")
MM_CACHE_HITS = Metric("vllm:mm_cache_hits", "counter", "Media items whose processed pixels were found, in items.")
PREFIX_CACHE_QUERIES = Metric(
    "vllm:prefix_cache_queries", "counter", "Tokens whose KV blocks were looked up when a request was first scheduled."
)
PREFIX_CACHE_HITS = Metric("vllm:prefix_cache_hits", "counter", "Tokens found in matching KV blocks.")
SCHEDULER_ENCODER_CACHE_QUERIES = Metric(
    "vllm_neuron:scheduler_encoder_cache_queries",
    "counter",
    "Lookups in the scheduler's encoder cache manager, in items.",
)
SCHEDULER_ENCODER_CACHE_HITS = Metric(
    "vllm_neuron:scheduler_encoder_cache_hits",
    "counter",
    "Those lookups that found the image encoded already, in items.",
)
ENCODER_CACHE_QUERIES = Metric(
    "vllm:encoder_cache_queries", "counter", "Encoder cache hits and misses, once per request and media item."
)
ENCODER_CACHE_HITS = Metric(
    "vllm:encoder_cache_hits", "counter", "Items encoded already or being encoded for another request of the step."
)
DEVICE_ENCODER_CACHE_QUERIES = Metric(
    "vllm_neuron:device_encoder_cache_queries", "counter", "Items that the model runner checked before encoding."
)
DEVICE_ENCODER_CACHE_MISSES = Metric(
    "vllm_neuron:device_encoder_cache_misses", "counter", "Items that were absent from the device and were encoded."
)
DEVICE_ENCODER_CACHE_EVICTIONS = Metric(
    "vllm_neuron:device_encoder_cache_evictions", "counter", "Blocks freed for evicted items, in blocks of one rank."
)
DEVICE_ENCODER_CACHE_ACTIVE_BLOCKS = Metric(
    "vllm_neuron:device_encoder_cache_active_blocks", "gauge", "Blocks allocated to cached items, summed over ranks."
)
DEVICE_ENCODER_CACHE_FREE_BLOCKS = Metric(
    "vllm_neuron:device_encoder_cache_free_blocks", "gauge", "Blocks that can be allocated now, summed over ranks."
)
DEVICE_ENCODER_CACHE_HELD_BLOCKS = Metric(
    "vllm_neuron:device_encoder_cache_held_blocks",
    "gauge",
    "Freed blocks still inside the minimum hold window, summed over ranks.",
)
DEVICE_ENCODER_CACHE_ACTIVE_REAL_TOKENS = Metric(
    "vllm_neuron:device_encoder_cache_active_real_tokens",
    "gauge",
    "Embeddings in active blocks without their padding, summed over ranks.",
)

# Serving

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(2**exponent) for exponent in (0, *range(3, 15)))
_PADDING = tuple(float(2**exponent) for exponent in range(15))

NUM_REQUESTS_RUNNING = Metric("vllm:num_requests_running", "gauge", "Requests that are being computed.")
NUM_REQUESTS_WAITING = Metric("vllm:num_requests_waiting", "gauge", "Requests that wait to be scheduled.")
KV_CACHE_USAGE = Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks in use; 1 is all of them.")
NUM_PREEMPTIONS = Metric(
    "vllm:num_preemptions", "counter", "Requests that gave up their KV blocks and are recomputed later."
)
PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens", "counter", "Prompt tokens of requests that got their first token, cached ones among them."
)
PROMPT_TOKENS_CACHED = Metric(
    "vllm:prompt_tokens_cached", "counter", "Those prompt tokens that the prefix cache held when first scheduled."
)
GENERATION_TOKENS = Metric("vllm:generation_tokens", "counter", "Tokens sampled.")
REQUEST_SUCCESS = Metric(
    "vllm:request_success", "counter", "Requests ended, by the reason why their output ended.", ("finished_reason",)
)
REQUEST_PROMPT_TOKENS = Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a finished request.")
REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens", "histogram", "Tokens generated for a finished request."
)
REQUEST_MAX_NUM_GENERATION_TOKENS = Metric(
    "vllm:request_max_num_generation_tokens",
    "histogram",
    "Most tokens generated for one of a finished request's choices.",
)
ITERATION_TOKENS = Metric(
    "vllm:iteration_tokens_total", "histogram", "Tokens computed in an engine step.", buckets=_STEP_TOKENS
)
TIME_TO_FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "From a request's arrival at the Renderer to its first token there, in seconds.",
    buckets=_FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "Between two tokens of a request at the Renderer, in seconds.",
    buckets=_TOKEN_SECONDS,
)
REQUEST_TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    "histogram",
    "A finished request's mean time between tokens, in seconds.",
    buckets=_TOKEN_SECONDS,
)
E2E_REQUEST_LATENCY = Metric(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "From a request's arrival at the Renderer to its last token there, in seconds.",
    buckets=_REQUEST_SECONDS,
)
REQUEST_QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    "histogram",
    "From arrival at the scheduler to being scheduled first, in seconds.",
    buckets=_REQUEST_SECONDS,
)
REQUEST_PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    "histogram",
    "From being scheduled first to the first token, in seconds.",
    buckets=_REQUEST_SECONDS,
)
REQUEST_DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    "histogram",
    "From the first token to the last, in seconds.",
    buckets=_REQUEST_SECONDS,
)
REQUEST_INFERENCE_TIME = Metric(
    "vllm:request_inference_time_seconds",
    "histogram",
    "From being scheduled first to the last token, in seconds.",
    buckets=_REQUEST_SECONDS,
)
CACHE_CONFIG_INFO = Metric(
    "vllm:cache_config_info",
    "gauge",
    "1; its labels are the sizes of the caches.",
    (
        "block_size",
        "num_gpu_blocks",
        "enable_prefix_caching",
        "encoder_cache_block_size",
        "encoder_cache_num_blocks",
        "world_size",
    ),
)

# Engine

NUM_SEQS_PADDING = Metric(
    "vllm_neuron:num_seqs_padding",
    "histogram",
    "Sequences by which an execution's bucket was larger than its batch.",
    ("bucket_name",),
    _PADDING,
)
NUM_BATCHED_TOKENS_PADDING = Metric(
    "vllm_neuron:num_batched_tokens_padding",
    "histogram",
    "Tokens by which an execution's bucket was larger than its batch.",
    ("bucket_name",),
    _PADDING,
)
NEFF_EXECUTION_COUNT = Metric(
    "vllm_neuron:neff_execution_count",
    "counter",
    "Executions of a compiled graph, warm-up left out; on the CPU, of the same graph uncompiled.",
    ("bucket_name",),
)
STARTUP_TIME = Metric(
    "vllm_neuron:startup_time_seconds", "gauge", "From the replica's start until the engine was ready, in seconds."
)
COMPILATION_TIME = Metric(
    "vllm_neuron:compilation_time_seconds",
    "gauge",
    "First execution of a bucket's graph, its compilation included, in seconds.",
    ("bucket_name",),
)
NEW_SHAPES = Metric(
    "vllm_neuron:graphs_compiled_after_warm_up",
    "counter",
    "Graphs that met a new shape after the warm-up: compiled within a step or, on the CPU, only run.",
    ("bucket_name",),
)
RANK_RESTARTS = Metric(
    "vllm_neuron:rank_restarts",
    "counter",
    "Restarts of the gang, all its ranks together, by what one of them had done: died, hung, raised, differs.",
    ("reason",),
)
MODEL_LOAD_TIME = Metric(
    "vllm_neuron:model_load_time_seconds", "gauge", "Until every rank had its weights, in seconds."
)
MODEL_LOAD_SIZE = Metric("vllm_neuron:model_load_size_bytes", "gauge", "Weights, summed over ranks, in bytes.")

# Encoder-cache connector

EC_CONNECTOR_QUERIES = Metric(
    "vllm_neuron:ec_connector_queries", "counter", "Items looked up in a tier beyond the device.", ("tier",)
)
EC_CONNECTOR_HITS = Metric("vllm_neuron:ec_connector_hits", "counter", "Items found in a tier.", ("tier",))
EC_CONNECTOR_LOADS = Metric("vllm_neuron:ec_connector_loads", "counter", "Items loaded from a tier.", ("tier",))
EC_CONNECTOR_SAVES = Metric("vllm_neuron:ec_connector_saves", "counter", "Items saved to a tier.", ("tier",))
EC_CONNECTOR_LOAD_BYTES = Metric(
    "vllm_neuron:ec_connector_load_bytes", "counter", "Embeddings loaded from a tier, in bytes.", ("tier",)
)
EC_CONNECTOR_SAVE_BYTES = Metric(
    "vllm_neuron:ec_connector_save_bytes", "counter", "Embeddings saved to a tier, in bytes.", ("tier",)
)

DEFINITIONS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
