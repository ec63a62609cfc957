"""A source of an embedded log's topic, and a stage behind it that acknowledges on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightAck
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, Record, TopicPartition
from headrace.telemetry.metrics import Metrics
from headrace.tuning import Tuning
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, write_to
from tests.support.tuning import QUICK

TOPIC, GROUP = "requests", "group"
ONE = TopicPartition(TOPIC, 0)


class Stage:
    """A stage that admits what it receives and acknowledges when it is told to."""

    def __init__(self, source: Source, registry: CollectorRegistry) -> None:
        self.source = source
        self.registry = registry
        self.offsets: list[int] = []
        self.ack_handles: list[InFlightAck] = []
        self.ended = False

    async def run(self) -> None:
        while (delivery := await self.source.receive()) is not None:
            for record in delivery.records:
                self._admit(delivery.assignment, record)
        self.ended = True

    def _admit(self, assignment: AssignedPartition, record: Record) -> None:
        if record.offset in assignment.progress:
            assignment.skip_answered(record.offset)
            return
        self.offsets.append(record.offset)
        self.ack_handles.append(assignment.admit(record.offset, len(record.value or b"")))

    def ack(self, offsets: Sequence[int]) -> None:
        for ack_handle in [one for one in self.ack_handles if one.offset in offsets]:
            self.ack_handles.remove(ack_handle)
            ack_handle.ack()

    def ack_all(self) -> None:
        self.ack([ack_handle.offset for ack_handle in self.ack_handles])


def make_source(
    log: MemoryLog,
    tuning: Tuning = QUICK,
    on_revoked: Callable[[], None] = lambda: None,
    registry: CollectorRegistry | None = None,
    **changes: object,
) -> Source:
    """A source of the topic that commits; its metrics go to the registry."""
    settings = {
        "topic": TOPIC,
        "group": GROUP,
        "progress_group": GROUP,
        "commits": True,
        "budget_bytes": 1_000_000,
        "drain_timeout_s": 5.0,
        **changes,
    }
    source = SourceSettings(**settings)  # type: ignore[arg-type]  # by name
    metrics = Metrics(registry or CollectorRegistry())
    return Source(log, source, metrics, on_revoked=on_revoked, tuning=tuning)


@asynccontextmanager
async def reading(
    log: MemoryLog,
    tuning: Tuning = QUICK,
    on_revoked: Callable[[], None] = lambda: None,
    **changes: object,
) -> AsyncIterator[Stage]:
    """A running source with a stage behind it; leaving stops it as a process does."""
    registry = CollectorRegistry()
    source = make_source(log, tuning, on_revoked, registry, **changes)
    stage = Stage(source, registry)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await source.assigned.wait()
        yield stage
        source.stop_reading()
        await work
        stage.ack_all()
        await source.close_down(5)
        await running


async def committed(log: MemoryLog, partition: TopicPartition = ONE) -> Committed | None:
    """Return the committed offsets of the group."""
    return (await log.committed(GROUP, [partition]))[partition]


async def progress(log: MemoryLog) -> AckedOffsets | None:
    """The same, decoded."""
    found = await committed(log)
    return None if found is None else AckedOffsets.from_committed(found)


async def fill(log: MemoryLog, count: int, partition: TopicPartition = ONE) -> None:
    """Write records of ten bytes."""
    await write_to(log, partition, *[b"x" * 10] * count)


async def commit(log: MemoryLog, offset: Committed) -> None:
    """Commit, as an earlier member did."""
    listener = RecordingListener()
    async with log.member(GROUP, [TOPIC], listener) as member:
        await eventually(lambda: ONE in listener.held)
        await member.commit({ONE: offset})
