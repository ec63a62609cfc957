"""A batcher keeps reading the events of other executors through trouble with the log."""

from __future__ import annotations

import asyncio
from itertools import chain

from msgspec.structs import replace

from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicInfo, TopicPartition
from headrace.protocol.codec.events import encode_event
from headrace.protocol.events import ExecutorEvent
from headrace.transport.heartbeat import ExecutorEventReader
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import write_to

EVENTS = TopicPartition("events", 0)


def announcement(executor: str) -> NewRecord:
    """Return the announcement of an executor without models."""
    event = ExecutorEvent(executor=executor, silent_after_ms=1000, partitions=[0], models=[])
    return NewRecord(None, encode_event(event))


async def test_executor_events_read_with_pauses_are_complete() -> None:
    """A reader that pauses between polls hears every event once, in order."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("events", 1, {})], replication_factor=1)
    heard: list[str] = []
    polls = 0

    def hear(events: list[ExecutorEvent]) -> None:
        nonlocal polls
        polls += 1
        heard.extend(each.executor for each in events)

    listening = ExecutorEventReader(
        log,
        TopicPartition("events", 1),
        replace(TUNING.transport, events_poll_s=0.01),
        pause_s=0.01,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listening.run(hear))
        await eventually(lambda: polls)  # its position is the end, at 0
        for name in "abcde":
            await write_to(log, EVENTS, announcement(name))
        await eventually(lambda: len(heard) == 5)
        listening.close()

    assert heard == [*"abcde"]


async def test_executor_events_survive_retention_during_outage() -> None:
    """A position that the log no longer holds is looked up again until the log answers."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("events", 1, {})], replication_factor=1)
    heard: list[list[str]] = []
    listening = ExecutorEventReader(
        log,
        TopicPartition("events", 1),
        replace(TUNING.transport, events_poll_s=0.01, events_retry_s=0.01),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            listening.run(lambda events: heard.append([each.executor for each in events]))
        )
        await eventually(lambda: heard)  # its position is the end, at 0
        log.faults.brokers.fail_requests(1)
        log.faults.partitions.skip_offsets(EVENTS, 5)
        log.faults.partitions.trim(EVENTS, 5)
        await eventually(lambda: not log.faults.brokers.requests_to_fail)
        async with asyncio.timeout(DEADLINE_S):
            while not any(heard):  # executors announce themselves again and again
                await write_to(log, EVENTS, announcement("a"))
                await asyncio.sleep(0.01)
        listening.close()

    assert set(chain.from_iterable(heard)) == {"a"}
