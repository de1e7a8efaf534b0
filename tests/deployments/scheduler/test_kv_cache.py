"""KV blocks and the prefix cache: what hits, what is evicted first, what is counted."""

import time
from typing import Any

import pytest

from configs.engine import KVCacheSettings
from deployments.block_hash import prompt_hashes
from deployments.scheduler.block_pool import BlockPool
from deployments.scheduler.kv_cache_manager import KVCacheManager
from deployments.scheduler.request import Request
from tests.deployments.scheduler.simulation import make_request, text


def request(*parts: int | tuple[str, int], **fields: Any) -> Request:
    return Request(make_request("r", *parts, **fields), sequence=1, max_model_len=1000)


def hashes(*parts: int | tuple[str, int], **fields: Any) -> list[bytes]:
    one = request(*parts, **fields)
    one.extend_block_hashes(4)
    return one.block_hashes


def compute(manager: KVCacheManager, one: Request) -> int:
    """Run a request's whole prefill; returns the tokens of its prefix hit."""
    prefix = manager.find_prefix(one)
    assert manager.can_admit(one, prefix, reserved=0)
    manager.admit(one, prefix)
    assert manager.allocate(one, one.num_tokens)
    hit = one.num_computed_tokens
    one.num_computed_tokens = one.num_tokens
    manager.register_computed(one)
    return hit


def test_hash_covers_parent_tokens_images_offsets_and_salt() -> None:
    base = hashes(*text(3), ("a", 6), *text(3))
    assert len(base) == 3
    assert base == hashes(*text(3), ("a", 6), *text(3))
    assert base[0] != hashes(*text(3, first=2), ("a", 6), *text(3))[0]
    assert base[2] != hashes(*text(3, first=2), ("a", 6), *text(3))[2], "the parent is covered"
    assert base[0] != hashes(*text(3), ("b", 6), *text(3))[0]
    assert base[0] != hashes(*text(3), ("a", 6), *text(3), cache_salt="s")[0]
    assert hashes(*text(4), cache_salt="") != hashes(*text(4))


def test_hash_covers_the_place_inside_the_image() -> None:
    whole = hashes(("a", 8))
    parts = hashes(("a", 4), ("a", 4))
    assert whole[0] == parts[0]
    assert whole[1] != parts[1], "second half of an image, or its first half again"
    assert hashes(("a", 2), ("b", 2)) != hashes(("b", 2), ("a", 2))
    assert hashes(("a", 2), ("b", 2)) != hashes(("a", 1), ("b", 3))


def test_hashes_extended_token_by_token_equal_those_made_at_once() -> None:
    parts: tuple[int | tuple[str, int], ...] = (*text(5), ("a", 3), 1, ("b", 9), *text(7))
    at_once = hashes(*parts)
    one = request(*parts)
    tokens, one.token_ids = one.token_ids, []
    for token in tokens:
        one.token_ids.append(token)
        one.extend_block_hashes(4)
    assert one.block_hashes == at_once


def test_hashes_that_came_with_the_request_are_taken_and_extended() -> None:
    parts: tuple[int | tuple[str, int], ...] = (*text(5), ("a", 9), *text(3))
    own = make_request("r", *parts, cache_salt="s")
    sent = prompt_hashes(own.token_ids, own.mm_items, own.cache_salt, 4)
    one = request(*parts, cache_salt="s", block_hashes=sent)
    one.check_block_hashes(4)
    one.token_ids += text(8)
    one.extend_block_hashes(4)
    assert one.block_hashes[:4] == hashes(*parts, cache_salt="s")
    assert one.block_hashes == hashes(*parts, *text(8), cache_salt="s")
    with pytest.raises(AssertionError, match="r: wrong block hashes"):
        request(*parts, block_hashes=sent).check_block_hashes(4)


