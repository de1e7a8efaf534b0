"""What the engine refuses before it queues: requests that could never be served, and those it has no room for now."""

from actors.messages import EngineRequest
from configs.engine import EngineConfig, SchedulerSettings
from deployments.scheduler.queue_rate import QueueRate
from deployments.scheduler.request import RequestError
from deployments.scheduler.request_queue import RequestQueue

_MAX_TOKEN_ID = 2**31 - 1


def check_servable(request: EngineRequest, config: EngineConfig) -> None:
    """Raises RequestError (400) naming what to change."""
    num_prompt_tokens = len(request.token_ids)
    if not num_prompt_tokens:
        raise RequestError("the prompt has no tokens", 400)
    if num_prompt_tokens + 1 > config.model.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and 1 must be left for the output: model.max_model_len = "
            f"{config.model.max_model_len}; shorten the prompt or raise that setting",
            400,
        )
    if min(request.token_ids) < 0 or max(request.token_ids) > _MAX_TOKEN_ID:
        raise RequestError(f"token ids must lie between 0 and {_MAX_TOKEN_ID}", 400)
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens = {request.sampling.max_tokens}: expected at least 1", 400)
    _check_images(request, config)


def check_room(
    request: EngineRequest, waiting: RequestQueue, rate: QueueRate, now: float, settings: SchedulerSettings
) -> None:
    """Raises RequestError (429, and when there will be room) when the queue is full. An empty one never is."""
    own = len(request.token_ids) + len(request.output_token_ids)
    requests = len(waiting) + 1 - settings.max_waiting_requests
    tokens = waiting.num_tokens + own - settings.max_waiting_tokens if waiting else 0
    if requests <= 0 and tokens <= 0:
        return
    if requests > 0:
        full = f"{len(waiting)} requests are waiting: scheduler.max_waiting_requests = {settings.max_waiting_requests}"
    else:
        full = (
            f"requests of {waiting.num_tokens} tokens are waiting and this one has {own}: "
            f"scheduler.max_waiting_tokens = {settings.max_waiting_tokens}"
        )
    raise RequestError(full, 429, rate.retry_after(now, requests, tokens, own))


def _check_images(request: EngineRequest, config: EngineConfig) -> None:
    settings = config.encoder_cache
    usable = settings.num_blocks - 1
    end = 0
    for index, item in enumerate(request.mm_items):
        if item.length < 1 or item.num_embeddings < 1 or item.offset < end:
            raise RequestError(f"image {index}: placeholder ranges must be non-empty, in order and disjoint", 400)
        end = item.offset + item.length
        if end > len(request.token_ids):
            raise RequestError(f"image {index}: its placeholder range ends at {end}, behind the prompt", 400)
        needed = -(-item.num_embeddings // settings.block_size)
        if needed > usable:
            raise RequestError(
                f"image {index} has {item.num_embeddings} embeddings and needs {needed} encoder cache blocks of "
                f"{settings.block_size}, but there are {usable}: send a smaller image, or raise "
                f"encoder_cache.num_blocks above {needed}",
                400,
            )
