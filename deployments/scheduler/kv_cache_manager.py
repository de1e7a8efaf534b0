"""KVCacheManager: each request's KV blocks, and the prefix cache over them."""

from collections.abc import Sequence
from typing import NamedTuple

from configs.engine import KVCacheSettings
from deployments.scheduler.block_pool import BlockPool
from deployments.scheduler.request import Request


class _Refusal(NamedTuple):
    """Of a waiting request for which too few blocks were free."""

    sequence: int
    """The request's, which may end and is not to be kept alive."""
    num_freed: int
    """The pool's, then."""
    next_hash: list[bytes]
    """Of the first block behind its prefix, if that is a full one."""


class KVCacheManager:
    """Gives requests blocks of `block_size` tokens, and finds prefixes that were computed before.

    `prefix_queries` and `prefix_hits` count tokens, once per request, when it is first admitted.
    """

    def __init__(self, settings: KVCacheSettings) -> None:
        self.block_size = settings.block_size
        self.pool = BlockPool(settings.planned_num_blocks)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._caching = settings.enable_prefix_caching
        self._epoch = 0
        """Advanced by a reset: blocks filled before it are never registered after it."""
        self._refused: _Refusal | None = None

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_blocks

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest computed prefix, the last token excepted: it must be computed to be sampled from."""
        if not self._caching:
            return []
        request.extend_block_hashes(self.block_size)
        limit = self._num_looked_up(request)
        hashes = request.block_hashes
        return self.pool.lookup(hashes if len(hashes) <= limit else hashes[:limit])

    def _num_looked_up(self, request: Request) -> int:
        """Full blocks of a request that may hit: all but one that ends with the last token."""
        return (request.num_tokens - 1) // self.block_size

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(request.block_ids))

    def can_admit(self, request: Request, prefix: Sequence[int], reserved: int) -> bool:
        """Whether all tokens of a waiting request fit behind `prefix`, with `reserved` free blocks left over."""
        needed = self.num_missing_blocks(request, request.num_tokens) - len(prefix)
        fits = needed + reserved <= self.pool.num_free_blocks - self.pool.num_unused(prefix)
        if not fits:
            self._refused = _Refusal(
                request.sequence, self.pool.num_freed, request.block_hashes[len(prefix) : len(prefix) + 1]
            )
        return fits

    def would_refuse(self, request: Request) -> bool:
        """Whether `can_admit` refused this request last and nothing has happened since that could let it in.

        NOTE: looking its prefix up anew in every step, a long prompt at the head of the queue would slow down everybody
        whom it waits for. Blocks that others take of its prefix, or give back, do not matter: what it need not take
        it can't take from the free ones either. So it takes a block that came free, or one more that it shares.
        """
        refused = self._refused
        if refused is None or refused.sequence != request.sequence or refused.num_freed != self.pool.num_freed:
            return False
        return not any(map(self.pool.holds, refused.next_hash))

    def admit(self, request: Request, prefix: list[int]) -> None:
        """Give a waiting request its prefix hit, and count it unless it was counted before."""
        self.pool.take(prefix)
        request.block_ids = prefix
        request.num_registered_blocks = len(prefix)
        request.cache_epoch = self._epoch
        request.num_computed_tokens = len(prefix) * self.block_size
        if not request.prefix_counted:
            request.prefix_counted = True
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self._caching:
                self.prefix_queries += self._num_looked_up(request) * self.block_size
                self.prefix_hits += request.num_computed_tokens

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's blocks to hold `num_tokens` tokens; False, and no change, when too few are free."""
        missing = self.num_missing_blocks(request, num_tokens)
        if missing > self.pool.num_free_blocks:
            return False
        if missing:
            request.block_ids += self.pool.allocate(missing)
        return True

    def register_computed(self, request: Request) -> None:
        """Make the full blocks that the last step completed findable. Called when that step is done, not before."""
        end = request.num_computed_tokens // self.block_size
        if not self._caching or request.cache_epoch != self._epoch or end <= request.num_registered_blocks:
            return
        request.extend_block_hashes(self.block_size)
        for index in range(request.num_registered_blocks, end):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered_blocks = end

    def free(self, request: Request) -> None:
        """Take a request's blocks back."""
        self.pool.free(request.block_ids)
        request.block_ids = []

    def reset_prefix_cache(self) -> None:
        """Forget every computed prefix. Running requests keep their blocks, which will not be found either."""
        self.pool.forget_contents()
        self._epoch += 1

    def reset(self) -> None:
        """The ranks' blocks are gone. The caller has taken every request's blocks back."""
        self.pool = BlockPool(self.pool.num_blocks)
        self._epoch += 1
        self._refused = None
