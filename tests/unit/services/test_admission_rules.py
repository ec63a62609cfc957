"""Rules for requests that are refused, expire before they run or are cancelled, one at a time."""

from __future__ import annotations

from headrace.errors import Code
from headrace.protocol.messages import Envelope
from tests.support.batching import (
    LINE_US,
    NOW_MS,
    backlogged,
    filled,
    forming_of,
    learned,
    pulled,
    request_of,
)
from tests.support.work import NOW_US, Limits, make_request


def test_request_predicted_late_is_refused_on_arrival() -> None:
    """80 rows at 1 ms each lie before it, so 50 ms are too few, and 100 ms are not."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    late, fine = request_of(in_ms=50), request_of(in_ms=100)

    forming.add(late, NOW_US)
    forming.add(fine, NOW_US)

    assert forming.ended == [late]
    assert late.failure is not None
    assert late.failure.code == Code.OVERLOADED
    assert late.failure.retry_after_ms is not None
    assert 30 <= late.failure.retry_after_ms <= 36
    assert "expected an answer within 50 ms" in late.failure.message


def test_refused_request_leaves_others_waiting() -> None:
    """Nothing of their kind waits yet: the refused one opened no queue for the others."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    late = request_of(in_ms=1, shape_class=(7,))
    others = [request_of(in_ms=100_000, shape_class=(7,)) for _ in range(2)]

    forming.add_all([late, *others], NOW_US)

    assert forming.ended == [late]
    assert len(forming) == 82


def test_request_without_deadline_waits_behind_one_with_deadline() -> None:
    """With a backlog, deadlines are looked at; there may be none but the first."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)

    forming.add_all([request_of(in_ms=100_000), request_of(), request_of()], NOW_US)

    assert len(forming) == 83


def test_late_request_is_refused_by_its_headers() -> None:
    """The request is refused before it is decoded if its headers name the model."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    late = Envelope(deadline_ms=NOW_MS + 50, model="digits")

    failure = forming.refusal(late, NOW_US, "ingest")

    assert failure is not None
    assert (failure.code, failure.stage) == (Code.OVERLOADED, "ingest")
    assert forming.refusal(late._replace(deadline_ms=NOW_MS + 100), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(model="other"), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(version="2"), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(deadline_ms=0), NOW_US, "ingest") is None


def test_backlog_of_one_tenant_refuses_no_other() -> None:
    """The wait of a request counts only the requests that go before it."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    other = request_of(in_ms=50, tenant="other")

    forming.add(other, NOW_US)

    assert forming.ended == []


def test_backlog_of_lower_priority_refuses_no_higher_one() -> None:
    """Those wait behind it."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    urgent = request_of(in_ms=50, priority=1)

    forming.add(urgent, NOW_US)

    assert forming.ended == []


def test_unknown_service_rate_refuses_nothing() -> None:
    """A long queue says nothing while nobody has taken from it."""
    requests = [request_of(in_ms=5) for _ in range(1000)]

    forming = filled(Limits(max_batch_size=4), *requests)

    assert forming.ended == []


def test_idle_time_does_not_slow_service_rate() -> None:
    """A request a second is no sign that a row takes a second."""
    forming = forming_of(Limits(max_batch_size=4))
    for second in range(10):
        forming.add(request_of(arrived_us=NOW_US + second * 1_000_000))
        pulled(forming, NOW_US + second * 1_000_000)
    requests = [request_of(in_ms=60_000) for _ in range(100)]
    for request in requests:
        forming.add(request, NOW_US + 10_000_000)

    assert forming.ended == []


def test_waiting_request_is_cancelled() -> None:
    """It leaves with its own code, and one that has gone into a batch stays."""
    kept, gone, ran = request_of(), request_of(), request_of()
    forming = filled(Limits(max_batch_size=1), ran, gone, kept)
    pulled(forming)

    for each in (gone, ran):
        record = make_request("", envelope=Envelope(cancels=("t", 0, each.offset)))
        forming.add(record)
    cancelling, ended = forming.cancel()

    assert (len(cancelling), ended, forming.ended) == (2, 1, [gone])
    assert gone.failure is not None
    assert gone.failure.code == Code.CANCELLED
    assert ran.failure is None
    assert pulled(forming).requests == [kept]


def test_margin_covers_recent_lateness() -> None:
    """With a full batch before it, a request has to be in time by that much."""
    latency = learned({1: 1000, 4: 4000})
    for _ in range(64):
        latency.observe_lateness(30_000)
    forming = backlogged(Limits(max_batch_size=4, latency=latency), row_us=1000)
    late, fine = request_of(in_ms=100), request_of(in_ms=130)

    forming.add(late, NOW_US)
    forming.add(fine, NOW_US)

    assert forming.ended == [late]


def test_idle_instance_runs_request_that_may_be_in_time() -> None:
    """The margin is for a backlog: here nobody else wants the place."""
    latency = learned({1: 1000, 2: 1100})
    for _ in range(64):
        latency.observe_lateness(30_000)
    requests = [request_of(in_ms=5), request_of(in_ms=5)]

    batch = pulled(filled(Limits(latency=latency), *requests))

    assert batch.requests == requests
    assert batch.end_us == NOW_US + 1100


def test_batch_under_backlog_is_not_cut() -> None:
    """The last batch left some behind: what fits into one now is what admission let in."""
    forming = filled(
        Limits(32, 10_000, latency=learned(LINE_US)), *(request_of() for _ in range(44))
    )
    pulled(forming)
    forming.add(request_of(in_ms=1), NOW_US)

    assert (pulled(forming).rows, forming.ended[0].failure is not None) == (12, True)


def test_stalled_batch_does_not_slow_service_rate() -> None:
    """One of twenty takes a second instead of 4 ms; after it as much is let in as before."""
    forming = filled(Limits(max_batch_size=4), *(make_request() for _ in range(160)))
    now_us = NOW_US - 2_000_000
    for number in range(20):
        pulled(forming, now_us)
        now_us += 1_000_000 if number == 15 else 4000
    fine, late = request_of(in_ms=110), request_of(in_ms=70)
    fine.envelope, late.envelope = (
        Envelope(deadline_ms=now_us // 1000 + in_ms) for in_ms in (110, 70)
    )

    forming.add(fine, now_us)
    forming.add(late, now_us)

    assert forming.ended == [late]
