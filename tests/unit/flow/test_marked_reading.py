"""Reading through the run gate: chunks are divided, marked before they are read, and left again."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from headrace.consumer.quarantine import MarkedReading
from headrace.consumer.ready_queue import PolledRecords
from headrace.crash_isolation.isolation import Isolated, Isolation
from headrace.crash_isolation.poison_search import Alone
from headrace.crash_isolation.run_gate import RunGate
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.log.port import Record, TopicPartition
from headrace.telemetry.metrics import Metrics

ONE = TopicPartition("requests", 0)


class Reading:
    """Five records of a partition, two of which one marker can name."""

    def __init__(self, suspects: frozenset[int] = frozenset()) -> None:
        self.marked: list[list[int]] = []
        self.gate = RunGate(self._keep)
        self.ended: list[Isolated] = []
        self.isolation = Isolation(frozenset(), suspects, lambda isolated: None)
        metrics = Metrics(registry=CollectorRegistry())
        self.reading = MarkedReading(
            self.gate, lambda partition: self.isolation, self.ended.append, metrics, 2
        )
        tracker = InFlightTracker(Budget(1 << 20), lambda: None)
        self.assignment = tracker.assign(ONE, AckedOffsets(0))
        self.records = [Record(*ONE, offset, 0, None, b"value", ()) for offset in range(5)]

    async def _keep(self) -> None:
        self.marked.append(self.gate.running(ONE))

    def polled(self, isolation: Isolation | None = None) -> PolledRecords:
        return PolledRecords(self.assignment, self.records, isolation)


def test_polled_records_stay_together_without_markers() -> None:
    """Outside quarantine nothing is divided."""
    given = Reading()
    polled = given.polled()

    assert list(given.reading.divide(polled)) == [polled]


def test_polled_records_are_divided_into_parts_that_marker_can_name() -> None:
    """The last part may be smaller."""
    given = Reading()
    given.gate.is_marking = True

    parts = list(given.reading.divide(given.polled()))

    assert [len(part.records) for part in parts] == [2, 2, 1]
    assert {part.isolation for part in parts} == {given.isolation}


async def test_records_are_marked_before_they_are_read_except_accused_ones() -> None:
    """The stage parks the suspects, which are marked when they run alone."""
    given = Reading(suspects=frozenset({1, 3}))
    given.gate.is_marking = True

    await given.reading.admit(given.polled())

    assert given.marked == [[0, 2, 4]]
    assert not given.reading.is_idle


async def test_leaving_takes_records_out_of_next_marker() -> None:
    """The stage has read and passed on what it received."""
    given = Reading()
    given.gate.is_marking = True
    await given.reading.admit(given.polled())

    given.reading.leave()

    assert given.gate.running(ONE) == []
    assert given.reading.is_idle


async def test_reading_is_not_idle_while_what_it_receives_waits_for_lone_run() -> None:
    """Suspects in it were neither parked nor passed: idle, it would let them be forgotten."""
    given = Reading(suspects=frozenset({1, 3}))
    given.gate.is_marking = True
    await given.gate.enter_alone(Alone(ONE, 9, 0))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(given.reading.admit(given.polled()), name="admit")
        await asyncio.sleep(0)  # it has begun to wait
        was_idle = given.reading.is_idle
        given.gate.leave_alone()

    assert not was_idle


async def test_isolated_record_that_runs_no_model_has_ended_when_it_was_read() -> None:
    """A record that runs a model ends with the run of its last request instead."""
    given = Reading()
    given.gate.is_marking = True
    record = given.records[0]
    isolated = Isolated(given.assignment, record, given.assignment.admit(0, 100))
    await given.reading.admit(given.polled(given.isolation._replace(isolated=isolated)))

    given.reading.leave()

    assert given.ended == [isolated]
    assert given.gate.alone is None
