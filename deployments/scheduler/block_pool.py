"""BlockPool: the KV blocks, who uses each, and which content the unused ones still hold."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`num_blocks` KV blocks, ids from 0.

    A block with references is in use. One without is free, but its content stays findable by hash until the block is
    allocated again, least recently used first. A hash maps to one block: a second block of the same content stays
    anonymous.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Next to be allocated first."""
        self.num_freed = 0
        """Blocks that came free, ever."""

    @property
    def num_free_blocks(self) -> int:
        """Allocatable blocks, cached content or not."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`."""
        blocks = []
        get = self._cached.get
        for block_hash in hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block of this content is findable."""
        return block_hash in self._cached

    def num_unused(self, block_ids: Sequence[int]) -> int:
        """How many of these are free: taking them makes so many fewer allocatable."""
        return sum(1 for block_id in block_ids if not self._ref_counts[block_id])

    def take(self, block_ids: Sequence[int]) -> None:
        """Add a reference to cached blocks."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; what they held is forgotten. The caller knows that they are free."""
        blocks = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._cached[block_hash]
                self._hashes[block_id] = None
            self._ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def register(self, block_id: int, block_hash: bytes) -> None:
        """The block's content is computed: it can be found from now on."""
        if block_hash not in self._cached:
            self._cached[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a request, given in token order.

        Last blocks are freed first: a prefix is worth more than what follows it. Blocks that hold nothing findable
        are allocated before any that do.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self.num_freed += 1
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def forget_contents(self) -> None:
        """Nothing is findable any more; who uses which block does not change."""
        self._cached.clear()
        self._hashes = [None] * self.num_blocks

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless references are those of `block_tables` and the rest is free."""
        counts = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), "a request uses a KV block twice"
            for block_id in table:
                counts[block_id] += 1
        assert counts == self._ref_counts, "KV block references differ from the block tables"
        assert set(self._free) == {block_id for block_id, count in enumerate(counts) if not count}
        assert self._cached == {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
