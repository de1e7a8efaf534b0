"""Where OpenTelemetry spans go: an OTLP endpoint, a file of JSON lines, or both. Imported only when spans are on."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry.spans import ENDPOINT, SCOPE


class JSONLinesExporter(SpanExporter):
    """Appends one line per span. Several processes may share the file: a batch is one write at its end."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_plain(span)) + "\n" for span in spans)
        os.write(self._file, lines.encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)


def _plain(span: ReadableSpan) -> dict[str, object]:
    """A span as JSON: ids in hexadecimal, times in nanoseconds since 1970."""
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "process": span.resource.attributes["service.instance.id"],
        "attributes": dict(span.attributes or {}),
        "links": [f"{link.context.span_id:016x}" for link in span.links],
        "status": span.status.status_code.name,
        "description": span.status.description,
    }


def create_provider(process: str, file: str | None) -> tuple[TracerProvider, Callable[[Mapping[str, Any]], None]]:
    """A provider of its own, not the global one: Ray has its own use of that. And what exports a finished span."""
    resource = Resource.create({"service.name": "trn-vision-serve", "service.instance.id": process})
    processors = SynchronousMultiSpanProcessor()
    provider = TracerProvider(active_span_processor=processors, resource=resource)
    if file:
        processors.add_span_processor(BatchSpanProcessor(JSONLinesExporter(file)))
    if os.environ.get(ENDPOINT):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        processors.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    scope = InstrumentationScope(SCOPE)

    def emit(span: Mapping[str, Any]) -> None:
        processors.on_end(ReadableSpan(resource=resource, instrumentation_scope=scope, **span))

    return provider, emit
