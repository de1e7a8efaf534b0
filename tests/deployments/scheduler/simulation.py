"""A gang of one simulated rank, and a simulation that drives a Scheduler over it and checks everything after each step.

The rank's KV slots hold digests of the whole prefix, image rows included, that each token was computed from; its next
token is a function of the last digest. So a wrong block, image, row or prefix hit ends in a wrong output.
"""

from typing import Any

from blake3 import blake3

from actors.messages import EngineOutput, EngineRequest, MMItem, SamplingParams, SchedulerOutput, TokenLogprobs
from configs.engine import EngineConfig, parse_config
from deployments.scheduler.scheduler import Scheduler
from neuron.encoder_cache_blocks import EncoderCacheBlocks

STOP_TOKEN = 0
VOCABULARY = 9
IMAGE_TOKEN = 100


def make_config(**overrides: Any) -> EngineConfig:
    """A small engine; `section__key=value` overrides."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"max_model_len": 64},
        "kv_cache": {"block_size": 4, "num_blocks": 64},
        "encoder_cache": {"block_size": 4, "num_blocks": 9},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_encoder_embeddings_per_step": 64},
    }
    for name, value in overrides.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    return parse_config(tree)


def make_request(request_id: str, *parts: int | tuple[str, int], max_tokens: int = 4, **fields: Any) -> EngineRequest:
    """A prompt of parts: an int is a text token, ("hash", n) an image of n tokens."""
    tokens: list[int] = []
    items: list[MMItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        mm_hash, length = part
        items.append(
            MMItem(mm_hash=mm_hash, offset=len(tokens), length=length, num_embeddings=length, grid=(1, 2, 2 * length))
        )
        tokens += [IMAGE_TOKEN] * length
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))
    return EngineRequest(
        request_id=request_id,
        token_ids=tuple(tokens),
        mm_items=tuple(items),
        sampling=sampling,
        arrival_time=0.0,
        **fields,
    )


def text(length: int, first: int = 1) -> list[int]:
    """`length` text tokens."""
    return [first + index % 7 for index in range(length)]


def extend_digest(parent: bytes, token: int, row: tuple[str, int] | None) -> bytes:
    """Digest of a prefix that ends with `token`, at which the embedding `row` of an image stands."""
    return blake3(parent + repr((token, row)).encode()).digest(8)


def next_token(digest: bytes) -> int:
    """The fake model's output: often a stop token, and few others, so that outputs are shared."""
    return int.from_bytes(digest[:4], "little") % VOCABULARY


def image_row(items: tuple[MMItem, ...], position: int) -> tuple[str, int] | None:
    for item in items:
        if item.offset <= position < item.offset + item.length:
            return item.mm_hash, position - item.offset
    return None


