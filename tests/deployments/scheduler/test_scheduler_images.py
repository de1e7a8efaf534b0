"""Scheduler and images: what is encoded in which step, who waits for whom, and what EncoderCacheStats counts."""

import pytest

from actors.messages import SamplingParams
from deployments.scheduler.encoder_cache_manager import EncoderCacheManager
from deployments.scheduler.image_reservation import reserve_images
from deployments.scheduler.request import Request
from deployments.scheduler.scheduler import MAX_OVERTAKEN
from deployments.scheduler.step_plan import StepPlan
from tests.deployments.scheduler.simulation import Simulation, make_config, make_request, text


def endless(max_tokens: int = 1000) -> SamplingParams:
    """Sampling without stop tokens."""
    return SamplingParams(max_tokens=max_tokens)


def test_image_is_encoded_once_however_many_want_it() -> None:
    simulation = Simulation(make_config(scheduler__max_num_batched_tokens=64))
    for name in "xy":
        simulation.add(make_request(name, ("a", 8), 1, ("a", 8), len(name)))
    output = simulation.step()
    assert output is not None
    assert output.scheduled_encoder_inputs == {"x": (0,)}
    assert set(output.num_scheduled_tokens) == {"x", "y"}
    stats = simulation.scheduler.take_stats().encoder
    assert (stats.queries, stats.hits, stats.misses) == (4, 3, 1)


def test_image_in_the_prefix_hit_is_never_looked_up() -> None:
    simulation = Simulation(make_config())
    for name in ("first", "again"):
        simulation.scheduler.take_stats()
        simulation.add(make_request(name, ("a", 8), *text(5)))
        simulation.drain()
    assert simulation.scheduler.take_stats().encoder.scheduler_queries == 0


def test_prefix_hit_that_ends_inside_an_image_needs_the_whole_image() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("first", 1, ("a", 6), 2, max_tokens=1))
    simulation.drain()
    simulation.reset_encoder_cache()
    simulation.add(make_request("again", 1, ("a", 6), 3, max_tokens=1))
    simulation.step()
    output = simulation.step() if simulation.steps[-1].phase == "idle" else simulation.steps[-1]
    assert output is not None
    assert output.num_scheduled_tokens == {"again": 4}
    assert output.scheduled_encoder_inputs == {"again": (0,)}
    simulation.drain()


def test_chunk_is_cut_before_an_image_beyond_the_compute_budget() -> None:
    simulation = Simulation(make_config(scheduler__max_encoder_embeddings_per_step=8))
    simulation.add(make_request("r", ("a", 5), 1, ("b", 5), 1))
    first, second = simulation.step(), simulation.step()
    assert first is not None
    assert second is not None
    assert first.num_scheduled_tokens == {"r": 6}
    assert second.scheduled_encoder_inputs == {"r": (1,)}
    simulation.drain()


def test_image_above_the_whole_budget_goes_alone() -> None:
    simulation = Simulation(
        make_config(scheduler__max_encoder_embeddings_per_step=8, scheduler__max_num_batched_tokens=64)
    )
    simulation.add(make_request("r", ("small", 2), ("large", 20), 1))
    steps = [simulation.step() for _ in range(2)]
    assert [step.scheduled_encoder_inputs for step in steps if step] == [{"r": (0,)}, {"r": (1,)}]
    simulation.drain()


def test_kept_image_gives_way_to_the_requests_own_next_one() -> None:
    """The first image occurs again at the end, and the second does not fit beside it."""
    simulation = Simulation(make_config())
    simulation.add(make_request("r", ("a", 8), ("b", 28), ("a", 8), 1))
    simulation.drain()
    stats = simulation.scheduler.take_stats().encoder
    assert (stats.queries, stats.misses) == (3, 3)


