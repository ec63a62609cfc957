"""Offsets that are committed with answers."""

from __future__ import annotations

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.source_offsets import SourceOffsets
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.messages import Request
from tests.support.work import make_request

RESULTS = TopicPartition("results", 0)
RESPONSES = TopicPartition("responses", 0)


def test_record_of_results_is_committed_with_last_of_its_requests() -> None:
    """A process that ends before has to read the record again."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    assignment = tracker.assign(RESULTS, AckedOffsets(0))
    store = OffsetStore(tracker, SourceOffsets(MemoryLog(), "requests"), "requests", "results")
    ack_handle = assignment.admit(0, 10)
    ack_handle.parts = 3
    requests: list[Request] = []
    for _ in range(3):
        requests.append(make_request())
        requests[-1].ack_handle = ack_handle
    source = Committed(7)

    two = store.offsets(0, source, [(request, RESPONSES) for request in requests[:2]])
    requests[0].ack_handle.ack()
    rest = store.offsets(0, source, [(request, RESPONSES) for request in requests[1:]])

    assert [two[RESULTS].offset, rest[RESULTS].offset] == [0, 1]
