"""Every metric of the application, defined once. Exporters read DEFINITIONS; nothing else creates a metric.

Units are in the documentation strings. Counters gain `_total` in Prometheus text.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    documentation: str
    labels: tuple[str, ...] = ()
    """Beside `model_name` and `engine`."""


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

DEFINITIONS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
