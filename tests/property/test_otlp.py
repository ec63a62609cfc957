"""What is written as OTLP, as the official protobuf classes read it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace.errors import Code
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import SAMPLED, SpanId
from headrace.telemetry.otlp import Envelope, encode_span
from headrace.telemetry.tracing import FinishedSpan
from tests.support.otlp import decoded, value_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
WORD = st.integers(1, 2**64 - 1)
PLACES = st.builds(SpanId, st.integers(1, 2**128 - 1), WORD)
VALUES = st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1))
FAILURES = st.builds(Failure, st.sampled_from(list(Code)), TEXT, st.just("executor"))
SPANS = st.builds(
    FinishedSpan,
    name=TEXT,
    kind=st.sampled_from(["INTERNAL", "PRODUCER", "CONSUMER"]),
    place=PLACES,
    parent_id=st.one_of(st.just(0), WORD),
    remote=st.booleans(),
    flags=st.integers(0, 255),
    start_us=st.integers(0, 2**63 // 1000),
    end_us=st.integers(0, 2**63 // 1000),
    attributes=st.dictionaries(TEXT, VALUES, max_size=20),
    links=st.lists(PLACES, max_size=5),
    failure=st.none() | FAILURES,
)


def _read(span: FinishedSpan, dropped_links: int) -> Span:
    message = ScopeSpans()
    message.ParseFromString(encode_span(span, span.links, dropped_links))
    assert len(message.spans) == 1
    read: Span = message.spans[0]
    return read


def _expected(span: FinishedSpan, dropped_links: int) -> dict[str, Any]:
    """As the SDK's own encoder has it, and the flags of the trace besides."""
    attributes = dict(span.attributes)
    if span.failure is not None:
        attributes["error.type"] = str(span.failure.code)
    is_remote = span.remote and span.parent_id != 0
    return {
        "name": span.name,
        "kind": {"INTERNAL": 1, "PRODUCER": 4, "CONSUMER": 5}[span.kind],
        "trace_id": span.place.trace_id,
        "span_id": span.place.span_id,
        "parent_id": span.parent_id,
        "times": (span.start_us * 1000, span.end_us * 1000),
        "flags": span.flags | SAMPLED | 0x100 | (0x200 if is_remote else 0),
        "attributes": attributes,
        "links": [(*place, SAMPLED | 0x100) for place in span.links],
        "dropped_links": dropped_links,
        "status": (0, "") if span.failure is None else (2, span.failure.message),
    }


@settings(deadline=None)
@given(SPANS, st.integers(0, 2**32 - 1))
def test_every_field_of_a_span_is_read_as_it_was_meant(
    span: FinishedSpan, dropped_links: int
) -> None:
    """Whatever its lengths, numbers and texts are."""
    read = _read(span, dropped_links)

    assert {
        "name": read.name,
        "kind": read.kind,
        "trace_id": int.from_bytes(read.trace_id, "big"),
        "span_id": int.from_bytes(read.span_id, "big"),
        "parent_id": int.from_bytes(read.parent_span_id, "big"),
        "times": (read.start_time_unix_nano, read.end_time_unix_nano),
        "flags": read.flags,
        "attributes": {pair.key: value_of(pair) for pair in read.attributes},
        "links": [
            (int.from_bytes(one.trace_id, "big"), int.from_bytes(one.span_id, "big"), one.flags)
            for one in read.links
        ],
        "dropped_links": read.dropped_links_count,
        "status": (read.status.code, read.status.message),
    } == _expected(span, dropped_links)


@settings(deadline=None)
@given(st.lists(SPANS, max_size=5), TEXT)
def test_a_request_has_its_spans_in_order_and_says_who_they_are_from(
    spans: list[FinishedSpan], name: str
) -> None:
    """Resource and scope stand there once, for all of them."""
    resource = Resource({"service.name": name}, "https://schema/resource")
    scope = InstrumentationScope("headrace", "1", "https://schema/scope")
    request = Envelope(resource, scope).request([encode_span(span, ()) for span in spans])

    read = decoded(request)
    assert [span.name for span in read] == [span.name for span in spans]
    assert {span.resource for span in read} <= {resource}
    assert {span.instrumentation_scope for span in read} <= {scope}


@given(st.characters(categories=["Cs"]))
def test_half_a_character_costs_a_question_mark(half: str) -> None:
    """UTF-8 has none, and the span is sent all the same."""
    span = FinishedSpan(half, "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {"id": half})

    read = _read(span, 0)
    assert (read.name, read.attributes[0].value.string_value) == ("?", "?")


@given(st.binary(max_size=80))
def test_whatever_stands_in_a_tracestate_the_span_is_sent(header: bytes) -> None:
    """What cannot be read is left out."""
    span = FinishedSpan("a", "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {})

    assert _read(span._replace(tracestate=header), 0).name == "a"


def test_the_state_of_the_callers_trace_goes_on() -> None:
    """All members, in their order."""
    span = FinishedSpan("a", "INTERNAL", SpanId(1, 1), 0, False, SAMPLED, 1, 2, {})

    assert _read(span._replace(tracestate=b"congo=t61rcWkgMzE,rojo=00f067"), 0).trace_state == (
        "congo=t61rcWkgMzE,rojo=00f067"
    )
