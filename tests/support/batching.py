"""The batcher's rules with requests that wait: for tests of one rule at a time."""

from __future__ import annotations

from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Batch, Envelope, Request
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.transport.channels import Demand
from tests.support.work import NOW_US, Limits, make_request

KEY = ("digits", "1")
NOW_MS = NOW_US // 1000
LINE_US = {1: 1050, 2: 1100, 4: 1200, 8: 1400, 16: 1800, 32: 2600}


def learned(us_of: dict[int, int]) -> Latency:
    """Return learned run times, by rows."""
    latency = Latency()
    for rows, us in us_of.items():
        for _ in range(3):
            latency.observe((64,), rows, us)
    return latency


def forming_of(limits: Limits) -> DynamicBatcher:
    """Return a batcher with the same limits for every model."""
    return DynamicBatcher(lambda _name, _version: limits, "test")


def filled(limits: Limits, *requests: Request) -> DynamicBatcher:
    """Return a batcher in which these requests wait."""
    forming = forming_of(limits)
    for request in requests:
        forming.add(request)
    return forming


def request_of(
    *,
    tenant: str = "",
    priority: int = 0,
    in_ms: int = 0,
    shape_class: tuple[int, ...] = (64,),
    arrived_us: int = NOW_US,
    rows: int = 1,
) -> Request:
    """A request that came now, or then."""
    envelope = Envelope(
        deadline_ms=NOW_MS + in_ms if in_ms else 0, tenant=tenant, priority=priority
    )
    return make_request(
        shape_class=shape_class, ingested_us=arrived_us, envelope=envelope, rows=rows
    )


def pulled(forming: DynamicBatcher, now_us: int = NOW_US, demand: Demand | None = None) -> Batch:
    """The next batch, of which there is one."""
    batch = forming.next(KEY, now_us, demand or Demand())
    assert batch is not None
    return batch


def backlogged(limits: Limits, row_us: int) -> DynamicBatcher:
    """One whose queue has been getting shorter by a row in so many microseconds."""
    forming = filled(limits, *(make_request() for _ in range(100)))
    for number in range(5):
        pulled(forming, NOW_US - 4 * 4 * row_us + number * 4 * row_us)
    return forming
