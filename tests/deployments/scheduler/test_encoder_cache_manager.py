"""EncoderCacheManager: block-accurate room, eviction order, references and what is counted when."""

import time

import pytest

from deployments.scheduler.encoder_cache_manager import EncoderCacheManager
from deployments.scheduler.request import Request
from tests.deployments.scheduler.simulation import make_request


def request(request_id: str, *parts: int | tuple[str, int]) -> Request:
    return Request(make_request(request_id, *parts), sequence=1, max_model_len=1000)


def cache_image(manager: EncoderCacheManager, mm_hash: str, size: int) -> Request:
    """Encode an image for a request of its own."""
    owner = request(f"owner of {mm_hash}", (mm_hash, size))
    assert not manager.check_and_update_cache(owner, 0)
    assert manager.can_allocate(owner, 0)
    manager.allocate(owner, 0)
    return owner


def test_counts_blocks_not_embeddings() -> None:
    manager = EncoderCacheManager(num_blocks=4, block_size=4)
    for name in "abc":
        cache_image(manager, name, 1)
    assert manager.num_free_blocks == 0
    assert not manager.can_allocate(request("r", ("d", 1)), 0)
    assert manager.get_freed_mm_hashes() == ()


def test_evicts_the_least_recently_used_and_only_when_it_is_enough() -> None:
    manager = EncoderCacheManager(num_blocks=5, block_size=4)
    owners = {name: cache_image(manager, name, 4) for name in "abcd"}
    for name in "bac":
        manager.free_encoder_input(owners[name], 0)
    assert not manager.can_allocate(request("r", ("large", 16)), 0)
    assert not manager.freed
    again = request("again", ("b", 4))
    assert manager.check_and_update_cache(again, 0)
    manager.free(again)
    assert manager.can_allocate(request("r", ("two", 8)), 0)
    assert manager.get_freed_mm_hashes() == ("a", "c")
    assert set(manager.cached) == {"b", "d"}
    assert manager.get_freed_mm_hashes() == ()


def test_released_at_the_last_occurrence() -> None:
    manager = EncoderCacheManager(num_blocks=5, block_size=4)
    twice = request("r", ("a", 4), 1, ("a", 4))
    assert not manager.check_and_update_cache(twice, 0)
    manager.allocate(twice, 0)
    manager.free_encoder_input(twice, 0)
    assert not manager.freeable
    assert manager.check_and_update_cache(twice, 1)
    manager.free_encoder_input(twice, 1)
    assert list(manager.freeable) == ["a"]
    assert (manager.stats.queries, manager.stats.hits, manager.stats.misses) == (2, 1, 1)


def test_evicted_and_wanted_again_in_one_pass_is_not_freed() -> None:
    manager = EncoderCacheManager(num_blocks=4, block_size=4)
    for name in "abc":
        manager.free(cache_image(manager, name, 4))
    assert manager.can_allocate(request("r", ("d", 4)), 0)
    manager.allocate(request("r", ("d", 4)), 0)
    assert list(manager.freed) == ["a"]
    assert manager.check_and_update_cache(request("s", ("a", 4)), 0)
    assert manager.get_freed_mm_hashes() == ("b",), "the next in line goes instead"
    assert set(manager.cached) == {"a", "c", "d"}


def test_evicted_and_its_blocks_given_away_is_a_miss_that_waits() -> None:
    manager = EncoderCacheManager(num_blocks=2, block_size=4)
    manager.free(cache_image(manager, "a", 4))
    cache_image(manager, "b", 4)
    wants_a = request("r", ("a", 4))
    assert not manager.check_and_update_cache(wants_a, 0)
    assert not manager.can_allocate(wants_a, 0)
    assert manager.get_freed_mm_hashes() == ("a",)


