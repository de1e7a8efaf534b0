"""EncoderCacheManager: which images' embeddings are on the ranks, who needs them, and what may be evicted.

It counts blocks exactly as each rank's EncoderCacheBlocks does, hold windows by the same step clock, so that whatever
it admits fits there. Only counts matter: any free block serves any image.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from deployments.scheduler.request import Request
from telemetry.probe import mm_cache_probe


@dataclass
class EncoderCacheStats:
    """Lookups since the last `take_stats`, in items."""

    queries: int = 0
    """hits + misses. Each (request, item) once, at its first decided lookup, over the request's whole life."""
    hits: int = 0
    """Encoded already, or being encoded for another request in this step."""
    misses: int = 0
    """Admitted for encoding: recorded by `allocate`, so an item that is put off is no miss until then."""
    scheduler_queries: int = 0
    """Calls of `check_and_update_cache`, retries among them."""
    scheduler_hits: int = 0
    """Those that found the item."""


@dataclass(slots=True)
class _Cached:
    """An image whose embeddings are on the ranks, or will be when the step being scheduled has run."""

    num_blocks: int
    hold_end: float
    """Clock until which its blocks, if freed, are held."""
    request_ids: set[str] = field(default_factory=set)
    """Running requests that need it."""
    in_hold_queue: bool = False


