"""A model that wants its batches to fill keeps nobody past their deadline for it."""

from __future__ import annotations

from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Envelope
from headrace.services.batcher.batcher import DynamicBatcher
from tests.support.work import NOW_US, Limits, make_request

KEY = ("digits", "1")
RUN_US = 10_000


def forming_with(*deadlines_ms: int) -> DynamicBatcher:
    """A delay of 100 ms, runs of 10 ms, and requests with deadlines in so many milliseconds."""
    latency = Latency()
    latency.observe((64,), 1, RUN_US)
    latency.observe((64,), 4, RUN_US)
    limits = Limits(max_batch_size=4, max_queue_delay_ms=100, latency=latency)
    forming = DynamicBatcher(lambda _name, _version: limits, "test")
    for in_ms in deadlines_ms:
        deadline_ms = NOW_US // 1000 + in_ms if in_ms else 0
        forming.add(make_request(envelope=Envelope(deadline_ms=deadline_ms)), NOW_US)
    return forming


def test_queue_delay_ends_in_time_for_earliest_deadline() -> None:
    """The instance is free: a request that expires there would have been answered without it."""
    forming = forming_with(0, 80, 50)

    assert forming.next(KEY, NOW_US) is None
    due_us = forming.next_event_us(NOW_US)
    assert due_us is not None
    assert NOW_US + 30_000 < due_us <= NOW_US + 50_000 - RUN_US
    batch = forming.next(KEY, due_us)

    assert batch is not None
    assert (batch.rows, forming.ended) == (3, [])


def test_next_batch_gets_whole_queue_delay() -> None:
    """An urgent request that has gone does not shorten the delay of the next batch."""
    forming = forming_with(20)
    assert forming.next(KEY, NOW_US + 10_000) is not None

    forming.add(make_request(ingested_us=NOW_US + 10_000), NOW_US + 10_000)

    assert forming.next(KEY, NOW_US + 20_000) is None
    assert forming.next_event_us(NOW_US + 20_000) == NOW_US + 110_000