def test_items_in_their_hold_window_are_not_evicted_but_can_be_hit() -> None:
    manager = EncoderCacheManager(num_blocks=3, block_size=4, min_hold_time_ms=100.0)
    manager.advance(1.0)
    owner = cache_image(manager, "a", 8)
    manager.advance(1.05)
    manager.free(owner)
    assert not manager.can_allocate(request("r", ("b", 4)), 0)
    assert not manager.freed
    hit = request("s", ("a", 8))
    assert manager.check_and_update_cache(hit, 0)
    manager.free(hit)
    assert manager.next_freeable() == 1.1
    manager.advance(1.11)
    assert manager.can_allocate(request("r", ("b", 4)), 0)
    assert manager.get_freed_mm_hashes() == ("a",)
    assert manager.num_held_blocks == 0


def test_reset_of_unreferenced_items_holds_their_blocks() -> None:
    manager = EncoderCacheManager(num_blocks=5, block_size=4, min_hold_time_ms=100.0)
    manager.advance(1.0)
    owners = {name: cache_image(manager, name, 4) for name in "abc"}
    manager.free(owners["a"])
    manager.free(owners["b"])
    manager.free_unreferenced()
    assert (manager.num_active_blocks, manager.num_free_blocks, manager.num_held_blocks) == (1, 1, 2)
    assert not manager.check_and_update_cache(request("r", ("a", 4)), 0), "a reset is not undone"
    assert manager.get_freed_mm_hashes() == ("a", "b")
    assert manager.advance(1.2) == 2
    assert manager.num_free_blocks == 3
    manager.check_integrity([owners["c"]])


def test_put_off_three_times_and_then_admitted_is_one_miss() -> None:
    manager = EncoderCacheManager(num_blocks=5, block_size=4)
    waits = request("r", ("a", 4))
    for _ in range(3):
        assert not manager.check_and_update_cache(waits, 0)
        assert manager.stats.queries == manager.stats.misses == 0
    assert not manager.check_and_update_cache(waits, 0)
    manager.allocate(waits, 0)
    stats = manager.take_stats()
    assert (stats.queries, stats.hits, stats.misses) == (1, 0, 1)
    assert (stats.scheduler_queries, stats.scheduler_hits) == (4, 0)
    assert manager.take_stats().scheduler_queries == 0


def _turnover_seconds(entries: int) -> float:
    manager = EncoderCacheManager(num_blocks=entries + 1, block_size=4)
    for index in range(entries):
        manager.free(cache_image(manager, str(index), 4))
    best = float("inf")
    for repeat in range(10):
        requests = [request(f"{repeat}-{index}", (f"new{repeat}-{index}", 4)) for index in range(100)]
        begin = time.thread_time()
        for one in requests:
            manager.check_and_update_cache(one, 0)
            assert manager.can_allocate(one, 0)
            manager.allocate(one, 0)
            manager.free_encoder_input(one, 0)
            manager.get_freed_mm_hashes()
        best = min(best, time.thread_time() - begin)
    return best


def test_cost_does_not_grow_with_the_number_of_images() -> None:
    small, large = _turnover_seconds(1_000), _turnover_seconds(100_000)
    assert large < 20 * small, "a scan would make it a hundredfold"


def test_an_item_that_is_discarded_is_freed_and_not_taken_back() -> None:
    manager = EncoderCacheManager(num_blocks=5, block_size=4, min_hold_time_ms=1000)
    owners = {name: cache_image(manager, name, 4) for name in "ab"}
    with pytest.raises(RuntimeError, match="owner of a"):
        manager.discard("a")
    manager.free(owners["a"])  # inside its hold window
    manager.discard("a")
    manager.free(owners["b"])
    manager.advance(2.0)  # behind it
    assert list(manager.freeable) == ["b"]
    manager.discard("b")
    manager.check_integrity([])
    assert not manager.check_and_update_cache(request("r", ("a", 4)), 0)
    assert manager.get_freed_mm_hashes() == ("a", "b")
    assert manager.num_free_blocks == 4