class EncoderCacheManager:
    """Block-accurate bookkeeping of the encoder cache, for one scheduling pass after the other.

    An item is *referenced* by requests, or *freeable*: unreferenced with its hold window over, evicted from the least
    recently used on; or unreferenced with its hold window still running. The last kind is never evicted, because that
    would yield no allocatable block and lose a hit: it joins `freeable`, as its youngest, when its window ends.

    `freed` are the items that the ranks will free at the next step, before they allocate anything. An item evicted and
    wanted again in the same pass is taken back from `freed`, as long as its blocks can still be spared.
    """

    def __init__(self, num_blocks: int, block_size: int, min_hold_time_ms: float = 0.0) -> None:
        self.num_blocks = num_blocks
        """As configured: the last is the ranks' scratch block."""
        self.block_size = block_size
        self.stats = EncoderCacheStats()
        self._hold_s = min_hold_time_ms / 1000.0
        self._now = 0.0
        self._probe = mm_cache_probe("scheduler")
        self.reset()

    def reset(self) -> None:
        """The ranks' caches are empty again: forget every item, hold and reference. Stats stay."""
        self.cached: dict[str, _Cached] = {}
        self.freeable: OrderedDict[str, None] = OrderedDict()
        self.freed: dict[str, _Cached | None] = {}
        """mm_hash -> what was evicted, None when it must not be taken back."""
        self._num_free = self.num_blocks - 1
        self._num_freeable = 0
        self._num_held = 0
        self._held: list[tuple[float, int]] = []
        """Heap of (hold end, blocks) of freed items."""
        self._hold_queue: list[tuple[float, int, str, _Cached]] = []
        """Heap of the items that were unreferenced inside their hold window: (hold end, order, mm_hash, item)."""
        self._order = 0

    @property
    def num_free_blocks(self) -> int:
        """Allocatable now, counting what is in `freed` as gone."""
        return self._num_free

    @property
    def num_held_blocks(self) -> int:
        return self._num_held

    @property
    def num_active_blocks(self) -> int:
        return self.num_blocks - 1 - self._num_free - self._num_held

    def blocks_needed(self, num_embeddings: int) -> int:
        return -(-num_embeddings // self.block_size)

    def advance(self, now: float) -> int:
        """Set the step's clock, in seconds; returns how many held blocks became allocatable."""
        self._now = now
        released = 0
        while self._held and self._held[0][0] <= now:
            released += heapq.heappop(self._held)[1]
        self._num_held -= released
        self._num_free += released
        while self._hold_queue and self._hold_queue[0][0] <= now:
            _, _, mm_hash, item = heapq.heappop(self._hold_queue)
            item.in_hold_queue = False
            if self.cached.get(mm_hash) is item and not item.request_ids:
                self._make_freeable(mm_hash, item)
        return released

    def next_release(self) -> float | None:
        """Clock at which held blocks become free; None when nothing is held."""
        return self._held[0][0] if self._held else None

    def next_freeable(self) -> float | None:
        """Clock at which an unreferenced item may leave its hold window; None when none is in one."""
        return self._hold_queue[0][0] if self._hold_queue else None

    def check_and_update_cache(self, request: Request, item_index: int) -> bool:
        """Look an item up; if it is on the ranks, the request references it from now on."""
        mm_hash = request.mm_items[item_index].mm_hash
        self.stats.scheduler_queries += 1
        item = self.cached.get(mm_hash) or self._take_back(mm_hash)
        if self._probe:
            self._probe(item is not None, mm_hash, request.request_id)
        if item is None:
            return False
        self.stats.scheduler_hits += 1
        if self._first_decision(request, item_index):
            self.stats.hits += 1
        self._reference(request, mm_hash, item)
        return True

    def can_allocate(self, request: Request, item_index: int) -> bool:
        """Whether the item fits, after evicting what must go. Nothing is evicted when that would not be enough."""
        return self._make_room(self.blocks_needed(request.mm_items[item_index].num_embeddings))

    def allocate(self, request: Request, item_index: int) -> None:
        """Admit an item for encoding in this step. `can_allocate` has just said yes."""
        item = request.mm_items[item_index]
        num_blocks = self.blocks_needed(item.num_embeddings)
        if item.mm_hash in self.cached or num_blocks > self._num_free:
            raise RuntimeError(f"mm_hash {item.mm_hash} is cached already or does not fit: can_allocate comes first")
        self._num_free -= num_blocks
        cached = self.cached[item.mm_hash] = _Cached(num_blocks, hold_end=self._now + self._hold_s)
        self._reference(request, item.mm_hash, cached)
        if self._first_decision(request, item_index):
            self.stats.misses += 1

    def free_encoder_input(self, request: Request, item_index: int) -> None:
        """The item's tokens are computed: release it, unless the request needs it again further on."""
        mm_hash = request.mm_items[item_index].mm_hash
        if request.last_occurrence[mm_hash] == item_index and mm_hash in request.encoder_refs:
            self._release(request, (mm_hash,))

    def release_unneeded(self, request: Request, needed: Collection[str]) -> None:
        """Release all but `needed`: what the request keeps only for a later occurrence must not block its own way."""
        self._release(request, [mm_hash for mm_hash in request.encoder_refs if mm_hash not in needed])

    def free(self, request: Request) -> None:
        """Release everything that the request references: it finished, was aborted or preempted."""
        self._release(request, list(request.encoder_refs))

    def free_unreferenced(self) -> None:
        """Free every item that no request references, hold windows or not; none of them can be taken back."""
        in_hold = [mm_hash for _, _, mm_hash, item in self._hold_queue if self.cached.get(mm_hash) is item]
        for mm_hash in [*self.freeable, *in_hold]:
            item = self.cached[mm_hash]
            if not item.request_ids:
                del self.cached[mm_hash]
                self.freed[mm_hash] = None
                self._return_blocks(item)
        self.freeable.clear()
        self._num_freeable = 0

    def discard(self, mm_hash: str) -> None:
        """Free an item that no request references any more, hold window or not; it can't be taken back."""
        item = self.cached[mm_hash]
        if item.request_ids:
            raise RuntimeError(f"mm_hash {mm_hash} is needed by {sorted(item.request_ids)}: they must release it first")
        del self.cached[mm_hash]
        if mm_hash in self.freeable:
            del self.freeable[mm_hash]
            self._num_freeable -= item.num_blocks
        self.freed[mm_hash] = None
        self._return_blocks(item)

    def get_freed_mm_hashes(self) -> tuple[str, ...]:
        """What the ranks must free at the next step, in order. Ends the pass: the list is empty afterwards."""
        freed = tuple(self.freed)
        self.freed = {}
        return freed

    def take_stats(self) -> EncoderCacheStats:
        """The counts since the last call."""
        stats, self.stats = self.stats, EncoderCacheStats()
        return stats

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises AssertionError unless counts, references and the eviction order agree."""
        assert self._num_free >= 0, "more encoder cache blocks were admitted than there are"
        assert self.num_active_blocks == sum(item.num_blocks for item in self.cached.values())
        assert self._num_held == sum(blocks for _, blocks in self._held)
        assert self._num_freeable == sum(self.cached[mm_hash].num_blocks for mm_hash in self.freeable)
        references: dict[str, set[str]] = {}
        for request in running:
            for mm_hash in request.encoder_refs:
                references.setdefault(mm_hash, set()).add(request.request_id)
        assert references == {h: item.request_ids for h, item in self.cached.items() if item.request_ids}
        for mm_hash, item in self.cached.items():
            assert (mm_hash in self.freeable) == (not item.request_ids and not item.in_hold_queue)

    def _first_decision(self, request: Request, item_index: int) -> bool:
        """Count a query, at most once per (request, item); returns whether this was it."""
        if item_index in request.counted_items:
            return False
        request.counted_items.add(item_index)
        self.stats.queries += 1
        return True

    def _reference(self, request: Request, mm_hash: str, item: _Cached) -> None:
        if mm_hash in self.freeable:
            del self.freeable[mm_hash]
            self._num_freeable -= item.num_blocks
        item.request_ids.add(request.request_id)
        request.encoder_refs[mm_hash] = None

    def _release(self, request: Request, mm_hashes: Iterable[str]) -> None:
        for mm_hash in mm_hashes:
            del request.encoder_refs[mm_hash]
            item = self.cached[mm_hash]
            item.request_ids.remove(request.request_id)
            if item.request_ids or item.in_hold_queue:
                continue
            if item.hold_end <= self._now:
                self._make_freeable(mm_hash, item)
            else:
                self._order += 1
                item.in_hold_queue = True
                heapq.heappush(self._hold_queue, (item.hold_end, self._order, mm_hash, item))

    def _make_freeable(self, mm_hash: str, item: _Cached) -> None:
        self.freeable[mm_hash] = None
        self._num_freeable += item.num_blocks

    def _make_room(self, num_blocks: int) -> bool:
        """Evict the least recently used until `num_blocks` are free; False, and nothing evicted, when they can't be."""
        if num_blocks > self._num_free + self._num_freeable:
            return False
        while self._num_free < num_blocks:
            mm_hash, _ = self.freeable.popitem(last=False)
            item = self.cached.pop(mm_hash)
            self._num_freeable -= item.num_blocks
            self.freed[mm_hash] = item
            self._return_blocks(item)
        return True

    def _take_back(self, mm_hash: str) -> _Cached | None:
        """Undo this pass's eviction of an item, at the cost of the next in line if its blocks were given away.

        NOTE: the ranks free before they allocate, so blocks are counted as of the end of the pass. Keeping the item
        is the same as allocating it anew, without the encoding. If even that is impossible the item can't be
        allocated in this pass either: it is put off, and never both freed and encoded in one step.
        """
        item = self.freed.get(mm_hash)
        if item is None or not self._make_room(item.num_blocks):
            return None
        del self.freed[mm_hash]
        self._num_free -= item.num_blocks
        self.cached[mm_hash] = item
        return item

    def _return_blocks(self, item: _Cached) -> None:
        if item.hold_end <= self._now:
            self._num_free += item.num_blocks
        else:
            self._num_held += item.num_blocks
            heapq.heappush(self._held, (item.hold_end, item.num_blocks))
