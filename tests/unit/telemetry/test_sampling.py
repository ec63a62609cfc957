"""Which requests are sampled: by their callers' decision, or by chance in their share."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from headrace.errors import Code
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import until_sampled
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from tests.support.spans import (
    CALLER,
    TRACE_ID,
    T,
    answer_traceparent,
    id_of,
    make_traced,
    parent_of,
    pass_through,
    traceparent,
    tracing_settings,
    tracing_spans,
)

FAILED = Failure(Code.MODEL_FAILED, "it fell over", Stage.EXECUTOR)
STAGES = ("ingest", "batcher", "executor", "responder")


def test_unsampled_request_has_no_trace() -> None:
    """From ingest to the acknowledgement, neither a trace nor a span is kept for it."""
    requests = [make_traced(traceparent("00")), make_traced(None)]
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        pass_through(tracing, *requests)

    assert spans.all == ()
    assert [request.trace for request in requests] == [None, None]


def test_answer_of_unsampled_request_carries_context_of_caller() -> None:
    """Byte by byte."""
    request = make_traced(traceparent("00"))
    with tracing_spans() as (tracing, _):
        pass_through(tracing, request)

    assert answer_traceparent(request).encode() == traceparent("00")


def test_sampling_decision_of_caller_overrides_ratio() -> None:
    """A sampled context is continued even where no root is sampled."""
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        pass_through(tracing, make_traced(traceparent("01")))

    assert {id_of(spans.one(stage))[0] for stage in STAGES} == {TRACE_ID}


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"garbage",
        traceparent()[:-1],
        traceparent() + b"0",
        traceparent().upper(),
        b"ff" + traceparent()[2:],
        b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-" + b"0" * 16 + b"-01",
    ],
)
def test_request_without_readable_context_starts_trace(header: bytes | None) -> None:
    """It has no parent, and its id is nobody's."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(header))

    ingest = spans.one("ingest")
    assert ingest.parent is None
    assert id_of(ingest)[0] not in (0, TRACE_ID)


def test_traceparent_of_later_version_is_read() -> None:
    """W3C Trace Context demands that later versions are read."""
    with tracing_spans() as (tracing, spans):
        pass_through(tracing, make_traced(b"cc" + traceparent()[2:] + b"-what-comes"))

    assert parent_of(spans.one("ingest")) == (TRACE_ID, CALLER)


def test_roots_are_sampled_in_their_share() -> None:
    """A quarter of 4,000 requests is sampled with a ratio of 0.25, within four deviations."""
    requests = [make_traced(None) for _ in range(4000)]
    with tracing_spans(tracing_settings(ratio=0.25)) as (tracing, _):
        tracing.ingested(requests, T + 1000)

    sampled = sum(request.trace is not None for request in requests)
    assert abs(sampled - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5


def test_sampling_by_callers_does_not_change_ratio_of_others() -> None:
    """Every other request has a context that is not sampled; of those without, a quarter is."""
    requests = [make_traced(traceparent("00") if one % 2 else None) for one in range(8000)]
    with tracing_spans(tracing_settings(ratio=0.25)) as (tracing, _):
        for start in range(0, len(requests), 7):
            tracing.ingested(requests[start : start + 7], T + 1000)

    sampled = sum(request.trace is not None for request in requests)
    assert abs(sampled - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, 0), (0.0, sys.maxsize), (5e-324, sys.maxsize)]
)
def test_ratio_of_zero_or_one_samples_none_or_all(ratio: float, expected: int) -> None:
    """Chance plays no part at either end."""
    assert until_sampled(ratio) == expected


@pytest.mark.parametrize(
    ("rate", "header", "sampled_by"),
    [
        ("traces_per_second", None, "ratio"),
        ("caller_traces_per_second", traceparent("01"), "caller"),
    ],
)
def test_requests_over_their_rate_get_no_trace_and_are_counted(
    rate: str, header: bytes | None, sampled_by: str
) -> None:
    """Three of 20 requests at once are traced, and one more of 20 half a second later."""
    metrics = Metrics(CollectorRegistry())
    requests = [make_traced(header) for _ in range(40)]
    with tracing_spans(tracing_settings(**{rate: 3.0}), metrics) as (tracing, _):
        tracing.ingested(requests[:20], T)
        tracing.ingested(requests[20:], T + 500_000)

    traced = [request.trace is not None for request in requests]
    assert (sum(traced[:20]), sum(traced[20:])) == (3, 1)
    assert _rate_limited(metrics, sampled_by) == 36


def test_failures_over_their_rate_get_no_trace_and_are_counted() -> None:
    """Three of 20 failures at once are traced."""
    metrics = Metrics(CollectorRegistry())
    settings = tracing_settings(ratio=0.0, failure_traces_per_second=3.0)
    requests = [make_traced(None) for _ in range(20)]
    with tracing_spans(settings, metrics) as (tracing, _):
        tracing.ingested(requests, T)
        for request in requests:
            request.fail(FAILED)
            tracing.keep(request, T)

    assert sum(request.trace is not None for request in requests) == 3
    assert _rate_limited(metrics, "failure") == 17


def test_callers_that_sample_all_do_not_use_rate_of_others() -> None:
    """Requests without a context get their three traces all the same."""
    rates = {"traces_per_second": 3.0, "caller_traces_per_second": 2.0}
    requests = [make_traced(traceparent("01") if one % 2 else None) for one in range(40)]
    with tracing_spans(tracing_settings(**rates)) as (tracing, _):
        tracing.ingested(requests, T)

    assert sum(request.trace is not None for request in requests[::2]) == 3
    assert sum(request.trace is not None for request in requests[1::2]) == 2


def test_failure_over_rate_is_traced_in_trace_of_caller() -> None:
    """Its rate is another one."""
    request = make_traced(traceparent("01"))
    with tracing_spans(tracing_settings(caller_traces_per_second=0.0)) as (tracing, _):
        tracing.ingested([request], T)
        request.fail(FAILED)
        tracing.keep(request, T)

    assert request.trace is not None
    assert request.trace.trace_id == TRACE_ID


def test_rate_of_zero_traces_nothing() -> None:
    """A rate of 0 does not trace even the first request."""
    request = make_traced(None)
    with tracing_spans(tracing_settings(traces_per_second=0.0)) as (tracing, _):
        tracing.ingested([request], T)

    assert request.trace is None


def _rate_limited(metrics: Metrics, sampled_by: str) -> float | None:
    return metrics.registry.get_sample_value(
        "headrace_traces_rate_limited_total", {"sampled_by": sampled_by}
    )


PRINTS_ITS_IDS = """
import os
from headrace.protocol.trace_context import new_span_id
if os.fork():
    os.wait()
print(new_span_id(), flush=True)
"""


def test_ids_of_forked_process_are_its_own() -> None:
    """Else the spans of a trace through it and its parent would share ids, and so be mixed up."""
    printed = subprocess.check_output([sys.executable, "-c", PRINTS_ITS_IDS], text=True)

    assert len(set(printed.split())) == 2
