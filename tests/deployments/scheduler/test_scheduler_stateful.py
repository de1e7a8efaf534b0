"""Random histories over a Scheduler and a simulated rank: after every step both agree, and every answer is right."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.messages import EngineRequest, SamplingParams, SchedulerOutput
from configs.engine import EngineConfig
from deployments.scheduler.request import RequestError
from tests.deployments.scheduler.simulation import STOP_TOKEN, Simulation, make_config, make_request

IMAGE_SIZES = (1, 3, 4, 5, 8, 13, 20, 30)
"""Embeddings of image i: the hash names the size, so that equal hashes are equal images."""
EXPECTED = ("preempted", "prefix hits", "encoder hits", "evicted", "retried", "idle")


def random_request(rng: random.Random, request_id: str) -> EngineRequest:
    """Prompts over few tokens and images, so that prefixes and images repeat."""
    parts: list[int | tuple[str, int]] = [rng.choice((1, 2))] * rng.choice((0, 1, 4, 8))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        size = rng.choice(IMAGE_SIZES)
        parts.append((f"image{size}-{rng.randrange(3)}", size))
        parts += [rng.randrange(1, 4) for _ in range(rng.choice((0, 0, 1, 5)))]
    parts.append(3)
    output = tuple(rng.randrange(1, 9) for _ in range(rng.choice((0, 0, 0, 2, 5))))
    sampling = SamplingParams(
        max_tokens=rng.choice((1, 2, 5, 40, 40)),
        min_tokens=rng.choice((0, 0, 3)),
        stop_token_ids=rng.choice(((), (STOP_TOKEN,), (STOP_TOKEN, 5))),
    )
    salt = rng.choice((None, None, None, "a"))
    return make_request(request_id, *parts, sampling=sampling, output_token_ids=output, cache_salt=salt)


def random_config(rng: random.Random) -> EngineConfig:
    block_size = rng.choice((1, 3, 4))
    return make_config(
        model__max_model_len=64,
        kv_cache__block_size=block_size,
        kv_cache__num_blocks=-(-64 // block_size) + rng.choice((0, 3, 20)),
        kv_cache__enable_prefix_caching=rng.random() < 0.8,
        encoder_cache__block_size=rng.choice((1, 4, 7)),
        encoder_cache__num_blocks=rng.choice((9, 12, 31)),
        encoder_cache__min_hold_time_ms=rng.choice((0.0, 0.0, 3.0, 50.0)),
        scheduler__max_num_seqs=rng.choice((1, 3, 6)),
        scheduler__max_num_batched_tokens=rng.choice((16, 17, 40)),
        scheduler__max_encoder_embeddings_per_step=rng.choice((4, 16, 64)),
    )


def servable(request: EngineRequest, config: EngineConfig) -> bool:
    cache = config.encoder_cache
    largest = max((item.num_embeddings for item in request.mm_items), default=0)
    return len(request.token_ids) < config.model.max_model_len and largest <= (cache.num_blocks - 1) * cache.block_size


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, are aborted, caches are reset and the gang restarts, in any order and also during a step."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.simulation = Simulation(random_config(self.rng))
        self.count = 0
        self.in_flight: SchedulerOutput | None = None

    @rule(number=st.integers(1, 4))
    def add(self, number: int) -> None:
        for _ in range(number):
            self.count += 1
            request = random_request(self.rng, f"r{self.count}")
            if servable(request, self.simulation.config):
                self.simulation.add(request)
            else:
                with pytest.raises(RequestError, match=r"max_model_len|encoder_cache\.num_blocks"):
                    self.simulation.add(request)

    @rule(number=st.integers(1, 12), seconds=st.sampled_from((0.0, 0.0005, 0.002, 0.1)))
    def steps(self, number: int, seconds: float) -> None:
        self._finish()
        for _ in range(number):
            self.simulation.step(seconds)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def begin_step(self) -> None:
        self.simulation.now += 0.001
        self.in_flight = self.simulation.scheduler.schedule(self.simulation.now)

    @precondition(lambda self: self.in_flight is None)
    @rule(choice=st.integers(0, 1000))
    def begin_step_without_some_pixels(self, choice: int) -> None:
        self.begin_step()
        scheduled = self.in_flight.scheduled_encoder_inputs if self.in_flight is not None else {}
        requests = self.simulation.scheduler.requests
        mm_hashes = [requests[key].mm_items[index].mm_hash for key, indices in scheduled.items() for index in indices]
        if mm_hashes:
            lost = mm_hashes[choice % len(mm_hashes)]
            self.simulation.rank.reset_allowed = True  # it is freed, and may be encoded, at the next step
            request_ids = self.simulation.scheduler.forget_image(lost)
            assert request_ids
            for request_id in request_ids:
                del self.simulation.sources[request_id]
            assert lost not in self.simulation.scheduler.encoder_cache.cached

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        alive = list(self.simulation.scheduler.requests)
        if alive:
            self.simulation.abort(alive[choice % len(alive)])

    @rule()
    def reset_prefix_cache(self) -> None:
        self.simulation.scheduler.reset_prefix_cache()

    @rule()
    def reset_encoder_cache(self) -> None:
        self.simulation.reset_encoder_cache()

    @rule()
    def recover(self) -> None:
        self.in_flight = None
        self.simulation.recover()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def _finish(self) -> None:
        if self.in_flight is not None:
            self.simulation.finish_step(self.in_flight)
            self.in_flight = None

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self._finish()
            self.simulation.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes: the printed history is short enough
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("hold_ms", [0.0, 5.0])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_thousands_of_images_under_a_tiny_cache(hold_ms: float, prefix_caching: bool) -> None:
    """Random small and large images, repeated, many per request: none stalls, fails or is answered wrongly."""
    rng = random.Random(7)
    config = make_config(
        model__max_model_len=96,
        kv_cache__num_blocks=32,
        kv_cache__enable_prefix_caching=prefix_caching,
        encoder_cache__num_blocks=9,
        encoder_cache__min_hold_time_ms=hold_ms,
        scheduler__max_num_seqs=8,
        scheduler__max_num_batched_tokens=32,
        scheduler__max_encoder_embeddings_per_step=24,
    )
    simulation = Simulation(config)
    num_images = number = 0
    largest = 32
    while num_images < 800:
        parts: list[int | tuple[str, int]] = [rng.randrange(1, 3)]
        length = 1
        for _ in range(rng.randrange(1, 7)):
            size = rng.choice((1, 2, 4, 9, 17, largest))
            if length + size > 70:
                break
            parts += [(f"{size}-{rng.randrange(6)}", size), rng.randrange(1, 4)]
            length += size + 1
            num_images += 1
        number += 1
        sampling = SamplingParams(max_tokens=rng.choice((1, 5, 40)), stop_token_ids=rng.choice(((), (STOP_TOKEN,))))
        simulation.add(make_request(f"r{number}", *parts, sampling=sampling))
        for _ in range(rng.randrange(0, 12)):
            simulation.step()
    simulation.drain()
    stats = simulation.scheduler.take_stats()
    assert stats.encoder.queries == stats.encoder.hits + stats.encoder.misses
    assert simulation.rank.num_encoded >= stats.encoder.misses
    assert simulation.rank.num_evicted_blocks > 0
    assert stats.num_preemptions > 0


def test_an_old_request_is_served_however_many_follow() -> None:
    """A large image waits while small ones keep arriving: it gets its turn."""
    simulation = Simulation(make_config(kv_cache__num_blocks=200))
    simulation.add(make_request("first", ("a", 20), *[1] * 10, ("a", 20), 2))
    simulation.add(make_request("large", 1, ("big", 32), 2))
    finished_after = None
    for index in range(300):
        simulation.add(make_request(f"s{index}", ("small" + str(index % 9), 4), 1, max_tokens=3))
        simulation.step()
        if finished_after is None and "large" not in simulation.scheduler.requests:
            finished_after = index
    assert finished_after is not None
    assert finished_after < 60
    simulation.drain()


def test_everything_happens_in_the_random_histories() -> None:
    """The histories are worth something: preemption, prefix hits, eviction, cut chunks and holds all occur."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        simulation = Simulation(random_config(rng))
        for index in range(15):
            try:
                simulation.add(random_request(rng, f"r{index}"))
            except RequestError:
                seen["refused"] += 1
            simulation.step()
        simulation.reset_encoder_cache()
        simulation.drain()
        stats = simulation.scheduler.take_stats()
        seen["preempted"] += stats.num_preemptions
        seen["prefix hits"] += stats.prefix_hits
        seen["encoder hits"] += stats.encoder.hits
        seen["evicted"] += simulation.rank.num_evicted_blocks
        seen["retried"] += stats.encoder.scheduler_queries - stats.encoder.queries
        seen["idle"] += sum(step.phase == "idle" for step in simulation.steps)
    rare = [name for name in EXPECTED if seen[name] <= 10]
    assert not rare, seen
