"""Scheduler: which tokens run in each step, which images are encoded for them, and what is evicted. Plain Python."""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from actors.messages import EngineOutput, EngineRequest, SchedulerOutput, TokenLogprobs
from configs.engine import EngineConfig
from deployments.scheduler.admission import check_room, check_servable
from deployments.scheduler.encoder_cache_manager import EncoderCacheManager, EncoderCacheStats
from deployments.scheduler.image_reservation import reserve_images
from deployments.scheduler.kv_cache_manager import KVCacheManager
from deployments.scheduler.queue_rate import QueueRate
from deployments.scheduler.request import Request, RequestError, RequestStatus
from deployments.scheduler.request_queue import RequestQueue
from deployments.scheduler.step_plan import StepPlan

MAX_FAILED_STEPS = 3
"""A request with which the gang failed so often in a row is given up: everyone else would wait for ever."""
MAX_OVERTAKEN = 32
"""Waiting requests that others may pass in one step while they wait for the encoder cache."""


@dataclass
class SchedulerStats:
    """Counts since the last `take_stats`, and the state at that moment."""

    prefix_queries: int
    """Tokens."""
    prefix_hits: int
    """Tokens."""
    num_preemptions: int
    prompt_tokens: int
    """Of the requests that got their first token."""
    prompt_tokens_cached: int
    generation_tokens: int
    encoder: EncoderCacheStats
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""


@dataclass(frozen=True)
class Lost:
    """What a restart of the gang costs."""

    num_requests: int
    """Running ones, to be computed again."""
    num_tokens: int
    """Of theirs whose KV went with the ranks."""
    given_up: tuple[EngineOutput, ...]
    """The last outputs of requests that are not tried again."""


