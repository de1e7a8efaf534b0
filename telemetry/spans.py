"""Spans: OpenTelemetry spans, and NVTX ranges of the same names where the `nvtx` package is installed.

Each process calls `configure` once. Off is the default: then `span` hands out one shared object that does nothing.
Spans leave over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set, and as JSON lines when `telemetry.spans_file` is.
OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, OTEL_BSP_SCHEDULE_DELAY, ...) hold.

A parent is always named, never taken from the thread: requests share threads here, and await.
"""

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PREFIX = "OTEL_"
SCOPE = "trn-vision-serve"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

Context = Any
"""An OpenTelemetry context; None: the span begins a trace."""

Link = Any
"""An OpenTelemetry link."""

UNRECORDED: Context = object()
"""A parent whose children are not recorded, whatever the sampler says."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_tracer: Any = None
_provider: Any = None
_emit: Any = None
_nvtx: Any = None


def environment() -> dict[str, str]:
    """The variables of this process that every other process of the application needs."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def configure(process: str, file: str | None) -> None:
    """Turn spans on in this process, called `process` in them, if the environment or `file` asks for it."""
    global _tracer, _provider, _emit, _nvtx
    if importlib.util.find_spec("nvtx") is not None:
        import nvtx

        _nvtx = nvtx
    if file or os.environ.get(ENDPOINT):
        from telemetry.span_export import create_provider

        _provider, _emit = create_provider(process, file)
        _tracer = _provider.get_tracer(SCOPE)


def shutdown() -> None:
    """Send what is not sent yet and turn spans off."""
    global _tracer, _provider, _emit, _nvtx
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = _emit = _nvtx = None


def recording() -> bool:
    """Whether this process makes OpenTelemetry spans."""
    return _tracer is not None


def seen() -> bool:
    """Whether anybody sees spans or ranges of this process."""
    return _tracer is not None or _nvtx is not None


def emit(parent: Any, notes: Sequence[Any], links: Sequence[Link]) -> None:
    """Export the finished spans that `telemetry.span_notes` noted, the outermost inside the span context `parent`."""
    if _emit is not None:
        _emit(parent, notes, links)


def begin_range(name: str) -> Any:
    """An NVTX range, for `end_range`; None without NVTX."""
    return _nvtx.start_range(name) if _nvtx is not None else None


def mark_range(name: str) -> None:
    """An NVTX mark."""
    if _nvtx is not None:
        _nvtx.mark(name)


def end_range(nvtx_range: Any) -> None:
    if nvtx_range is not None:
        _nvtx.end_range(nvtx_range)


class Span:
    """An open span. `end` may be called again and does nothing then."""

    def __init__(self, name: str, parent: Context, links: Sequence[Any], attributes: Mapping[str, Any]) -> None:
        self._range = begin_range(name)
        self._otel: Any = None
        if _tracer is not None and parent is not UNRECORDED:
            from opentelemetry.context import Context as EmptyContext

            context = EmptyContext() if parent is None else parent
            self._otel = _tracer.start_span(name, context=context, links=links or None, attributes=attributes or None)

    @property
    def context(self) -> Context:
        """What makes another span this one's child; None without OpenTelemetry."""
        if self._otel is None:
            return None
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._otel)

    def set(self, attributes: Mapping[str, Any]) -> None:
        if self._otel is not None:
            self._otel.set_attributes(attributes)

    def fail(self, description: str) -> None:
        """Mark the span as an error."""
        if self._otel is not None:
            from opentelemetry.trace import StatusCode

            self._otel.set_status(StatusCode.ERROR, description)

    def end(self) -> None:
        if self._otel is not None:
            self._otel.end()
            self._otel = None
        end_range(self._range)
        self._range = None


def open_span(
    name: str, parent: Context, attributes: Mapping[str, Any] | None = None, links: Sequence[Any] = ()
) -> Span | None:
    """A span that the caller ends, where no block of code does; None when nobody would see it."""
    if not seen():
        return None
    return Span(name, parent, links, attributes or {})


def span(
    name: str, parent: Context, attributes: Mapping[str, Any] | None = None
) -> AbstractContextManager[Span | None]:
    """A span around a block of code, which may await."""
    if not seen():
        return _NOTHING
    return _around(Span(name, parent, (), attributes or {}))


@contextmanager
def _around(opened: Span) -> Iterator[Span]:
    try:
        yield opened
    except Exception as error:
        opened.fail(repr(error))
        raise
    finally:
        opened.end()


def mark(name: str, parent: Context, attributes: Mapping[str, Any]) -> None:
    """A span of no duration."""
    mark_range(name)
    if _tracer is not None and parent is not UNRECORDED:
        now = time.time_ns()
        _tracer.start_span(name, context=parent, attributes=attributes, start_time=now).end(now)


def context_of(headers: Mapping[str, str]) -> Context:
    """The context that W3C trace headers describe; None without OpenTelemetry or without them."""
    if _tracer is None or "traceparent" not in headers:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)


def headers_of(context: Context) -> dict[str, str]:
    """The W3C trace headers of a context."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context)
    return headers


def link_to(headers: Mapping[str, str]) -> Link | None:
    """A link to the span that W3C trace headers name; None when it is not recorded."""
    context = context_of(headers)
    if context is None:
        return None
    from opentelemetry.trace import Link, get_current_span

    span_context = get_current_span(context).get_span_context()
    return Link(span_context) if span_context.trace_flags.sampled else None
