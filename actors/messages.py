"""The protocol: everything that crosses a process, as immutable msgspec structs.

    Renderer  -> Scheduler   EngineRequest; on one node Submit, Abort
    Scheduler -> Renderer    EngineOutput, a stream per request
    Scheduler -> every rank  SchedulerOutput, one per step
    every rank -> Scheduler  RankOutput, one per step

Plain Python: neither Ray nor torch is imported. Positions, offsets and lengths are in tokens, times in seconds.
"""

from typing import Any, Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. The draw at a position depends on (seed, position) only."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, the model's end-of-sequence tokens among them unless `ignore_eos` was asked for."""
    min_tokens: int = 0
    """Until so many tokens are out, `stop_token_ids` cannot be drawn."""
    logprobs: int | None = None
    """None: none. k >= 0: the drawn token's log probability and those of the k likeliest tokens."""


class MMItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt."""

    mm_hash: str
    offset: int
    """First token of its placeholder range in the prompt."""
    length: int
    """Tokens in that range."""
    num_embeddings: int
    """Rows that the encoder yields for it."""
    grid: tuple[int, int, int]
    """(t, h, w) in patches, before merging."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    request_id: str
    token_ids: tuple[int, ...]
    """The prompt."""
    sampling: SamplingParams
    arrival_time: float
    mm_items: tuple[MMItem, ...] = ()
    """Sorted by offset; the same mm_hash may occur several times."""
    pixels: dict[str, Any] = msgspec.field(default_factory=dict)
    """mm_hash -> reference to the pixels, float32 [patches, patch_dim], kept while it lives: a Ray ObjectRef, or what
    Renderer and Scheduler hold on one node (StoredPixels, PixelMemory)."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens that the client has received already from another engine: generation goes on behind them."""
    cache_salt: str | None = None
    block_hashes: bytes = b""
    """Prefix hashes of the prompt's first full KV blocks, 32 bytes each (`deployments.block_hash`); the engine makes
    those that are not here."""
    trace_context: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context headers."""
    reader: tuple[str, str] | None = None
    """Name and namespace of the Ray actor that reads its outputs: when that dies, the request is dropped."""
    outputs_to: str | None = None
    """Local socket at which it reads them, if it can be reached; else they are the items of the call."""
    mm_cache_queries: int = 0
    """Processor cache lookups made for it, in items; the Renderer exports them, the engine only logs them."""
    mm_cache_hits: int = 0


class PixelFile(msgspec.Struct, frozen=True, kw_only=True):
    """Pixels in the memory of a process of this node, float32 (`actors.pixel_memory`)."""

    pid: int
    descriptor: int
    name: str
    """Of what the descriptor leads to: no other pixels have it."""
    shape: tuple[int, int]
    """(patches, patch_dim)"""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A request to an engine on the Renderer's node."""

    request: EngineRequest
    """Without pixels."""
    pixel_files: dict[str, PixelFile]
    """By mm_hash. Their owner keeps them until the request's last output, or its abort."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Nobody reads the request's outputs any more."""

    request_id: str


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), likeliest first."""


FinishReason = Literal["stop", "length", "abort", "error"]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, in order."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for."""
    finish_reason: FinishReason | None = None
    """Set on the last output."""
    stop_token_id: int | None = None
    """The token that ended it; it is not in `token_ids`."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    error: str | None = None
    """With finish_reason "error": what the client should change."""
    error_status: int = 500
    """HTTP status for `error`: 400 for a request that can never be served, 429 when the engine is full, 503 when it
    stopped and another may go on with the request."""
    lost_mm_hashes: tuple[str, ...] = ()
    """With status 503: images whose pixels are gone; the request may be sent again with new ones."""
    retry_after_s: float | None = None
    """With `error`: when to come again, where the engine knows."""


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the ranks do not know, or whose state they must replace (it was preempted)."""

    request_id: str
    token_ids: tuple[int, ...]
    """All known tokens: the prompt, then what was generated."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks already (the prefix hit)."""
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    mm_items: tuple[MMItem, ...] = ()
    trace_context: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context headers, of a request whose spans are recorded."""


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What changed for a request that the ranks know and that is scheduled in this step."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    """Tokens sampled since the ranks last heard of it."""
    new_block_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step, the same bytes for every rank."""

    step_id: int
    clock: float
    """The step's clock, in seconds: the only time that ranks may use in a decision."""
    phase: Literal["prefill", "decode", "idle"]
    """idle: nothing to compute; evictions, finished requests and hold windows only."""
    new_requests: tuple[NewRequest, ...] = ()
    running_requests: tuple[RunningRequest, ...] = ()
    num_scheduled_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    """request id -> tokens computed in this step, in execution order."""
    num_prefill_tokens: int = 0
    """Those of them that lie within their request's prompt; the others are decode."""
    scheduled_encoder_inputs: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """request id -> indices into its mm_items to encode; a mm_hash appears once in a step."""
    pixel_files: dict[str, PixelFile] = msgspec.field(default_factory=dict)
    """Where the ranks' node has the pixels of the images to encode, by mm_hash; others are sent to who encodes them."""
    free_encoder_mm_hashes: tuple[str, ...] = ()
    """Evicted: the ranks free these before they allocate anything."""
    finished_request_ids: tuple[str, ...] = ()
    """The ranks forget these (finished, aborted or preempted)."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, tag="warm_up"):
    """Run one graph once with padding alone; every rank gets the same sequence of them before the first step."""

    step_id: int
    bucket: str
    """A name from EnginePlan.bucket_names."""
    head_start_s: float = 0.0
    """Every rank but 0 begins so much later: it then finds rank 0's compiled graph, or waits for it, in the cache."""
    last: bool = False
    """No other follows: what loading and warming up have freed goes back to the system."""


Command = SchedulerOutput | WarmUp
"""What travels to a rank."""


class EncoderCacheOccupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one rank's EncoderCacheBlocks: active + free + held = num_blocks - 1."""

    active_blocks: int
    free_blocks: int
    held_blocks: int
    active_real_tokens: int


class RankOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to one step."""

    step_id: int
    rank: int
    sampled: dict[str, TokenLogprobs] = msgspec.field(default_factory=dict)
    """request id -> the token drawn; from rank 0 only, for the requests whose last known token was computed."""
    occupancy: EncoderCacheOccupancy | None = None
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    timings: dict[str, float] = msgspec.field(default_factory=dict)
    """Stage -> seconds, from rank 0."""
    digest: str | None = None
    """Of the rank's bookkeeping, in debug mode: equal on every rank after the same step."""
    error: str | None = None
    """A traceback: the step failed on this rank."""
    missing_ranks: tuple[int, ...] = ()
    """With `error`: whom this rank waited for in vain. The failure is theirs, not its own."""
