"""The spans of a request: when they begin and end, and how they link to each other."""

from __future__ import annotations

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from headrace.delivery.failures import deadline_passed
from headrace.errors import Code
from headrace.log.port import TopicPartition
from headrace.protocol.messages import Failure
from headrace.topics import Stage
from tests.support.spans import (
    CALLER,
    TRACE_ID,
    T,
    answer,
    answer_traceparent,
    form,
    id_of,
    make_run,
    make_traced,
    parent_of,
    pass_through,
    run,
    split,
    traceparent,
    tracing_settings,
    tracing_spans,
)

STAGES = ("ingest", "batcher", "executor", "responder")
FAILED = Failure(Code.MODEL_FAILED, "model digits version 1: it fell over", Stage.EXECUTOR)


# --- the path ----------------------------------------------------------------------------------


def test_span_of_stage_is_child_of_previous_stage() -> None:
    """The first is the child of the caller's span, of another process; all are of its trace."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(traceparent()))

    path = [spans.one(stage) for stage in STAGES]
    assert [parent_of(span) for span in path] == [
        (TRACE_ID, CALLER),
        *(id_of(span) for span in path[:-1]),
    ]
    assert [span.parent is not None and span.parent.is_remote for span in path] == [
        True,
        False,
        False,
        False,
    ]


def test_stage_spans_follow_without_gap() -> None:
    """The spans cover the time from the record's timestamp to the acknowledgement of the answer."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(traceparent()))

    assert [(span.start_time, span.end_time) for span in map(spans.one, STAGES)] == [
        (T * 1000, (T + 1000) * 1000),
        ((T + 1000) * 1000, (T + 2000) * 1000),
        ((T + 2000) * 1000, (T + 3100) * 1000),
        ((T + 3100) * 1000, (T + 4100) * 1000),
    ]


def test_send_span_ends_at_acknowledgement() -> None:
    """The `send` span is the responder's child and ends with the acknowledgement."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(traceparent()))

    send = spans.one("send")
    assert parent_of(send) == id_of(spans.one("responder"))
    assert (send.start_time, send.end_time) == ((T + 3300) * 1000, (T + 4000) * 1000)


def test_answer_carries_context_of_its_send_span() -> None:
    """The reader of an answer can continue its trace."""
    request = make_traced(traceparent("03"))
    with tracing_spans() as (tracing, spans):
        form(tracing, [request])
        header = answer_traceparent(request)
        run(tracing, [request])
        answer(tracing, [request])

    trace_id, span_id = id_of(spans.one("send"))
    assert header == f"00-{trace_id:032x}-{span_id:016x}-03"


def test_stage_reading_from_memory_has_internal_span() -> None:
    """Only ingest is a consumer where all stages are together."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(traceparent()))

    assert [(spans.one(stage).kind, spans.one(stage).name) for stage in STAGES] == [
        (SpanKind.CONSUMER, "process headrace.requests"),
        (SpanKind.INTERNAL, "process batcher"),
        (SpanKind.INTERNAL, "process executor"),
        (SpanKind.INTERNAL, "process responder"),
    ]


def test_stage_reading_from_topic_has_consumer_span() -> None:
    """Each span has the topic's name where all stages are apart."""
    with tracing_spans() as (tracing, spans):
        split(tracing)
        pass_through(tracing, make_traced(traceparent()))

    assert [(spans.one(stage).kind, spans.one(stage).name) for stage in STAGES] == [
        (SpanKind.CONSUMER, "process headrace.requests"),
        (SpanKind.CONSUMER, "process headrace.items"),
        (SpanKind.CONSUMER, "process headrace.batches"),
        (SpanKind.CONSUMER, "process headrace.results"),
    ]


def test_reply_topic_is_not_part_of_span_name() -> None:
    """Callers choose them, so there may be any number."""
    request = make_traced(traceparent())
    with tracing_spans() as (tracing, spans):
        form(tracing, [request])
        run(tracing, [request])
        answer(tracing, [request], TopicPartition("headrace.replies-for-ann", 0))

    send = spans.one("send")
    assert send.name == "send (reply topic)"
    assert (send.attributes or {})["messaging.destination.name"] == "headrace.replies-for-ann"


# --- batches -----------------------------------------------------------------------------------


def test_run_span_and_request_spans_link_to_each_other() -> None:
    """The run has a trace of its own and a link to each; each has a link, and its ids."""
    requests = [make_traced(traceparent(), offset=offset) for offset in range(3)]
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, *requests)

    ran, members = spans.one("run"), spans.of("executor")
    trace_id, span_id = id_of(ran)
    assert ran.parent is None
    assert trace_id != TRACE_ID
    assert [(link.context.trace_id, link.context.span_id) for link in ran.links] == [
        id_of(member) for member in members
    ]
    for member in members:
        assert [(one.context.trace_id, one.context.span_id) for one in member.links] == [
            (trace_id, span_id)
        ]
        attributes = member.attributes or {}
        assert attributes["headrace.batch.trace_id"] == f"{trace_id:032x}"
        assert attributes["headrace.batch.span_id"] == f"{span_id:016x}"