def test_text_passes_a_request_that_waits_for_space_but_images_do_not() -> None:
    simulation = Simulation(make_config(encoder_cache__min_hold_time_ms=1000.0))
    simulation.add(make_request("holds", ("a", 20), 1, max_tokens=1))
    simulation.step()
    simulation.add(make_request("blocked", ("b", 20), 1))
    simulation.add(make_request("image", ("c", 4), 1))
    simulation.add(make_request("text", *text(5)))
    for _ in range(30):
        simulation.step()
    assert set(simulation.scheduler.requests) == {"blocked", "image"}
    assert not simulation.scheduler.running
    assert simulation.scheduler.next_wakeup() == pytest.approx(1.001)
    simulation.drain()


def test_few_are_overtaken_at_a_time() -> None:
    simulation = Simulation(make_config(encoder_cache__min_hold_time_ms=1000.0))
    simulation.add(make_request("holds", ("a", 20), 1, max_tokens=1))
    simulation.step()
    for index in range(MAX_OVERTAKEN + 5):
        simulation.add(make_request(f"blocked{index}", ("b", 20), 1, max_tokens=1))
    simulation.add(make_request("text", *text(5)))
    for _ in range(5):
        simulation.step()
    assert "text" in simulation.scheduler.requests
    simulation.drain()


def test_behind_a_request_that_waits_none_reserves_an_image() -> None:
    config = make_config()
    cache = EncoderCacheManager(config.encoder_cache.num_blocks, config.encoder_cache.block_size)
    plan = StepPlan(config.scheduler)
    older = Request(make_request("older", 1, ("a", 20), ("b", 20)), 1, 64)
    younger = Request(make_request("younger", 1, 2, ("a", 20), ("c", 1)), 2, 64)
    assert reserve_images(older, 0, 41, plan, cache) == 21
    assert reserve_images(younger, 0, 23, plan, cache) == 2
    assert plan.encoder_inputs == {"older": [0]}
    assert cache.stats.scheduler_queries == 2, "a look-up would already pin what the older one waits for"


# EncoderCacheStats over whole steps


def test_image_put_off_by_the_budget_is_one_miss_once_admitted() -> None:
    config = make_config(scheduler__max_encoder_embeddings_per_step=4, scheduler__max_num_batched_tokens=64)
    simulation = Simulation(config)
    for index in range(4):
        simulation.add(make_request(f"r{index}", (f"i{index}", 4), 1, sampling=endless(1)))
    misses, lookups = [], []
    for _ in range(4):
        simulation.step()
        stats = simulation.scheduler.take_stats().encoder
        misses.append(stats.misses)
        lookups.append(stats.scheduler_queries)
        assert stats.queries == stats.hits + stats.misses
    assert misses == [1, 1, 1, 1]
    assert lookups == [2, 2, 2, 1], "the one behind is looked up each time, those behind it not"


def test_image_chunked_over_four_steps_is_one_query() -> None:
    simulation = Simulation(make_config(encoder_cache__num_blocks=17))
    simulation.add(make_request("r", ("a", 60), 1))
    simulation.drain()
    assert sum(step.phase == "prefill" for step in simulation.steps) == 4
    stats = simulation.scheduler.take_stats().encoder
    assert (stats.queries, stats.hits, stats.misses) == (1, 0, 1)
    assert stats.scheduler_hits == 0


def test_same_image_in_two_requests_of_a_step_is_one_miss_and_one_hit() -> None:
    simulation = Simulation(make_config())
    for name in "xy":
        simulation.add(make_request(name, ("a", 4), 1))
    simulation.step()
    stats = simulation.scheduler.take_stats().encoder
    assert (stats.queries, stats.hits, stats.misses) == (2, 1, 1)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_request_counts_its_images_once(prefix_caching: bool) -> None:
    config = make_config(kv_cache__num_blocks=16, kv_cache__enable_prefix_caching=prefix_caching)
    simulation = Simulation(config)
    for name in ("old", "young"):
        simulation.add(make_request(name, (name, 8), 1, sampling=endless(40)))
    simulation.drain()
    stats = simulation.scheduler.take_stats()
    assert stats.num_preemptions > 0
    assert (stats.encoder.queries, stats.encoder.hits, stats.encoder.misses) == (2, 0, 2)
    assert stats.prefix_queries == (16 if prefix_caching else 0)
    assert stats.prefix_hits == 0
