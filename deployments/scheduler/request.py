"""Request: one sequence as the scheduler sees it, and the rule for when its output ends."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from actors.messages import EngineRequest, FinishReason, MMItem
from deployments.block_hash import extend_block_hashes, split_hashes


class RequestError(Exception):
    """A request that is refused at admission: 400 when it can never be served, 429 when the engine is full.

    `retry_after_s`: with 429, when there will be room.
    """

    def __init__(self, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class RequestStatus(Enum):
    WAITING = auto()
    """Not started, or preempted: it owns no KV block and needs no embedding."""
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended. `token_emitted`: whether its last token belongs to the output (a stop token does not)."""

    reason: FinishReason
    token_emitted: bool = True


class Request:
    """State of one sequence. Token counts and positions are over the prompt and the output together."""

    def __init__(self, source: EngineRequest, sequence: int, max_model_len: int) -> None:
        self.source = source
        """Keeps the references to the pixels alive."""
        self.request_id = source.request_id
        self.sequence = sequence
        """Order of arrival: the youngest has the largest."""
        self.sampling = source.sampling
        self.mm_items: tuple[MMItem, ...] = source.mm_items
        self.cache_salt = source.cache_salt
        self.num_prompt_tokens = len(source.token_ids)
        self.token_ids: list[int] = [*source.token_ids, *source.output_token_ids]
        """The prompt, then the output."""
        self.status = RequestStatus.WAITING
        self._max_model_len = max_model_len
        self._stop_token_ids = frozenset(source.sampling.stop_token_ids)

        # Of the present computation: begun anew after a preemption or a restart of the gang.
        self.num_computed_tokens = 0
        """Tokens whose KV is in the blocks."""
        self.prefill_end = 0
        """Tokens known when the computation began: up to here it prefills, behind it decodes."""
        self.block_ids: list[int] = []
        self.num_registered_blocks = 0
        """Full blocks that the prefix cache knows."""
        self.cache_epoch = 0
        """The prefix cache's epoch when the blocks were taken."""
        self.next_item = 0
        """Index of the first item that is neither in the prefix hit nor reserved in the encoder cache."""
        self.first_open_item = 0
        """Index of the first item with tokens still to compute."""
        self.encoder_refs: dict[str, None] = {}
        """mm_hashes that this request keeps in the encoder cache, in the order they were first needed."""

        # What the ranks know of it.
        self.known_to_ranks = False
        self.num_tokens_sent = 0
        self.num_blocks_sent = 0
        """Of `token_ids` and `block_ids`; meaningful while the ranks know it."""

        self.failed_steps = 0
        """In which it was scheduled and that the gang failed to compute, since its last token."""

        # Over the request's whole life: nothing of it is counted or told twice.
        self.block_hashes = split_hashes(source.block_hashes)
        """Prefix hashes of its full blocks, extended as tokens arrive."""
        continued = bool(source.output_token_ids)  # another engine began it, and counted it
        self.prefix_counted = continued
        self.counted_items: set[int] = set(range(len(self.mm_items))) if continued else set()
        """Indices of the items that EncoderCacheStats has counted."""
        self.num_cached_tokens = 0
        """Prompt tokens in the prefix hit when it was first scheduled."""
        self.cached_tokens_told = continued
        self.last_occurrence = {item.mm_hash: index for index, item in enumerate(self.mm_items)}
        """mm_hash -> index of the last item with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.prefill_end

    @property
    def pixels(self) -> dict[str, Any]:
        """mm_hash -> reference to the pixels."""
        return self.source.pixels

    def extend_block_hashes(self, block_size: int) -> None:
        """Hash the full blocks that have no hash yet."""
        extend_block_hashes(self.block_hashes, self.token_ids, self.mm_items, self.cache_salt, block_size)

    def check_block_hashes(self, block_size: int) -> None:
        """Raises AssertionError unless the hashes that came with the request are those that the engine would make."""
        own: list[bytes] = []
        extend_block_hashes(own, self.token_ids, self.mm_items, self.cache_salt, block_size)
        assert self.block_hashes == own[: len(self.block_hashes)], f"{self.request_id}: wrong block hashes"

    def first_item_after(self, num_tokens: int) -> int:
        """Index of the first item that does not lie wholly within the first `num_tokens` tokens."""
        for index, item in enumerate(self.mm_items):
            if item.offset + item.length > num_tokens:
                return index
        return len(self.mm_items)

    def forget_computation(self) -> None:
        """Back to waiting: the blocks and references were returned, everything is to be computed again."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.prefill_end = 0
        self.block_ids = []
        self.num_registered_blocks = 0
        self.next_item = self.first_open_item = 0
        self.encoder_refs = {}
        self.known_to_ranks = False

    def length_reached(self) -> bool:
        """Whether the output is as long as it may be."""
        return self.num_output_tokens >= self.sampling.max_tokens or self.num_tokens >= self._max_model_len

    def append(self, token_id: int) -> Finish | None:
        """Take a sampled token; returns why the output ends with it, if it does."""
        may_stop = self.num_output_tokens >= self.sampling.min_tokens
        if may_stop and token_id in self._stop_token_ids:
            return Finish("stop", token_emitted=False)
        self.token_ids.append(token_id)
        return Finish("length") if self.length_reached() else None
