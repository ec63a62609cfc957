"""A request's trace on its way from process to process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    decode_batch,
    decode_items,
    decode_results,
    encode_batch,
    encode_items,
    encode_results,
)
from headrace.protocol.messages import Batch, Request
from tests.support.spans import TRACE_ID, T, make_traced, traceparent, tracing_spans

Journey = Callable[[Request], Request]


def _as_item(request: Request) -> Request:
    return decode_items(encode_items([request]), NULL_ACK)[0]


def _as_batch(request: Request) -> Request:
    return decode_batch(encode_batch(Batch("b", [request], "full")), NULL_ACK).requests[0]


def _as_result(request: Request) -> Request:
    request.outputs = ()
    return decode_results(encode_results([request]), NULL_ACK)[0]


journeys = pytest.mark.parametrize("journey", [_as_item, _as_batch, _as_result])


@journeys
def test_trace_context_survives_wire(journey: Journey) -> None:
    """The parent is the last stage's span, now of another process; its end is the next start."""
    request = make_traced(traceparent("03"))
    with tracing_spans() as (tracing, spans):
        tracing.ingested([request], T + 1000)
    trace = journey(request).trace

    assert trace is not None
    ingest = spans.one("ingest").context
    assert ingest is not None
    assert (trace.trace_id, trace.parent_id) == (TRACE_ID, ingest.span_id)
    assert (trace.flags, trace.since_us, trace.remote) == (3, T + 1000, True)


@journeys
def test_unsampled_request_survives_wire_unsampled(journey: Journey) -> None:
    """The decision is not made again."""
    request = make_traced(traceparent("00"))
    with tracing_spans() as (tracing, _):
        tracing.ingested([request], T + 1000)

    assert journey(request).trace is None


@journeys
def test_trace_times_of_failure_survive_wire(journey: Journey) -> None:
    """The times that no other field carries."""
    request = make_traced(None)
    request.checked_us, request.done_us = T + 1000, T + 3000
    arrived = journey(request)

    assert (arrived.checked_us, arrived.done_us) == (T + 1000, T + 3000)


def test_result_record_carries_its_batch() -> None:
    """The responder has no batch to ask."""
    request = make_traced(None)
    request.batch_id = "7.1"

    assert _as_result(request).batch_id == "7.1"


@journeys
def test_tracing_off_adds_nothing_to_record(journey: Journey) -> None:
    """Fields that say nothing are left out of the bytes."""
    arrived = journey(make_traced(None))

    assert b"trace" not in encode_items([arrived])
    assert b"checked_us" not in encode_items([arrived])
