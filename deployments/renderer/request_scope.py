"""RequestScope: what belongs to one client request from its arrival to its last token, beside its content."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.renderer.errors import APIError
from deployments.renderer.generation import Delta, close
from deployments.renderer.processor import ProcessedImage
from deployments.renderer.protocol import ChatCompletionRequest, CompletionRequest
from telemetry import spans

Body = ChatCompletionRequest | CompletionRequest

_MAX_ATTRIBUTE = 256
"""Characters of what a client wrote."""
_FINISH_REASONS = "gen_ai.response.finish_reasons"


@dataclass
class RequestScope:
    """Made when the request arrives, before anything is done for it."""

    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context for the engine: of this request's span, or what the client sent when no spans are made."""
    span: spans.Span | None = None
    """The root of the request's spans."""
    context: spans.Context = None
    arrival_time: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrival_clock: float = field(default_factory=time.perf_counter)
    mm_cache_queries: int = 0
    """Items looked up in the processor cache for it."""
    mm_cache_hits: int = 0
    images: dict[str, Callable[[], ProcessedImage]] = field(default_factory=dict)
    """mm_hash -> makes the image's pixels from its bytes, which are kept as long as they may be lost."""

    @classmethod
    def begin(cls, request_id: str, client_headers: Mapping[str, str], body: Body) -> "RequestScope":
        """Opens the root span, which continues the client's trace if it sent one."""
        operation = "chat" if request_id.startswith("chat") else "text_completion"
        span = spans.open_span("request", spans.context_of(client_headers))
        if span is None or not spans.recording():
            return cls(request_id, client_headers, span)
        span.set({"gen_ai.operation.name": operation, "gen_ai.response.id": request_id, **_asked(body)})
        return cls(request_id, spans.headers_of(span.context), span, span.context)

    def on_lookup(self, hit: bool, mm_hash: str) -> None:
        """An item was looked up in the processor cache."""
        self.mm_cache_queries += 1
        self.mm_cache_hits += hit
        spans.mark("mm: cache_lookup", self.context, {"result": "hit" if hit else "miss", "mm_hash": mm_hash})

    def fail(self, error: BaseException) -> None:
        """The request ends without an answer: it is refused, or failed, or its client has left (no error of ours)."""
        if self.span is None:
            return
        if isinstance(error, asyncio.CancelledError):
            self.span.set({_FINISH_REASONS: ["abort"]})
        else:
            self.span.set(_failure(error))
            self.span.fail(_why(error))
        self.span.end()

    def follow(
        self, deltas: AsyncGenerator[Delta, None], prompt_tokens: int, num_choices: int
    ) -> AsyncGenerator[Delta, None]:
        """The same deltas; the root span ends with them."""
        return deltas if self.span is None else _follow(self.span, deltas, prompt_tokens, num_choices)


async def _follow(
    span: spans.Span, deltas: AsyncGenerator[Delta, None], prompt_tokens: int, num_choices: int
) -> AsyncGenerator[Delta, None]:
    completion_tokens: dict[int, int] = {}
    reasons: dict[int, str] = {}
    unfinished = "abort"
    try:
        async for delta in deltas:
            completion_tokens[delta.index] = delta.completion_tokens
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
            yield delta
    except Exception as error:
        unfinished = "error"
        span.set(_failure(error))
        span.fail(_why(error))
        raise
    finally:
        span.set(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": sum(completion_tokens.values()),
                _FINISH_REASONS: [reasons.get(index, unfinished) for index in range(num_choices)],
            }
        )
        span.end()
        await close(deltas)


def _why(error: BaseException) -> str:
    """In words; what a client did wrong without what it wrote, which the message quotes."""
    if isinstance(error, APIError) and error.status < 500:
        return f"{error.code or error.status}: {error.param or 'the request'}"
    return str(error) or repr(error)


def _failure(error: BaseException) -> dict[str, Any]:
    """What went wrong, by OpenTelemetry's names."""
    if isinstance(error, APIError):
        return {"error.type": error.code or type(error).__name__, "http.response.status_code": error.status}
    return {"error.type": type(error).__name__, "http.response.status_code": 500}


def _asked(body: Body) -> dict[str, Any]:
    """What the request asks for, by OpenTelemetry's names for generative AI."""
    values = {
        "gen_ai.request.model": body.model and body.model[:_MAX_ATTRIBUTE],
        "gen_ai.request.max_tokens": body.limit,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.choice.count": body.n,
    }
    return {name: value for name, value in values.items() if value is not None}
