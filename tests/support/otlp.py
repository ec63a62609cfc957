"""OTLP as the official protobuf classes read it, told in the SDK's terms."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from headrace.protocol.trace_context import AttributeValue
from headrace.telemetry.otlp import request_of

_KINDS = {
    Span.SPAN_KIND_INTERNAL: SpanKind.INTERNAL,
    Span.SPAN_KIND_PRODUCER: SpanKind.PRODUCER,
    Span.SPAN_KIND_CONSUMER: SpanKind.CONSUMER,
}


class Decoding(SpanExporter):
    """Keeps what it is to send, decoded.

    Attributes:
        spans: all of them until now.
    """

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += decoded(request_of(spans))
        return SpanExportResult.SUCCESS


def decoded(request: bytes) -> list[ReadableSpan]:
    """The spans of an `ExportTraceServiceRequest`, in their order."""
    message = ExportTraceServiceRequest()
    message.ParseFromString(request)
    return [
        _span(span, of_scope, of_resource)
        for of_resource in message.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _span(span: Span, of_scope: ScopeSpans, of_resource: ResourceSpans) -> ReadableSpan:
    state = TraceState.from_header([span.trace_state]) if span.trace_state else None
    parent = None
    if span.parent_span_id:
        is_remote = bool(span.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
        parent = _context(span.trace_id, span.parent_span_id, span.flags, state, is_remote)
    links: BoundedList[Link] = BoundedList.from_seq(
        len(span.links),
        [Link(_context(one.trace_id, one.span_id, one.flags)) for one in span.links],
    )
    links.dropped = span.dropped_links_count
    scope = of_scope.scope
    return ReadableSpan(
        span.name,
        context=_context(span.trace_id, span.span_id, span.flags, state),
        parent=parent,
        resource=Resource(_attributes(of_resource.resource.attributes), of_resource.schema_url),
        attributes=_attributes(span.attributes),
        links=links,
        kind=_KINDS[span.kind],
        status=Status(StatusCode(span.status.code), span.status.message or None),
        start_time=span.start_time_unix_nano,
        end_time=span.end_time_unix_nano,
        instrumentation_scope=InstrumentationScope(scope.name, scope.version, of_scope.schema_url),
    )


def _context(
    trace_id: bytes,
    span_id: bytes,
    flags: int,
    state: TraceState | None = None,
    is_remote: bool = False,
) -> SpanContext:
    trace_flags = TraceFlags(flags & SpanFlags.SPAN_FLAGS_TRACE_FLAGS_MASK)
    places = int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big")
    return SpanContext(*places, is_remote, trace_flags, state)


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: value_of(pair) for pair in pairs}


def value_of(pair: KeyValue) -> AttributeValue:
    """Of one attribute, whichever type it has."""
    kind = pair.value.WhichOneof("value")
    assert kind is not None
    value: AttributeValue = getattr(pair.value, kind)
    return value
