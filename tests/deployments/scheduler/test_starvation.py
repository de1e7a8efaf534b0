"""No request waits for ever: it waits for its elders, those that came before it, and the younger ones hardly delay it.

The bound, in steps, of a request's first token: every other step works for the oldest request that is not finished. So
the work of the request and of its elders, twice; and for each of them at most once the time that a place takes to come
free, when younger ones took the last while it waited for the encoder cache (see MAX_OVERTAKEN).
"""

import random

import pytest

from actors.messages import EngineRequest
from configs.engine import EngineConfig
from deployments.scheduler.request import RequestError
from tests.deployments.scheduler.simulation import Simulation, make_config, make_request, text
from tests.deployments.scheduler.test_scheduler_stateful import random_config, random_request


def work(request: EngineRequest, config: EngineConfig) -> int:
    """Steps that a request takes at most when it is alone: chunks, each cut once by each of its images, and outputs."""
    longest = min(request.sampling.max_tokens, config.model.max_model_len - len(request.token_ids))
    tokens = len(request.token_ids) + len(request.output_token_ids)
    return -(-tokens // config.scheduler.max_num_batched_tokens) + len(request.mm_items) + longest


class Clocked(Simulation):
    """Notes at which step a request arrived, and at which it got its first token or its end."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.arrived: dict[str, int] = {}
        self.served: dict[str, int] = {}
        self.elders: dict[str, list[str]] = {}

    def add(self, request: EngineRequest) -> None:
        elders = list(self.scheduler.requests)
        super().add(request)
        self.arrived[request.request_id] = len(self.steps)
        self.elders[request.request_id] = elders

    def step(self, seconds: float = 0.001):
        output = super().step(seconds)
        for request_id, outputs in self.outputs.items():
            if outputs:
                self.served.setdefault(request_id, len(self.steps))
        return output

    def waited(self, request_id: str) -> int:
        """Steps from its arrival to its first token."""
        return self.served[request_id] - self.arrived[request_id]

    def bound(self, request_id: str) -> int:
        together = [*self.elders[request_id], request_id]
        place = max(work(source, self.config) for source in self.sources.values())
        return sum(2 * work(self.sources[each], self.config) + 2 * place for each in together)


@pytest.mark.parametrize("seed", range(25))
def test_the_bound_holds_in_random_histories(seed: int) -> None:
    """Prompts of text and of up to five images, preemption, evictions, hold windows; arrivals in bursts and streams."""
    rng = random.Random(seed)
    simulation = Clocked(random_config(rng))
    index = 0
    for _ in range(25):
        for _ in range(rng.choice((0, 1, 1, 2, 8))):
            index += 1
            try:
                simulation.add(random_request(rng, f"r{index}"))
            except RequestError:
                continue
        for _ in range(rng.choice((1, 2, 5))):
            simulation.step()
    simulation.drain()
    assert len(simulation.served) > 10
    for request_id in simulation.served:
        assert simulation.waited(request_id) <= simulation.bound(request_id), request_id


IMAGES = {
    "model__max_model_len": 256,
    "kv_cache__num_blocks": 400,
    "encoder_cache__num_blocks": 41,
    "scheduler__max_num_seqs": 8,
    "scheduler__max_num_batched_tokens": 32,
}
"""The encoder cache holds the images of one request of thirty and a third of another."""


def thirty_images(name: str) -> EngineRequest:
    parts: list[int | tuple[str, int]] = []
    for index in range(30):
        parts += [(f"{name}-{index}", 4), 1]
    return make_request(name, *parts, max_tokens=4)


@pytest.mark.parametrize("number", [1, 4, 12])
def test_text_behind_requests_of_thirty_images_waits_for_their_prefill_only(number: int) -> None:
    """Alone, each of them takes five chunks; between any two of those a decode step may come. More that arrive behind
    the text change nothing."""
    simulation = Clocked(make_config(**IMAGES))
    for index in range(number):
        simulation.add(thirty_images(f"images{index}"))
    simulation.add(make_request("text", *text(5)))
    later = 0
    while "text" not in simulation.served:
        later += 1
        simulation.add(thirty_images(f"later{later}"))
        simulation.step()
    chunks = -(-30 * 5 // 32)
    assert simulation.waited("text") <= 2 * (number * chunks + 1)
    for request_id in [name for name in simulation.scheduler.requests if name.startswith("later")]:
        simulation.abort(request_id)
    simulation.drain()


@pytest.mark.parametrize("small_has_image", [False, True])
def test_a_large_request_is_served_before_those_that_stream_in_behind_it(small_has_image: bool) -> None:
    """Four small requests arrive with every step, more than can be served; the large one's way takes what it takes
    alone, twice, and once the time until a place comes free."""
    config = make_config(**IMAGES)

    def steps_of(stream: bool) -> int:
        simulation = Clocked(config)
        count = 0

        def small() -> None:
            nonlocal count
            for _ in range(4 if stream else 0):
                count += 1
                image = [(f"small{count % 7}", 4)] if small_has_image else []
                simulation.add(make_request(f"s{count}", *image, *text(6, first=count), max_tokens=6))

        for _ in range(20):
            small()
            simulation.step()
        elders = len(simulation.scheduler.requests)
        simulation.add(thirty_images("large"))
        simulation.scheduler.check_integrity()
        while "large" not in simulation.served:
            small()
            simulation.step()
        assert bool(elders) is stream
        return simulation.waited("large") - elders * 2

    alone = steps_of(stream=False)
    assert steps_of(stream=True) <= 2 * alone + 2 * 6
