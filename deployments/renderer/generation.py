"""Runs the engine requests of one client request and gives what they say as deltas of text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from actors.messages import EngineOutput, EngineRequest, TokenLogprobs
from deployments.renderer.closing import close
from deployments.renderer.continuation import Renew, follow
from deployments.renderer.detokenizer import Detokenizer
from deployments.renderer.engine_client import EngineClient, EngineUnavailableError
from deployments.renderer.errors import APIError
from deployments.renderer.request_metrics import RequestMetrics


@dataclass(frozen=True)
class Choice:
    """One sequence of the answer."""

    index: int
    request: EngineRequest
    detokenizer: Detokenizer
    metrics: RequestMetrics
    renew: Renew | None = None
    """Makes the pixels of one of its images anew."""


@dataclass
class Delta:
    """What is new of one choice. The first of a choice may be empty: the engine has taken the request."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of the tokens in `logprobs`: characters of the output before each."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string, or the stop token unless that is the model's own end of sequence."""
    completion_tokens: int = 0
    """Of the choice until now, with the token that ended it."""
    cached_tokens: int = 0
    """Of the choice's prompt."""


async def run(
    engine: EngineClient, choices: Sequence[Choice], eos_token_ids: Sequence[int], wait_s: float = 0.0
) -> AsyncGenerator[Delta, None]:
    """Deltas of all choices as they come. Closing it, or an error in one choice, aborts every engine request.

    Nothing is read from the engine ahead of who reads here. A choice whose engine is lost goes on with another, or
    fails when there is none for `wait_s` seconds. Raises APIError.
    """
    streams = [_run_choice(engine, choice, eos_token_ids, wait_s) for choice in choices]
    if len(streams) == 1:
        try:
            async for delta in streams[0]:
                yield delta
        finally:
            await close(streams[0])
        return
    pending = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = pending.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(stream))] = stream
                yield delta
    finally:
        for task in pending:
            task.cancel()
        await close(*streams, after=list(pending))


async def _run_choice(
    engine: EngineClient, choice: Choice, eos_token_ids: Sequence[int], wait_s: float
) -> AsyncGenerator[Delta, None]:
    outputs = follow(engine, choice.request, wait_s, choice.renew)
    first = True
    try:
        async for output in outputs:
            choice.metrics.on_tokens(len(output.token_ids) + (output.stop_token_id is not None))
            delta = _to_delta(choice, output, eos_token_ids)
            if delta.finish_reason is not None:
                choice.metrics.on_end(delta.finish_reason, delta.completion_tokens)
            if first or delta.text or delta.logprobs or delta.finish_reason:
                yield delta
            first = False
            if delta.finish_reason is not None:
                return
    except EngineUnavailableError as error:
        choice.metrics.on_end("error")
        raise APIError(str(error), status=503, code="engine_unavailable", retry_after=error.retry_after) from error
    except Exception:
        choice.metrics.on_end("error")
        raise
    finally:  # who reads here, the client, has left
        choice.metrics.on_end("abort")
        await close(outputs)


def _to_delta(choice: Choice, output: EngineOutput, eos_token_ids: Sequence[int]) -> Delta:
    if output.finish_reason == "error":
        raise _engine_error(output)
    detokenizer, delta = choice.detokenizer, Delta(choice.index, cached_tokens=output.num_cached_tokens)
    for position, token_id in enumerate(output.token_ids):
        if position < len(output.logprobs):
            delta.logprobs.append(output.logprobs[position])
            delta.offsets.append(detokenizer.num_characters)
        piece = detokenizer.add(token_id)
        delta.text += piece.text
        if piece.stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", piece.stop
            break
    delta.completion_tokens = detokenizer.num_tokens
    if delta.finish_reason is None and output.finish_reason is not None:
        piece = detokenizer.flush()
        delta.text += piece.text
        delta.finish_reason = output.finish_reason if piece.stop is None else "stop"
        delta.stop_reason = piece.stop
        if output.stop_token_id is not None:
            delta.completion_tokens += 1
            if piece.stop is None and output.stop_token_id not in eos_token_ids:
                delta.stop_reason = output.stop_token_id
    return delta


def _engine_error(output: EngineOutput) -> APIError:
    codes = {400: "invalid_value", 429: "engine_full", 503: "engine_unavailable"}
    status = output.error_status
    message, code = output.error or "the engine failed", codes.get(status, "engine_error")
    return APIError(message, status=status, code=code, retry_after=output.retry_after_s)
