"""Which images a chunk of prefill brings along, and where the chunk is cut when one of them has to wait."""

from deployments.scheduler.encoder_cache_manager import EncoderCacheManager
from deployments.scheduler.request import Request
from deployments.scheduler.step_plan import StepPlan


def reserve_images(request: Request, start: int, num_tokens: int, plan: StepPlan, cache: EncoderCacheManager) -> int:
    """Reserve the images that overlap tokens [start, start + num_tokens); returns how many tokens can be computed.

    An image is looked up once per computation of the request: while its tokens are computed, over however many
    chunks, the request references it. `request.next_item` moves on with each image reserved. An image that has to wait
    cuts the chunk before it, down to 0 tokens, and closes the encoder cache to younger requests for this step:
    otherwise they could take what it waits for, step after step.

    Requests are visited oldest first, and an image that is being computed needs no more space, so whoever is in the
    way gets out of it: no order of images and requests ends in a deadlock.
    """
    end = start + num_tokens
    while request.next_item < len(request.mm_items):
        item = request.mm_items[request.next_item]
        if item.offset >= end:
            break
        if not _reserve(request, plan, cache):
            plan.encoder_closed = True
            return max(0, item.offset - start)
        request.next_item += 1
    return num_tokens


def _reserve(request: Request, plan: StepPlan, cache: EncoderCacheManager) -> bool:
    """Reserve the request's next image, encoding it in this step unless it is cached."""
    index = request.next_item
    if plan.encoder_closed:
        _give_way(request, cache)
        return False
    if cache.check_and_update_cache(request, index):
        return True
    if not plan.may_encode(request.mm_items[index].num_embeddings):
        _give_way(request, cache)
        return False
    if not cache.can_allocate(request, index):
        _give_way(request, cache)
        if not cache.can_allocate(request, index):
            return False
    cache.allocate(request, index)
    plan.encode(request, index)
    return True


def _give_way(request: Request, cache: EncoderCacheManager) -> None:
    """Release the images that the request keeps only because they occur again further on."""
    computing = request.mm_items[request.first_open_item : request.next_item]
    cache.release_unneeded(request, {item.mm_hash for item in computing})
