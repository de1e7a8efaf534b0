"""One engine request, whatever becomes of the engines: it goes on behind the tokens that are here already.

An engine that is lost, or stops, costs a pause: the request is sent again with its output so far. Images whose pixels
are lost are made anew. Sampling is a function of (seed, position), so the output is the same.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from actors.messages import EngineOutput, EngineRequest
from deployments.renderer.closing import close
from deployments.renderer.engine_client import EngineClient, EngineLostError

logger = logging.getLogger("trn_vision_serve")

Renew = Callable[[str, Any], Awaitable[Any]]
"""(mm_hash, the reference that leads to nothing) -> a new reference to the pixels of that image of the request."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


async def follow(
    engine: EngineClient, request: EngineRequest, wait_s: float, renew: Renew | None = None
) -> AsyncGenerator[EngineOutput, None]:
    """The request's outputs. Closing it aborts the request.

    Raises EngineUnavailableError when for `wait_s` seconds no engine has got any further with it.
    """
    token_ids: list[int] = []
    pixels = dict(request.pixels)
    lost_since: float | None = None
    pause = FIRST_PAUSE_S
    for attempt in itertools.count():
        outputs = engine.generate(_behind(request, token_ids, pixels, attempt))
        began_with = len(token_ids)
        try:
            async for output in outputs:
                if output.lost_mm_hashes and renew is not None:
                    for mm_hash in output.lost_mm_hashes:
                        pixels[mm_hash] = await renew(mm_hash, pixels[mm_hash])
                if output.finish_reason == "error" and output.error_status == 503:
                    raise EngineLostError(output.error or "the engine stopped")
                lost_since, pause = None, FIRST_PAUSE_S
                token_ids += output.token_ids
                # Its prompt is cached as the first engine has said; what this one found of it is another thing.
                yield msgspec.structs.replace(output, num_cached_tokens=0) if began_with else output
                if output.finish_reason is not None:
                    return
            raise EngineLostError("the engine ended the request without finishing it")
        except EngineLostError as error:
            now = time.monotonic()
            lost_since = lost_since or now
            if now - lost_since >= wait_s:
                raise
            logger.warning("%s: sent again behind %d tokens: %s", request.request_id, len(token_ids), error)
        finally:
            await close(outputs)
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 2 * pause)


def _behind(request: EngineRequest, token_ids: list[int], pixels: dict[str, Any], attempt: int) -> EngineRequest:
    """The request as it is sent for the `attempt`-th time, to go on behind `token_ids`."""
    if not attempt:
        return request
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}~{attempt}",  # the engine before may live, and know the old one still
        output_token_ids=tuple(token_ids),
        pixels=dict(pixels),
        mm_cache_queries=0,
        mm_cache_hits=0,
    )
