"""StepPlan: what one scheduling pass has decided so far, and the message made of it."""

from typing import Literal

from actors.messages import NewRequest, RunningRequest, SchedulerOutput
from configs.engine import SchedulerSettings
from deployments.scheduler.request import Request


class StepPlan:
    """Collects one step. Budgets shrink as work is added."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.phase: Literal["prefill", "decode"] = "prefill"
        self.scheduled: list[tuple[Request, int]] = []
        """(request, tokens), in execution order."""
        self.encoder_inputs: dict[str, list[int]] = {}
        self.token_budget = settings.max_num_batched_tokens
        self.encoder_closed = False
        """A request waits for encoder budget or cache space: no younger one may reserve any in this step."""
        self.preempted = False
        """A request was preempted: none is admitted in this step."""
        self._max_embeddings = self._embedding_budget = settings.max_encoder_embeddings_per_step

    def excludes(self, request: Request) -> bool:
        """Whether the request may not join: after two failed steps it is computed alone, to see if it is the reason."""
        return any(max(request.failed_steps, other.failed_steps) > 1 for other, _ in self.scheduled[:1])

    def may_encode(self, num_embeddings: int) -> bool:
        """Whether the compute budget allows it. An image above the whole budget goes alone."""
        return num_embeddings <= self._embedding_budget or not self.encoder_inputs

    def encode(self, request: Request, item_index: int) -> None:
        self.encoder_inputs.setdefault(request.request_id, []).append(item_index)
        self._embedding_budget = max(0, self._embedding_budget - request.mm_items[item_index].num_embeddings)

    def add(self, request: Request, num_tokens: int) -> None:
        self.scheduled.append((request, num_tokens))
        self.token_budget -= num_tokens

    def message(self, step_id: int, clock: float, freed: tuple[str, ...], finished: tuple[str, ...]) -> SchedulerOutput:
        """The step for every rank. What it tells about each request counts as sent."""
        new: list[NewRequest] = []
        running: list[RunningRequest] = []
        for request, _ in self.scheduled:
            if request.known_to_ranks:
                running.append(_changes(request))
            else:
                new.append(_introduction(request))
                request.known_to_ranks = True
            request.num_tokens_sent = len(request.token_ids)
            request.num_blocks_sent = len(request.block_ids)
        return SchedulerOutput(
            step_id=step_id,
            clock=clock,
            phase=self.phase if self.scheduled else "idle",
            new_requests=tuple(new),
            running_requests=tuple(running),
            num_scheduled_tokens={request.request_id: count for request, count in self.scheduled},
            num_prefill_tokens=sum(_prefill_tokens(request, count) for request, count in self.scheduled),
            scheduled_encoder_inputs={key: tuple(indices) for key, indices in self.encoder_inputs.items()},
            free_encoder_mm_hashes=freed,
            finished_request_ids=finished,
        )


def _introduction(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=tuple(request.block_ids),
        sampling=request.sampling,
        mm_items=request.mm_items,
        trace_context=request.source.trace_context,
    )


def _prefill_tokens(request: Request, num_tokens: int) -> int:
    """How many of the request's next tokens are prompt tokens."""
    return max(0, min(num_tokens, request.num_prompt_tokens - request.num_computed_tokens))


def _changes(request: Request) -> RunningRequest:
    return RunningRequest(
        request_id=request.request_id,
        new_token_ids=tuple(request.token_ids[request.num_tokens_sent :]),
        new_block_ids=tuple(request.block_ids[request.num_blocks_sent :]),
        num_computed_tokens=request.num_computed_tokens,
    )
