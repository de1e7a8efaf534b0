"""Where OpenTelemetry spans go: an OTLP endpoint, a file of JSON lines, or both. Imported only when spans are on."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from telemetry.spans import ENDPOINT


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
    }


def create_provider(process: str, file: str | None) -> TracerProvider:
    """A provider of its own, not the global one: Ray has its own use of that."""
    resource = Resource.create({"service.name": "trn-vision-serve", "service.instance.id": process})
    provider = TracerProvider(resource=resource)
    if file:
        provider.add_span_processor(BatchSpanProcessor(JSONLinesExporter(file)))
    if os.environ.get(ENDPOINT):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
