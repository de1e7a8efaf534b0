"""EncoderCacheBlocks: deterministic block choice, hold windows on the clock it is given, counts that always add up."""

import time
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron.encoder_cache_blocks import EncoderCacheBlocks


def counts(blocks: EncoderCacheBlocks) -> tuple[int, int, int]:
    return blocks.num_active_blocks, blocks.num_free_blocks, blocks.num_held_blocks


def test_allocates_whole_blocks_and_never_the_scratch_block() -> None:
    blocks = EncoderCacheBlocks(num_blocks=5, block_size=4)
    assert blocks.allocate("a", 5) == [0, 1]
    assert blocks.allocate("b", 8) == [2, 3]
    assert blocks.scratch_block == 4
    assert counts(blocks) == (4, 0, 0)
    assert blocks.num_active_real_tokens == 13
    assert dict(blocks.slot_map) == {"a": (0, 1), "b": (2, 3)}
    with pytest.raises(RuntimeError, match="c needs 1 encoder cache blocks: 0 free"):
        blocks.allocate("c", 1)


def test_rows_follow_the_blocks_and_leave_the_padding_out() -> None:
    blocks = EncoderCacheBlocks(num_blocks=6, block_size=4)
    blocks.allocate("a", 4)
    blocks.allocate("b", 4)
    blocks.free("a", now=0.0)
    blocks.allocate("c", 9)
    assert blocks.slot_map["c"] == (2, 3, 4)
    blocks.free("b", now=0.0)
    blocks.allocate("d", 7)
    assert blocks.slot_map["d"] == (0, 1)
    assert blocks.rows("d") == [0, 1, 2, 3, 4, 5, 6]
    assert blocks.rows("c") == list(range(8, 17))


def test_freed_blocks_are_held_until_the_window_after_the_write_ends() -> None:
    blocks = EncoderCacheBlocks(num_blocks=4, block_size=4, min_hold_time_ms=100.0)
    blocks.allocate("a", 8)
    blocks.mark_written("a", now=1.0)
    assert blocks.free("a", now=1.05) == 2
    assert counts(blocks) == (0, 1, 2)
    assert not blocks.contains("a")
    assert blocks.next_release() == pytest.approx(1.1)
    assert blocks.advance(1.09) == 0
    assert blocks.advance(1.11) == 2
    assert counts(blocks) == (0, 3, 0)
    assert blocks.next_release() is None


def test_after_the_window_or_unwritten_blocks_are_free_at_once() -> None:
    blocks = EncoderCacheBlocks(num_blocks=4, block_size=4, min_hold_time_ms=100.0)
    blocks.allocate("a", 4)
    blocks.mark_written("a", now=1.0)
    blocks.allocate("b", 4)
    assert blocks.free("a", now=2.0) == 1
    assert blocks.free("b", now=0.0) == 1
    assert counts(blocks) == (0, 3, 0)


def test_misuse_is_refused() -> None:
    blocks = EncoderCacheBlocks(num_blocks=4, block_size=4)
    blocks.allocate("a", 4)
    with pytest.raises(ValueError, match="allocated already"):
        blocks.allocate("a", 4)
    with pytest.raises(ValueError, match="at least 1"):
        blocks.allocate("b", 0)
    with pytest.raises(KeyError):
        blocks.free("b", now=0.0)
    with pytest.raises(ValueError, match="num_blocks = 1"):
        EncoderCacheBlocks(num_blocks=1, block_size=4)
    slots: Mapping[str, tuple[int, ...]] = blocks.slot_map
    with pytest.raises(TypeError):
        slots["b"] = (1,)  # type: ignore[index]


def test_digest_tells_histories_apart_that_would_choose_other_blocks() -> None:
    one, other = (EncoderCacheBlocks(num_blocks=6, block_size=4, min_hold_time_ms=10.0) for _ in range(2))
    for blocks in (one, other):
        blocks.allocate("a", 4)
        blocks.allocate("b", 4)
    assert one.digest() == other.digest()
    one.mark_written("a", now=1.0)
    other.mark_written("a", now=1.001)
    assert one.digest() != other.digest()
    other.mark_written("a", now=1.0)
    assert one.digest() == other.digest()
    one.free("a", now=2.0)
    one.free("b", now=2.0)
    other.free("b", now=2.0)
    other.free("a", now=2.0)
    assert counts(one) == counts(other)
    assert one.digest() != other.digest()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("allocate", "write", "free", "advance")), st.integers(0, 7), st.integers(1, 30)),
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(OPERATIONS, st.sampled_from((0.0, 1000.0, 5000.0)))
def test_two_ranks_stay_equal_and_every_block_is_in_one_place(
    operations: list[tuple[str, int, int]], hold_ms: float
) -> None:
    ranks = [EncoderCacheBlocks(num_blocks=12, block_size=4, min_hold_time_ms=hold_ms) for _ in range(2)]
    held = 0
    now = 0.0
    for name, image, size in operations:
        mm_hash = f"image{image}"
        for blocks in ranks:
            present = blocks.contains(mm_hash)
            if name == "allocate" and not present and -(-size // 4) <= blocks.num_free_blocks:
                blocks.allocate(mm_hash, size)
            elif name == "write" and present:
                blocks.mark_written(mm_hash, now)
            elif name == "free" and present:
                free = blocks.num_free_blocks
                assert blocks.free(mm_hash, now) == blocks.num_free_blocks + blocks.num_held_blocks - free - held
            elif name == "advance":
                blocks.advance(now)
            blocks.check_integrity()
            assert sum(counts(blocks)) == 11
        now += 0.1 * size if name == "advance" else 0.0
        held = ranks[0].num_held_blocks
        assert ranks[0].digest() == ranks[1].digest()
    for blocks in ranks:
        blocks.advance(now + 10)
        assert blocks.num_held_blocks == 0


def _turnover_seconds(entries: int) -> float:
    blocks = EncoderCacheBlocks(num_blocks=entries + 1, block_size=4, min_hold_time_ms=1000.0)
    for index in range(entries):
        blocks.allocate(str(index), 4)
        blocks.mark_written(str(index), now=0.0)
    best = float("inf")
    for repeat in range(10):
        begin = time.thread_time()
        for index in range(100):
            blocks.free(str(repeat * 100 + index), now=2.0 + repeat)
            blocks.allocate(f"new{repeat}-{index}", 4)
            blocks.mark_written(f"new{repeat}-{index}", now=2.0 + repeat)
            blocks.advance(2.0 + repeat)
        best = min(best, time.thread_time() - begin)
    return best


def test_cost_does_not_grow_with_the_number_of_images() -> None:
    small, large = _turnover_seconds(2_000), _turnover_seconds(200_000)
    assert large < 20 * small, "a scan would make it a hundredfold"