def test_run_span_links_sampled_requests_and_counts_all() -> None:
    """One sampled request is enough for the run to have a span."""
    requests = [make_traced(traceparent("00")), make_traced(traceparent("01"))]
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, *requests)

    ran = spans.one("run")
    assert len(ran.links) == 1
    assert (ran.attributes or {})["headrace.batch.requests"] == 2


def test_bisected_batch_has_span_for_each_run() -> None:
    """A request has links to all its runs; the failed one is an error, and so is its own end."""
    requests = [make_traced(traceparent(), offset=offset) for offset in range(2)]
    with tracing_spans() as (tracing, spans):
        form(tracing, requests)
        tracing.ran(make_run(requests, "7", FAILED))
        for number, request in enumerate(requests):
            tracing.ran(make_run([request], f"7.{number}", FAILED if number else None))
            if number:
                request.fail(FAILED)
            tracing.executed(f"7.{number}", [request], T + 3100)
        answer(tracing, requests)

    together, first, second = map(id_of, spans.of("run"))
    good, bad = spans.of("executor")
    assert [[tuple(link.context)[:2] for link in one.links] for one in (good, bad)] == [
        [together, first],
        [together, second],
    ]
    assert [(one.attributes or {})["headrace.runs"] for one in (good, bad)] == [2, 2]
    assert [one.status.status_code for one in spans.of("run")] == [
        StatusCode.ERROR,
        StatusCode.UNSET,
        StatusCode.ERROR,
    ]
    assert (good.status.is_ok, bad.status.is_ok) == (True, False)


# --- failures that were not sampled -----------------------------------------------------------


@pytest.mark.parametrize("header", [None, traceparent("00")], ids=["root", "unsampled-caller"])
def test_unsampled_failure_is_traced(header: bytes | None) -> None:
    """The responder makes the spans behind it, in order, from the times of the request."""
    request = make_traced(header)
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        form(tracing, [request])
        run(tracing, [request], FAILED)
        answer(tracing, [request])

    path = [spans.one(stage) for stage in STAGES]
    assert [parent_of(span) for span in path[1:]] == [id_of(span) for span in path[:-1]]
    assert parent_of(path[0]) == (None if header is None else (TRACE_ID, CALLER))
    assert [(span.attributes or {}).get("headrace.after_the_fact") for span in path] == [
        True,
        True,
        True,
        None,
    ]
    assert [span.end_time for span in path] == [
        (T + end_us) * 1000 for end_us in (1000, 2000, 3100, 4100)
    ]
    assert [span.status.is_ok for span in path] == [True, True, False, False]


def test_unsampled_missed_deadline_is_traced() -> None:
    """An answer that is late at the last moment has its whole way told, and by how much."""
    request = make_traced(None, deadline_ms=T // 1000 + 1)
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        form(tracing, [request])
        run(tracing, [request])
        late = deadline_passed(request, T + 3200, Stage.RESPONDER)
        assert late is not None
        request.fail(late)
        answer(tracing, [request])

    responder = spans.one("responder")
    attributes = responder.attributes or {}
    assert attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert attributes["headrace.deadline.slack_ms"] == -3
    assert [len(spans.of(stage)) for stage in STAGES] == [1, 1, 1, 1]


def test_refusal_at_ingest_has_no_spans_of_later_stages() -> None:
    """A kept refusal was at ingest and at the responder, and there is its dead letter."""
    request = make_traced(None)
    request.fail(Failure(Code.INVALID_TENSOR, "inputs[0].shape: wrong", Stage.INGEST))
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        tracing.ingested([request], T + 1000)
        answer(tracing, [request])

    assert [len(spans.of(stage)) for stage in STAGES] == [1, 0, 0, 1]
    assert [span.name for span in spans.of("send")] == [
        "send headrace.responses",
        "send headrace.dead-letters",
    ]


def test_request_expired_in_batcher_has_error_on_batcher_span() -> None:
    """Its batcher's span has the error, whether it was sampled or is kept after the fact."""
    requests = [make_traced(traceparent(flags)) for flags in ("01", "00")]
    with tracing_spans() as (tracing, spans):
        tracing.ingested(requests, T + 1000)
        for request in requests:
            request.fail(Failure(Code.DEADLINE_EXCEEDED, "late", Stage.BATCHER))
        tracing.ended_waiting(requests, T + 2500)
        answer(tracing, requests)

    assert [(span.end_time, span.status.is_ok) for span in spans.of("batcher")] == [
        ((T + 2500) * 1000, False),
        ((T + 2500) * 1000, False),
    ]
    assert spans.of("executor") == []


def test_sampled_failure_is_traced_once() -> None:
    """Keeping it adds nothing to what its stages have told."""
    request = make_traced(traceparent("01"))
    with tracing_spans() as (tracing, spans):
        form(tracing, [request])
        run(tracing, [request], FAILED)
        answer(tracing, [request])

    assert [len(spans.of(stage)) for stage in STAGES] == [1, 1, 1, 1]


def test_span_of_record_without_timestamp_begins_at_read() -> None:
    """There is nothing earlier to begin at."""
    request = make_traced(traceparent())
    request.timestamp_ms = -1
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, request)

    assert spans.one("ingest").start_time == (T + 500) * 1000
