"""A service rate that was learned in a bad moment is corrected."""

from __future__ import annotations

from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Envelope, Request
from headrace.services.batcher.batcher import DynamicBatcher
from tests.support.work import NOW_US, Limits, make_request, receipt_of

KEY = ("digits", "1")
ROW_US = 10_000
ROWS = 4


def forming_of(latency: Latency) -> DynamicBatcher:
    """Make a batcher for a model with batches of up to four rows."""
    limits = Limits(max_batch_size=ROWS, latency=latency)
    return DynamicBatcher(lambda _name, _version: limits, "test")


def teach(latency: Latency) -> None:
    """Each row takes as long, and each batch a little besides, so that all of them are best."""
    for rows in range(1, ROWS + 1):
        for _ in range(3):
            latency.observe((64,), rows, 2000 + rows * ROW_US)


def wait(forming: DynamicBatcher, count: int, now_us: int, within_us: int = 0) -> list[Request]:
    """Add this number of requests, with a deadline if one is given."""
    deadline_ms = (now_us + within_us) // 1000 if within_us else 0
    requests = [make_request(envelope=Envelope(deadline_ms=deadline_ms)) for _ in range(count)]
    for request in requests:
        forming.add(request, now_us)
    return requests


def close(forming: DynamicBatcher, now_us: int) -> None:
    """A batch, of which there is one."""
    assert forming.next(KEY, now_us) is not None


def test_service_rate_without_recent_backlog_is_forgotten() -> None:
    """A rate learned while runs took twenty times as long would refuse every backlog, and so
    prevent the runs that could correct it.
    """
    latency = Latency()
    teach(latency)
    forming, now_us = forming_of(latency), NOW_US
    wait(forming, 10 * ROWS, now_us)
    for _ in range(10):
        close(forming, now_us)
        now_us += 20 * ROWS * ROW_US
    for _ in range(200):  # some seconds of light load
        wait(forming, 1, now_us, within_us=20 * ROW_US)
        close(forming, now_us)
        now_us += 5 * ROW_US

    wait(forming, 6, now_us, within_us=20 * ROW_US)

    assert forming.ended == []


def test_batches_without_known_run_times_teach_no_service_rate() -> None:
    """Unknown run times are left out: counted as a number of rows they would look like no time."""
    latency = Latency()
    forming, now_us = forming_of(latency), NOW_US
    wait(forming, 10 * ROWS, now_us)
    for number in range(4):
        close(forming, now_us)
        now_us += ROWS * ROW_US
        if number == 1:
            teach(latency)

    (request,) = wait(forming, 1, now_us, within_us=40 * ROW_US)

    assert request.failure is None


def test_requests_larger_than_batch_are_expected_to_take_as_long_as_they_did() -> None:
    """Each of them runs alone, and takes much less time for a row than a batch of small ones."""
    latency, rows, run_us = Latency(), 1000 * ROWS, 10 * ROWS * ROW_US
    teach(latency)
    for _ in range(10):
        latency.observe((64,), rows, run_us)
    forming, now_us = forming_of(latency), NOW_US
    for _ in range(20):
        forming.add(make_request(rows=rows), now_us)
    for _ in range(10):
        close(forming, now_us)
        now_us += run_us

    wait(forming, 1, now_us, within_us=20 * run_us)

    assert forming.ended == []


def test_late_request_behind_rows_of_slower_shape_class_is_refused() -> None:
    """The rows before were a hundred times as quick, and say nothing about these."""
    latency, slow, now_us = Latency(), (1024,), NOW_US
    teach(latency)
    for rows in range(1, ROWS + 1):
        for _ in range(3):
            latency.observe(slow, rows, 100 * (2000 + rows * ROW_US))
    forming = forming_of(latency)
    wait(forming, 100 * ROWS, now_us)
    while forming.next(KEY, now_us) is not None:
        now_us += ROWS * ROW_US
    for _ in range(10 * ROWS):
        forming.add(make_request(shape_class=slow), now_us)
    for _ in range(2):
        close(forming, now_us)
        now_us += 100 * ROWS * ROW_US

    (request,) = wait(forming, 1, now_us, within_us=100 * ROWS * ROW_US)

    assert forming.ended == [request]


def test_time_after_revoked_backlog_is_not_part_of_service_rate() -> None:
    """Nothing waited in it."""
    latency = Latency()
    teach(latency)
    forming, now_us = forming_of(latency), NOW_US
    backlog = wait(forming, 2 * ROWS, now_us)
    close(forming, now_us)
    for request in backlog:
        receipt_of(request).revoked = True
    assert forming.next(KEY, now_us + ROWS * ROW_US) is None
    forming.ended.clear()
    now_us += 3_600_000_000
    wait(forming, 2 * ROWS, now_us)
    close(forming, now_us)

    wait(forming, 1, now_us, within_us=20 * ROWS * ROW_US)

    assert forming.ended == []