def test_full_prompt_hit_still_recomputes_the_last_token() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=20))
    first = request(*text(12))
    assert compute(manager, first) == 0
    manager.free(first)
    assert compute(manager, request(*text(12))) == 8
    assert compute(manager, request(*text(13))) == 12
    assert manager.prefix_queries == 8 + 8 + 12  # the block of the last token is not looked up
    assert manager.prefix_hits == 20


def test_blocks_are_found_only_once_computed() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=20))
    first = request(*text(12))
    manager.admit(first, manager.find_prefix(first))
    manager.allocate(first, 12)
    assert manager.find_prefix(request(*text(12))) == []
    first.num_computed_tokens = 7
    manager.register_computed(first)
    assert manager.find_prefix(request(*text(12))) == first.block_ids[:1]


def test_counted_once_per_request() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=20))
    one = request(*text(10))
    compute(manager, one)
    manager.free(one)
    one.forget_computation()
    assert compute(manager, one) == 8
    assert (manager.prefix_queries, manager.prefix_hits, one.num_cached_tokens) == (8, 0, 0)


def test_caching_off_finds_and_counts_nothing() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=20, enable_prefix_caching=False))
    assert [compute(manager, request(*text(12))) for _ in range(2)] == [0, 0]
    assert manager.prefix_queries == 0
    assert manager.pool.num_cached_blocks == 0


def test_reset_forgets_running_requests_blocks_too() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=20))
    one = request(*text(12))
    compute(manager, one)
    manager.reset_prefix_cache()
    one.token_ids += text(4)
    one.num_computed_tokens = one.num_tokens
    manager.register_computed(one)
    assert manager.find_prefix(request(*text(16))) == []
    manager.pool.check_integrity([one.block_ids])


def test_unused_blocks_are_evicted_tail_first_and_oldest_first() -> None:
    pool = BlockPool(6)
    old, new = pool.allocate(2), pool.allocate(2)
    for block_id in (*old, *new):
        pool.register(block_id, bytes([block_id]))
    pool.free(old)
    pool.free(new)
    assert pool.allocate(2) == [4, 5], "blocks without content go first"
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]
    assert pool.num_cached_blocks == 0


def test_shared_blocks_are_freed_with_their_last_user() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"x")
    pool.take(pool.lookup([b"x", b"y"]))
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    pool.check_integrity([blocks[:1]])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([])


def test_a_refused_request_is_looked_up_again_when_a_block_came_free() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=8))
    running = [request(*text(12, first=first)) for first in (1, 2)]
    for one in running:
        compute(manager, one)
    waiting = request(*text(16, first=3))
    assert not manager.would_refuse(waiting)
    assert not manager.can_admit(waiting, manager.find_prefix(waiting), reserved=0)
    assert manager.would_refuse(waiting)
    another = Request(waiting.source, sequence=2, max_model_len=1000)
    assert not manager.would_refuse(another)
    manager.free(running[0])
    assert not manager.would_refuse(waiting)
    assert manager.can_admit(waiting, manager.find_prefix(waiting), reserved=0)


def test_a_refused_request_is_looked_up_again_when_its_next_block_was_computed() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=4, num_blocks=8))
    same = request(*text(20))
    manager.admit(same, manager.find_prefix(same))
    assert manager.allocate(same, 20)
    waiting = request(*text(20))
    for computed, refused in ((4, True), (8, False)):
        same.num_computed_tokens = computed
        manager.register_computed(same)
        assert not manager.would_refuse(waiting)
        assert manager.can_admit(waiting, manager.find_prefix(waiting), reserved=0) is not refused
        assert manager.would_refuse(waiting) is refused


def test_lookup_of_a_long_prompt_is_linear_and_fast() -> None:
    manager = KVCacheManager(KVCacheSettings(block_size=16, num_blocks=9000))
    prompt = text(131072)
    compute(manager, request(*prompt))
    again = request(*prompt)
    manager.find_prefix(again)
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        assert len(manager.find_prefix(again)) == 8191
        best = min(best, time.thread_time() - begin)
    assert best < 0.010
