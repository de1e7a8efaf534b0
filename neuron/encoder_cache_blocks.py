"""EncoderCacheBlocks: which blocks of a rank's encoder cache hold which image.

Bookkeeping only, in plain Python: the buffer itself, `[num_blocks, block_size, columns]`, belongs to the runner.
Every rank of a gang gets the same calls in the same order with the same clock, so every rank chooses the same blocks.
"""

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from blake3 import blake3


@dataclass(slots=True)
class _Slot:
    block_ids: tuple[int, ...]
    num_embeddings: int
    written_at: float | None = None
    """Clock of the write; None until `mark_written`."""


class EncoderCacheBlocks:
    """Blocks of one rank's shard. The last block is scratch: it absorbs padding writes and is never allocated.

    A block is *active* (an image's), *free* (allocatable) or *held*: freed, but its hold window, `min_hold_time_ms`
    after the write, still runs. Always: active + free + held == num_blocks - 1.
    Clocks are in seconds and never go backwards; time passes here only through `advance` and `free`.
    """

    def __init__(self, num_blocks: int, block_size: int, min_hold_time_ms: float = 0.0) -> None:
        if num_blocks < 2 or block_size < 1 or min_hold_time_ms < 0:
            raise ValueError(
                f"num_blocks = {num_blocks}, block_size = {block_size}, min_hold_time_ms = {min_hold_time_ms}: "
                "expected at least 2, at least 1 and at least 0"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._hold_s = min_hold_time_ms / 1000.0
        self._slots: dict[str, _Slot] = {}
        self._slot_map: dict[str, tuple[int, ...]] = {}
        self._free: deque[int] = deque(range(num_blocks - 1))
        self._held: list[tuple[float, int, tuple[int, ...]]] = []
        """Heap of (release clock, order of freeing, block ids)."""
        self._num_freed = 0
        self._num_held_blocks = 0
        self._num_real_tokens = 0

    @property
    def scratch_block(self) -> int:
        return self.num_blocks - 1

    @property
    def slot_map(self) -> Mapping[str, tuple[int, ...]]:
        """mm_hash -> block ids, read-only."""
        return MappingProxyType(self._slot_map)

    @property
    def num_active_blocks(self) -> int:
        return self.num_blocks - 1 - len(self._free) - self._num_held_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        return self._num_held_blocks

    @property
    def num_active_real_tokens(self) -> int:
        """Embeddings in active blocks, without the padding behind each image's last one."""
        return self._num_real_tokens

    def contains(self, mm_hash: str) -> bool:
        return mm_hash in self._slots

    def advance(self, now: float) -> int:
        """Make the blocks whose hold window has ended by `now` allocatable; returns how many they are."""
        released = 0
        while self._held and self._held[0][0] <= now:
            _, _, block_ids = heapq.heappop(self._held)
            self._free.extend(block_ids)
            released += len(block_ids)
        self._num_held_blocks -= released
        return released

    def allocate(self, mm_hash: str, num_embeddings: int) -> list[int]:
        """Take ceil(num_embeddings / block_size) blocks, the longest free first; returns their ids in row order.

        Raises ValueError for an image that is here already, and RuntimeError when too few blocks are free: the
        scheduler's accounting admits only what fits.
        """
        if mm_hash in self._slots:
            raise ValueError(f"mm_hash {mm_hash} is allocated already")
        if num_embeddings < 1:
            raise ValueError(f"mm_hash {mm_hash}: num_embeddings = {num_embeddings}, expected at least 1")
        needed = -(-num_embeddings // self.block_size)
        if needed > len(self._free):
            raise RuntimeError(
                f"mm_hash {mm_hash} needs {needed} encoder cache blocks: {len(self._free)} free, "
                f"{self._num_held_blocks} held, {self.num_active_blocks} active"
            )
        block_ids = tuple(self._free.popleft() for _ in range(needed))
        self._slots[mm_hash] = _Slot(block_ids, num_embeddings)
        self._slot_map[mm_hash] = block_ids
        self._num_real_tokens += num_embeddings
        return list(block_ids)

    def mark_written(self, mm_hash: str, now: float) -> None:
        """The embeddings are in the blocks since `now`: the hold window begins. Raises KeyError when absent."""
        self._slots[mm_hash].written_at = now

    def free(self, mm_hash: str, now: float) -> int:
        """Give an image's blocks back; returns how many. Raises KeyError when absent.

        They are allocatable at once unless the hold window since the write still runs: then at its end.
        """
        slot = self._slots.pop(mm_hash)
        del self._slot_map[mm_hash]
        self._num_real_tokens -= slot.num_embeddings
        self._num_freed += 1
        release = None if slot.written_at is None else slot.written_at + self._hold_s
        if release is None or release <= now:
            self._free.extend(slot.block_ids)
        else:
            heapq.heappush(self._held, (release, self._num_freed, slot.block_ids))
            self._num_held_blocks += len(slot.block_ids)
        return len(slot.block_ids)

    def rows(self, mm_hash: str) -> list[int]:
        """Row of each embedding in the buffer seen as `[num_blocks * block_size, columns]`, in order."""
        slot = self._slots[mm_hash]
        size = self.block_size
        rows = [row for block_id in slot.block_ids for row in range(block_id * size, (block_id + 1) * size)]
        del rows[slot.num_embeddings :]
        return rows

    def next_release(self) -> float | None:
        """Clock at which the first held blocks become free; None when nothing is held."""
        return self._held[0][0] if self._held else None

    def digest(self) -> str:
        """Short hash of everything that decides future block choices: equal on ranks that agree."""
        hasher = blake3()
        for mm_hash, slot in self._slots.items():
            hasher.update(repr((mm_hash, slot.block_ids, slot.num_embeddings, slot.written_at)).encode())
        hasher.update(repr((list(self._free), sorted(self._held), self._num_freed)).encode())
        return hasher.hexdigest(length=8)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one place and the counts agree."""
        active = [block_id for slot in self._slots.values() for block_id in slot.block_ids]
        held = [block_id for _, _, block_ids in self._held for block_id in block_ids]
        everywhere = [*active, *self._free, *held]
        assert sorted(everywhere) == list(range(self.num_blocks - 1)), "an encoder cache block is lost or in two places"
        assert len(active) == self.num_active_blocks, "num_active_blocks is wrong"
        assert len(held) == self.num_held_blocks, "num_held_blocks is wrong"
        assert self._num_real_tokens == sum(slot.num_embeddings for slot in self._slots.values())
        assert self._slot_map == {mm_hash: slot.block_ids for mm_hash, slot in self._slots.items()}
        for slot in self._slots.values():
            assert len(slot.block_ids) == -(-slot.num_embeddings // self.block_size), "an image has too many blocks"
