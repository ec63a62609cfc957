"""Spans as a collector reads them, after the SDK has encoded them as OTLP."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource

from headrace.errors import Code
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import SAMPLED, AttributeValue, SpanId
from headrace.telemetry.trace_export import readable_span
from headrace.telemetry.tracing import FinishedSpan

RESOURCE = Resource({"service.name": "headrace"}, "https://schema/resource")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
WORD = st.integers(1, 2**64 - 1)
SPAN_IDS = st.builds(SpanId, st.integers(1, 2**128 - 1), WORD)
VALUES = st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1))
FAILURES = st.builds(Failure, st.sampled_from(list(Code)), TEXT, st.just("executor"))
SPANS = st.builds(
    FinishedSpan,
    name=TEXT,
    kind=st.sampled_from(["INTERNAL", "PRODUCER", "CONSUMER"]),
    ids=SPAN_IDS,
    parent_id=st.one_of(st.just(0), WORD),
    remote=st.booleans(),
    flags=st.integers(0, 255),
    start_us=st.integers(0, 2**63 // 1000),
    end_us=st.integers(0, 2**63 // 1000),
    attributes=st.dictionaries(TEXT, VALUES, max_size=20),
    links=st.lists(SPAN_IDS, max_size=5),
    failure=st.none() | FAILURES,
)


def _read(span: FinishedSpan, link_limit: int | None = None) -> Span:
    request = encode_spans([readable_span(span, RESOURCE, sys.maxsize, link_limit)])
    message = ExportTraceServiceRequest.FromString(request.SerializeToString())
    (of_resource,) = message.resource_spans
    (of_scope,) = of_resource.scope_spans
    (read,) = of_scope.spans
    assert isinstance(read, Span)
    return read


def _value(pair: KeyValue) -> AttributeValue:
    kind = pair.value.WhichOneof("value")
    assert kind is not None
    value: AttributeValue = getattr(pair.value, kind)
    return value


def _expected(span: FinishedSpan, link_limit: int) -> dict[str, Any]:
    attributes = dict(span.attributes)
    if span.failure is not None:
        attributes["error.type"] = str(span.failure.code)
    is_remote = span.remote and span.parent_id != 0
    return {
        "name": span.name,
        "kind": {"INTERNAL": 1, "PRODUCER": 4, "CONSUMER": 5}[span.kind],
        "trace_id": span.ids.trace_id,
        "span_id": span.ids.span_id,
        "parent_id": span.parent_id,
        "times": (span.start_us * 1000, max(span.start_us, span.end_us) * 1000),
        "flags": 0x300 if is_remote else 0x100,
        "attributes": attributes,
        "links": [(*ids, 0x100) for ids in span.links[:link_limit]],
        "dropped_links": max(0, len(span.links) - link_limit),
        "status": (0, "") if span.failure is None else (2, span.failure.message),
    }


@settings(deadline=None)
@given(SPANS, st.integers(0, 5))
def test_exported_span_has_every_field_of_finished_one(span: FinishedSpan, link_limit: int) -> None:
    """Fields of any lengths, numbers and texts are exported."""
    read = _read(span, link_limit)

    assert {
        "name": read.name,
        "kind": read.kind,
        "trace_id": int.from_bytes(read.trace_id, "big"),
        "span_id": int.from_bytes(read.span_id, "big"),
        "parent_id": int.from_bytes(read.parent_span_id, "big"),
        "times": (read.start_time_unix_nano, read.end_time_unix_nano),
        "flags": read.flags,
        "attributes": {pair.key: _value(pair) for pair in read.attributes},
        "links": [
            (int.from_bytes(one.trace_id, "big"), int.from_bytes(one.span_id, "big"), one.flags)
            for one in read.links
        ],
        "dropped_links": read.dropped_links_count,
        "status": (read.status.code, read.status.message),
    } == _expected(span, link_limit)


@given(st.characters(categories=["Cs"]))
def test_surrogate_in_text_becomes_question_mark(half: str) -> None:
    """UTF-8 has none, and the span is sent all the same."""
    span = FinishedSpan(half, "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {"id": half})

    read = _read(span)
    assert (read.name, read.attributes[0].value.string_value) == ("?", "?")


@given(st.binary(max_size=80))
def test_span_with_unreadable_tracestate_is_sent(header: bytes) -> None:
    """A tracestate that cannot be read is left out."""
    span = FinishedSpan("a", "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {})

    assert _read(span._replace(tracestate=header)).name == "a"


def test_tracestate_of_caller_is_exported() -> None:
    """All members, in their order."""
    span = FinishedSpan("a", "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {})

    assert _read(span._replace(tracestate=b"congo=t61rcWkgMzE,rojo=00f067")).trace_state == (
        "congo=t61rcWkgMzE,rojo=00f067"
    )
