"""Processes of the release before beside current ones, with each stage a process."""

from __future__ import annotations

from pathlib import Path

import msgpack
from msgspec.structs import replace

from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.topics import Stage, Topic
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Caller, Grouping, log_for, serving, settings_of

APART: Grouping = [(Stage.INGEST,), (Stage.BATCHER,), (Stage.EXECUTOR,), (Stage.RESPONDER,)]
WRITERS: Grouping = [(Stage.INGEST,), (Stage.EXECUTOR,)]
BEFORE = replace(TUNING, transport=replace(TUNING.transport, max_record_requests=1))
"""A record with one request and its value has the format of the release before."""
IN_NO_RECORD, IN_ALL_RECORDS = 100, 2**31 - 1
"""Values of at least so many bytes stay on `requests`; the release before knows no such records."""
AT_ONCE = 20
ROUNDS = 4


async def formats_in(log: MemoryLog, topic: str) -> set[int]:
    """Return the formats of the records of a topic."""
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    formats: set[int] = set()
    async with log.reader(partitions) as reader:
        left = sum((await reader.end_offsets(partitions)).values())
        for partition in partitions:
            reader.seek(partition, 0)
        while left > 0:
            for records in (await reader.poll(0.1, 1000)).values():
                left -= len(records)
                formats |= {msgpack.unpackb(each.value or b"").get("format", 1) for each in records}
    return formats


async def test_processes_of_release_before_join_and_leave_without_lost_request(
    tmp_path: Path,
) -> None:
    """Records of the former release are read beside those of the current release, under load."""
    current = settings_of(tmp_path, inline_payload_bytes=IN_NO_RECORD)
    before = settings_of(tmp_path, inline_payload_bytes=IN_ALL_RECORDS)
    log = await log_for(current)
    caller = Caller(current, log)

    async def send() -> None:
        for _ in range(ROUNDS):
            await caller.send(AT_ONCE)
            await eventually(lambda: caller.sent - caller.answered() <= AT_ONCE)

    async with serving(current, log, APART):
        await send()
        async with serving(before, log, WRITERS, BEFORE):
            await send()
            # All may have been read before the new member of the group had a partition.
            await eventually(lambda: _sent_more(caller, log, current))
        await send()
        await caller.all_answered()
    assert set(await caller.check()) == set(range(caller.sent))
    assert await formats_in(log, current.topic(Topic.ITEMS)) == {1, 3}


async def _sent_more(caller: Caller, log: MemoryLog, settings: Settings) -> bool:
    """Send some requests; return whether a record of the release before is among the items."""
    await caller.send(AT_ONCE)
    return 1 in await formats_in(log, settings.topic(Topic.ITEMS))