def reference_output(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """What the fake model answers when it runs alone: the new tokens and the finish reason."""
    tokens = [*request.token_ids, *request.output_token_ids]
    digest = b""
    for position, token in enumerate(tokens):
        digest = extend_digest(digest, token, image_row(request.mm_items, position))
    output: list[int] = []
    while True:
        out = len(tokens) - len(request.token_ids)
        if out >= request.sampling.max_tokens or len(tokens) >= max_model_len:
            return output, "length"
        token = next_token(digest)
        if token in request.sampling.stop_token_ids and out >= request.sampling.min_tokens:
            return output, "stop"
        tokens.append(token)
        output.append(token)
        digest = extend_digest(digest, token, None)


class FakeRank:
    """Applies SchedulerOutputs as a rank does, refusing whatever a rank could not do."""

    def __init__(self, config: EngineConfig) -> None:
        cache = config.encoder_cache
        self.config = config
        self.blocks = EncoderCacheBlocks(cache.num_blocks, cache.block_size, cache.min_hold_time_ms)
        self.rows: dict[int, tuple[str, int]] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.items: dict[str, tuple[MMItem, ...]] = {}
        self.num_encoded = 0
        self.num_evicted_blocks = 0
        self.clock = 0.0

    def run(self, output: SchedulerOutput) -> dict[str, TokenLogprobs]:
        assert output.clock >= self.clock, "the step's clock went backwards"
        self.clock = output.clock
        self._forget(output)
        self._evict(output)
        computed = self._learn(output)
        self._encode(output)
        self._check_phase(output, computed)
        written: set[tuple[int, int]] = set()
        return {
            request_id: token
            for request_id, count in output.num_scheduled_tokens.items()
            if (token := self._compute(request_id, computed[request_id], count, written)) is not None
        }

    def _forget(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:
            del self.tokens[request_id], self.tables[request_id], self.items[request_id]

    def _evict(self, output: SchedulerOutput) -> None:
        self.blocks.advance(output.clock)
        for mm_hash in output.free_encoder_mm_hashes:
            self.num_evicted_blocks += self.blocks.free(mm_hash, output.clock)

    def _learn(self, output: SchedulerOutput) -> dict[str, int]:
        computed = {}
        for new in output.new_requests:
            assert new.request_id not in self.tokens, "a request that the ranks know was introduced again"
            self.tokens[new.request_id] = list(new.token_ids)
            self.tables[new.request_id] = list(new.block_ids)
            self.items[new.request_id] = new.mm_items
            computed[new.request_id] = new.num_computed_tokens
        for running in output.running_requests:
            self.tokens[running.request_id] += running.new_token_ids
            self.tables[running.request_id] += running.new_block_ids
            computed[running.request_id] = running.num_computed_tokens
        assert list(output.num_scheduled_tokens) == sorted(computed, key=list(output.num_scheduled_tokens).index)
        return computed

    def _encode(self, output: SchedulerOutput) -> None:
        step_hashes = []
        embeddings = 0
        for request_id, indices in output.scheduled_encoder_inputs.items():
            assert request_id in output.num_scheduled_tokens
            for index in indices:
                item = self.items[request_id][index]
                assert not self.blocks.contains(item.mm_hash), "an image was encoded that is here already"
                self.blocks.allocate(item.mm_hash, item.num_embeddings)
                self.blocks.mark_written(item.mm_hash, output.clock)
                for embedding, row in enumerate(self.blocks.rows(item.mm_hash)):
                    self.rows[row] = (item.mm_hash, embedding)
                step_hashes.append(item.mm_hash)
                embeddings += item.num_embeddings
        assert len(step_hashes) == len(set(step_hashes))
        assert not set(step_hashes) & set(output.free_encoder_mm_hashes) or self.reset_allowed
        budget = self.config.scheduler.max_encoder_embeddings_per_step
        assert embeddings <= budget or len(step_hashes) == 1, "more encoding than the budget of a step"
        self.num_encoded += len(step_hashes)
        self.blocks.check_integrity()

    reset_allowed = False
    """After reset_encoder_cache an image may be freed and encoded in one step."""

    def _check_phase(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        counts = output.num_scheduled_tokens
        assert all(count > 0 for count in counts.values())
        assert len(counts) <= self.config.scheduler.max_num_seqs
        if output.phase == "prefill":
            assert 0 < output.total_num_scheduled_tokens <= self.config.scheduler.max_num_batched_tokens
        elif output.phase == "decode":
            assert set(counts.values()) == {1}
            assert not output.new_requests
            assert all(len(self.tokens[request_id]) == computed[request_id] + 1 for request_id in counts)
        else:
            assert not counts

    def _compute(
        self, request_id: str, computed: int, count: int, written: set[tuple[int, int]]
    ) -> TokenLogprobs | None:
        tokens, table, items = self.tokens[request_id], self.tables[request_id], self.items[request_id]
        size = self.config.kv_cache.block_size
        assert computed + count <= len(tokens), "tokens are scheduled that the rank does not know"
        assert len(table) * size >= computed + count, "tokens are scheduled without a KV block"
        assert all(0 <= block < self.config.kv_cache.num_blocks for block in table)
        digest = b""
        for position in range(computed + count):
            row = image_row(items, position)
            digest = extend_digest(digest, tokens[position], row)
            slot = (table[position // size], position % size)
            if position < computed:
                assert self.kv.get(slot) == digest, f"{request_id}: KV of token {position} is not its own"
                continue
            if row is not None:
                item = next(item for item in items if item.mm_hash == row[0])
                assert self.blocks.contains(row[0]), f"{request_id}: image {row[0]} is not on the rank"
                assert self.rows[self.blocks.rows(item.mm_hash)[row[1]]] == row, "an embedding was overwritten"
            assert slot not in written, "two requests write one KV slot"
            written.add(slot)
            self.kv[slot] = digest
        if computed + count < len(tokens):
            return None
        return TokenLogprobs(token_id=next_token(digest), logprob=-1.0)


class Simulation:
    """Requests, time and one rank. `step` checks all invariants; `drain` runs everything to its end."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.rank = FakeRank(config)
        self.now = 0.0
        self.sources: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.steps: list[SchedulerOutput] = []

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add_request(request)
        self.sources[request.request_id] = request
        self.outputs[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self.scheduler.abort_request(request_id)
        del self.sources[request_id]

    def reset_encoder_cache(self) -> None:
        self.rank.reset_allowed = True
        self.scheduler.reset_encoder_cache()

    def recover(self) -> None:
        self.scheduler.recover()
        reset_allowed = self.rank.reset_allowed
        self.rank = FakeRank(self.config)
        self.rank.reset_allowed = reset_allowed

    def step(self, seconds: float = 0.001) -> SchedulerOutput | None:
        self.now += seconds
        output = self.scheduler.schedule(self.now)
        self.check()
        if output is not None:
            self.finish_step(output)
        return output

    def finish_step(self, output: SchedulerOutput) -> None:
        self.steps.append(output)
        sampled = self.rank.run(output)
        self.check_agreement()
        for result in self.scheduler.update_from_output(output, sampled):
            if result.request_id in self.outputs:
                self.outputs[result.request_id].append(result)
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_agreement(self) -> None:
        """Scheduler and rank agree on the encoder cache, after the rank applied the step."""
        manager, blocks = self.scheduler.encoder_cache, self.rank.blocks
        assert {*manager.cached, *manager.freed} == set(blocks.slot_map)
        assert blocks.num_active_blocks + blocks.num_free_blocks + blocks.num_held_blocks == blocks.num_blocks - 1
        if manager.freed:
            return  # a reset came while the step ran: the rank hears of it at the next one
        assert manager.num_free_blocks == blocks.num_free_blocks
        assert manager.num_held_blocks == blocks.num_held_blocks
        assert manager.num_active_blocks == blocks.num_active_blocks
        assert manager.next_release() == blocks.next_release()

    def drain(self, max_steps: int = 20_000) -> None:
        """Run until nothing is left to do or tell, and check every answer."""
        for _ in range(max_steps):
            if self.step() is not None:
                continue
            wakeup = self.scheduler.next_wakeup()
            if wakeup is None:
                assert not self.scheduler.has_unfinished_requests(), "stalled: nothing to run, nothing to wait for"
                break
            assert wakeup > self.now, "woken for nothing"
            self.now = wakeup - 0.001
        else:
            raise AssertionError(f"not finished after {max_steps} steps")
        assert not self.rank.blocks.num_held_blocks
        assert not self.rank.tokens, "the rank still knows a finished request"
        assert self.scheduler.kv.usage == 0
        self.check_answers()

    def check_answers(self) -> None:
        for request_id, source in self.sources.items():
            tokens, reason = reference_output(source, self.config.model.max_model_len)
            assert self.tokens(request_id) == tokens, request_id
            assert self.outputs[request_id][-1].finish_reason == reason
            assert [output.finish_reason for output in self.outputs[request_id][:-1]] == [None] * (
                len(self.outputs[request_id]) - 1
            )

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]
