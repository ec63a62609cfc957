"""What a batcher hears of executors elsewhere goes on through trouble with the log."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from headrace.log.errors import LogUnavailable, OffsetOutOfRange
from headrace.log.memory import MemoryLog
from headrace.log.memory.consumer import MemoryReader
from headrace.log.port import NewRecord, Record, TopicInfo, TopicPartition
from headrace.protocol.codec.events import encode_event
from headrace.protocol.events import ExecutorEvent
from headrace.transport.heartbeat import ExecutorEventReader
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import write_to

EVENTS = TopicPartition("events", 0)


def announcement(executor: str) -> NewRecord:
    """Return the announcement of an executor without models."""
    event = ExecutorEvent(executor=executor, silent_after_ms=1000, partitions=[0], models=[])
    return NewRecord(None, encode_event(event))


async def test_executor_events_survive_retention_during_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A position that the log no longer holds is looked up again until the log answers."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("events", 1, {})], replication_factor=1)
    asked = 0
    polling, asking = MemoryReader.poll, MemoryReader.end_offsets

    async def poll(
        reader: MemoryReader, timeout_s: float, most: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        if asked < 2:
            raise OffsetOutOfRange("the log does not hold it", {EVENTS: 0})
        return await polling(reader, timeout_s, most)

    async def ends(
        reader: MemoryReader, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise LogUnavailable("nobody answers")
        return await asking(reader, partitions)

    monkeypatch.setattr(MemoryReader, "poll", poll)
    monkeypatch.setattr(MemoryReader, "end_offsets", ends)
    heard: list[str] = []
    listening = ExecutorEventReader(
        log,
        TopicPartition("events", 1),
        replace(TUNING.transport, events_poll_s=0.01, events_retry_s=0.01),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            listening.run(lambda events: heard.extend(each.executor for each in events))
        )
        await eventually(lambda: asked == 2)
        await write_to(log, EVENTS, announcement("a"))
        await eventually(lambda: heard == ["a"])
        listening.close()