class Scheduler:
    """Runs many requests over one gang, one step in flight at a time.

    Loop: `schedule`, run the step on the ranks, `update_from_output`. Requests are served in order of arrival, and the
    oldest one can always make progress: younger ones are preempted for its KV blocks and give way to its images.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(config.kv_cache)
        cache = config.encoder_cache
        self.encoder_cache = EncoderCacheManager(cache.num_blocks, cache.block_size, cache.min_hold_time_ms)
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.waiting = RequestQueue()
        self.queue_rate = QueueRate()
        self.running: list[Request] = []
        """In order of arrival: the last is the youngest."""
        self.clock = 0.0
        self._num_arrived = 0
        self._num_preemptions = 0
        self._prompt_tokens = self._prompt_tokens_cached = self._generation_tokens = 0
        self._step_id = 0
        self._last_phase: str | None = None
        self._in_flight: StepPlan | None = None
        self._finished_ids: list[str] = []
        """To be forgotten by the ranks at the next step."""
        self._blocks_released = False
        """Held blocks became free since the ranks last heard the clock."""
        self._encoder_waiting = False
        """In the last pass some request waited for the encoder cache."""
        self._outputs: list[EngineOutput] = []
        """Of requests that finished without a step."""

    # Requests

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request. Raises RequestError: 400 when it can never be served, 429 when the queue is full."""
        check_servable(source, self.config)
        if source.request_id in self.requests:
            raise RequestError(f"request id {source.request_id} is in use", 400)
        check_room(source, self.waiting, self.queue_rate, self.clock, self.config.scheduler)
        self._num_arrived += 1
        request = Request(source, self._num_arrived, self.config.model.max_model_len)
        if self.config.debug.check_invariants:
            request.check_block_hashes(self.kv.block_size)
        if request.length_reached():
            # Another engine gave it its last token, and only the word that it was the last got lost.
            self._outputs.append(EngineOutput(request_id=request.request_id, finish_reason="length"))
            return
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort_request(self, request_id: str) -> bool:
        """Forget a request and free what it holds; False when it is not known (any more). It gets no output."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._release(request)
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # Steps

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to tell the ranks.

        A step is prefill or decode; while there is work of both kinds they alternate. `now`, in seconds, becomes the
        step's clock; a clock that runs backwards stands still here.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._step_id} is in flight: update_from_output or recover comes first")
        self.clock = max(self.clock, now)
        self._blocks_released |= self.encoder_cache.advance(self.clock) > 0

        plan = StepPlan(self.config.scheduler)
        if self._last_phase == "prefill":
            self._plan_decode(plan)
        if not plan.scheduled:
            self._plan_prefill(plan)
        if not plan.scheduled:
            self._plan_decode(plan)
        self._encoder_waiting = plan.encoder_closed
        self.queue_rate.on_pass(self.clock, len(self.waiting))

        if not plan.scheduled and not self._something_to_tell():
            return None
        if plan.scheduled:
            self._in_flight = plan
            self._last_phase = plan.phase
        self._step_id += 1
        self._blocks_released = False
        finished, self._finished_ids = tuple(self._finished_ids), []
        return plan.message(self._step_id, self.clock, self.encoder_cache.get_freed_mm_hashes(), finished)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, sampled: Mapping[str, TokenLogprobs]
    ) -> list[EngineOutput]:
        """The step is done: take its tokens, make its blocks findable, release its images, finish what ends.

        `sampled` has a token for each request whose last known token was computed.
        """
        outputs, self._outputs = self._outputs, []
        plan, self._in_flight = self._in_flight, None
        if plan is None:
            return outputs
        if scheduler_output.step_id != self._step_id:
            raise ValueError(f"output of step {scheduler_output.step_id}, but step {self._step_id} is in flight")
        for request, num_tokens in plan.scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request.num_computed_tokens += num_tokens
            self.kv.register_computed(request)
            self._release_computed_images(request)
            if request.num_computed_tokens == request.num_tokens:
                outputs.append(self._take_token(request, sampled[request.request_id]))
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return outputs

    def next_wakeup(self) -> float | None:
        """Clock at which `schedule` will have something to send although no request arrives; None: not before one does.

        Covers what the ranks have not been told yet, and hold windows: their end changes the occupancy that the ranks
        report, and lets requests go on that wait for encoder cache space.
        """
        if self._something_to_tell():
            return self.clock
        times = [self.encoder_cache.next_release()]
        if self._encoder_waiting:
            times.append(self.encoder_cache.next_freeable())
        return min((time for time in times if time is not None), default=None)

    # Caches

    def reset_prefix_cache(self) -> None:
        """Forget every computed prefix; running requests go on."""
        self.kv.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Free every image that no running request needs; the ranks are told at the next step."""
        self.encoder_cache.free_unreferenced()

    def forget_image(self, mm_hash: str) -> list[str]:
        """End the requests that need an image which the step in flight cannot encode; returns their ids.

        What the step stores for it is freed at the next one, and nothing that was computed with it is findable.
        """
        request_ids = [request.request_id for request in self.running if mm_hash in request.encoder_refs]
        for request_id in request_ids:
            self.abort_request(request_id)
        self.encoder_cache.discard(mm_hash)
        return request_ids

    def recover(self) -> Lost:
        """The gang was lost with its caches: compute every running request again from its tokens so far.

        The step in flight is lost: it may be one of its requests that made the gang fail. Metrics count nothing twice.
        """
        given_up = []
        for request, _ in self._in_flight.scheduled if self._in_flight else ():
            request.failed_steps += 1
            if request.failed_steps >= MAX_FAILED_STEPS and self.abort_request(request.request_id):
                error = f"the engine failed {MAX_FAILED_STEPS} times while it computed this request"
                given_up.append(EngineOutput(request_id=request.request_id, finish_reason="error", error=error))
        num_tokens = sum(request.num_computed_tokens for request in self.running)
        lost = Lost(len(self.running), num_tokens, tuple(given_up))
        for request in reversed(self.running):
            request.forget_computation()
            self.waiting.put_back(request)
        self.running = []
        self.kv.reset()
        self.encoder_cache.reset()
        self._in_flight = None
        self._last_phase = None
        self._finished_ids = []
        self._blocks_released = False
        self._encoder_waiting = False
        return lost

    # What metrics and tests read

    def take_stats(self) -> SchedulerStats:
        """Counts since the last call."""
        stats = SchedulerStats(
            prefix_queries=self.kv.prefix_queries,
            prefix_hits=self.kv.prefix_hits,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
            encoder=self.encoder_cache.take_stats(),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_usage=self.kv.usage,
        )
        self.kv.prefix_queries = self.kv.prefix_hits = self._num_preemptions = 0
        self._prompt_tokens = self._prompt_tokens_cached = self._generation_tokens = 0
        return stats

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself."""
        self.kv.pool.check_integrity([request.block_ids for request in self.running])
        self.encoder_cache.check_integrity(self.running)
        waiting = list(self.waiting)
        for group, status in ((self.running, RequestStatus.RUNNING), (waiting, RequestStatus.WAITING)):
            order = [request.sequence for request in group]
            assert order == sorted(set(order)), f"{status}: not in order of arrival"
            assert all(request.status is status for request in group)
        assert {request.request_id for request in (*self.running, *waiting)} == set(self.requests)
        assert len(self.running) <= self.config.scheduler.max_num_seqs
        for request in self.running:
            assert request.num_computed_tokens < request.num_tokens
            assert request.num_computed_tokens <= len(request.block_ids) * self.kv.block_size
        for request in waiting:
            assert not request.block_ids
            assert not request.encoder_refs
        assert self.waiting.num_tokens == sum(request.num_tokens for request in waiting)

    # One pass

    def _plan_decode(self, plan: StepPlan) -> None:
        """One token for every request that is fully prefilled."""
        plan.phase = "decode"
        for request in self._running_oldest_first():
            if not request.is_prefilling and self._make_room(request, request.num_tokens, plan):
                plan.add(request, 1)

    def _plan_prefill(self, plan: StepPlan) -> None:
        """Remaining chunks of running requests, then waiting requests."""
        plan.phase = "prefill"
        for request in self._running_oldest_first():
            if not request.is_prefilling or plan.excludes(request):
                continue
            start = request.num_computed_tokens
            num_tokens = min(request.prefill_end - start, plan.token_budget)
            if not num_tokens:
                break
            if self._make_room(request, start + num_tokens, plan):
                num_tokens = reserve_images(request, start, num_tokens, plan, self.encoder_cache)
                if num_tokens:
                    plan.add(request, num_tokens)
        if not plan.preempted:
            self._admit_waiting(plan)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Start waiting requests in order of arrival, as far as KV blocks, sequences and the token budget go.

        One that waits for the encoder cache may be passed by those behind it that need no image computed.
        A request starts only if all its tokens fit beside what running ones are about to need, lest it is preempted
        at once.
        """
        free_seqs = self.config.scheduler.max_num_seqs - len(self.running)
        reserved = sum(self._blocks_ahead(request) for request in self.running) if free_seqs and self.waiting else 0
        overtaken = 0
        for request in list(islice(self.waiting, free_seqs + MAX_OVERTAKEN)):
            if not free_seqs or not plan.token_budget or overtaken > MAX_OVERTAKEN or plan.excludes(request):
                break
            if self.kv.would_refuse(request):
                break
            prefix = self.kv.find_prefix(request)
            start = len(prefix) * self.kv.block_size
            request.first_open_item = request.next_item = request.first_item_after(start)
            if plan.encoder_closed and request.next_item < len(request.mm_items):
                overtaken += 1
                continue
            if not self.kv.can_admit(request, prefix, reserved):
                break
            num_tokens = min(request.num_tokens - start, plan.token_budget)
            num_tokens = reserve_images(request, start, num_tokens, plan, self.encoder_cache)
            if not num_tokens:
                overtaken += 1
                continue
            self._start(request, prefix, start + num_tokens)
            plan.add(request, num_tokens)
            reserved += self._blocks_ahead(request)
            free_seqs -= 1

    def _start(self, request: Request, prefix: list[int], num_tokens: int) -> None:
        if not request.prefix_counted:
            self.queue_rate.on_start(self.clock, request.num_tokens)
        self.kv.admit(request, prefix)
        self.kv.allocate(request, num_tokens)
        self.waiting.remove(request)
        insort(self.running, request, key=lambda running: running.sequence)
        request.status = RequestStatus.RUNNING
        request.prefill_end = request.num_tokens

    def _running_oldest_first(self) -> Iterator[Request]:
        """Running requests; those that are preempted meanwhile, always the youngest, are left out."""
        index = 0
        while index < len(self.running):
            yield self.running[index]
            index += 1

    def _blocks_ahead(self, request: Request) -> int:
        """KV blocks that a running request will soon take: for the tokens it knows, at least one."""
        return max(1, self.kv.num_missing_blocks(request, request.num_tokens))

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Give a running request KV blocks for `num_tokens` tokens, preempting from the youngest on.

        False when that meant to preempt the request itself.
        """
        while not self.kv.allocate(request, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted = True
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        self.encoder_cache.free(request)
        request.forget_computation()
        self.waiting.put_back(request)
        self._finished_ids.append(request.request_id)
        self._num_preemptions += 1

    # After a step

    def _release_computed_images(self, request: Request) -> None:
        while request.first_open_item < request.next_item:
            item = request.mm_items[request.first_open_item]
            if item.offset + item.length > request.num_computed_tokens:
                break
            self.encoder_cache.free_encoder_input(request, request.first_open_item)
            request.first_open_item += 1

    def _take_token(self, request: Request, token: TokenLogprobs) -> EngineOutput:
        """Append a sampled token; the request is released when its output ends."""
        finish = request.append(token.token_id)
        request.failed_steps = 0
        emitted = finish is None or finish.token_emitted
        num_cached_tokens = 0 if request.cached_tokens_told else request.num_cached_tokens
        self._generation_tokens += 1
        if not request.cached_tokens_told:
            self._prompt_tokens += request.num_prompt_tokens
            self._prompt_tokens_cached += request.num_cached_tokens
            request.cached_tokens_told = True
        if finish is not None:
            self._release(request)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=(token.token_id,) if emitted else (),
            logprobs=(token,) if emitted and request.sampling.logprobs is not None else (),
            finish_reason=None if finish is None else finish.reason,
            stop_token_id=None if emitted else token.token_id,
            num_cached_tokens=num_cached_tokens,
        )

    def _release(self, request: Request) -> None:
        """End a request's life here; the caller takes it off its list."""
        self.kv.free(request)
        self.encoder_cache.free(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        if request.known_to_ranks:
            self._finished_ids.append(request.request_id)

    def _something_to_tell(self) -> bool:
        return bool(self._blocks_released or self._finished_ids or self.encoder_cache.freed or self._outputs)
