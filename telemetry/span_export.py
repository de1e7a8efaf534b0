"""Where OpenTelemetry spans go: an OTLP endpoint, a file of JSON lines, or both. Imported only when spans are on."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from telemetry.span_notes import Note
from telemetry.spans import ENDPOINT, SCOPE

Emit = Callable[[SpanContext, Sequence[Note], Sequence[Link]], None]

BATCH = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
ENTRIES_AT_ONCE = 64
"""Entries of up to six spans in one export. More would hold the other threads of a process up for tens of ms."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE)


class NotedSpans(ReadableSpan):
    """Notes on their way to the exporter: one entry of the processor's queue."""

    def __init__(self, parent: SpanContext, notes: Sequence[Note], links: Sequence[Link], resource: Resource) -> None:
        super().__init__(name=notes[0].name, context=parent, resource=resource, instrumentation_scope=_SCOPE)
        self._notes, self._outer_links = notes, links

    def spans(self) -> list[ReadableSpan]:
        parent = self.context
        contexts = {note.span_id: SpanContext(parent.trace_id, note.span_id, False, _SAMPLED) for note in self._notes}
        return [
            ReadableSpan(
                name=note.name,
                context=contexts[note.span_id],
                parent=parent if note.parent is None else contexts[note.parent],
                resource=self.resource,
                attributes=note.attributes,
                links=self._outer_links if note.parent is None else (),
                status=Status(StatusCode.ERROR, note.error) if note.error else Status(),
                start_time=note.begin,
                end_time=note.end,
                instrumentation_scope=_SCOPE,
            )
            for note in self._notes
        ]


class NotesExporter(SpanExporter):
    """Makes spans of notes, and hands all to another exporter."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        made = [span.spans() if isinstance(span, NotedSpans) else [span] for span in spans]
        return self._exporter.export([span for several in made for span in several])

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


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


def create_provider(process: str, file: str | None) -> tuple[TracerProvider, Emit]:
    """A provider of its own, not the global one: Ray has its own use of that. And what exports notes."""
    resource = Resource.create({"service.name": "trn-vision-serve", "service.instance.id": process})
    processors = SynchronousMultiSpanProcessor()
    batch = None if os.environ.get(BATCH) else ENTRIES_AT_ONCE
    provider = TracerProvider(active_span_processor=processors, resource=resource)
    if file:
        processors.add_span_processor(
            BatchSpanProcessor(NotesExporter(JSONLinesExporter(file)), max_export_batch_size=batch)
        )
    if os.environ.get(ENDPOINT):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        processors.add_span_processor(
            BatchSpanProcessor(NotesExporter(OTLPSpanExporter()), max_export_batch_size=batch)
        )

    def emit(parent: SpanContext, notes: Sequence[Note], links: Sequence[Link]) -> None:
        processors.on_end(NotedSpans(parent, notes, links, resource))

    return provider, emit
