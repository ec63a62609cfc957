"""Offsets without records in the embedded log, as transaction markers leave them in Kafka."""

from __future__ import annotations

import pytest

from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from tests.support.logs import read, write_to

P0 = TopicPartition("t", 0)


@pytest.fixture
async def log() -> MemoryLog:
    """A log with one topic of one partition."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("t", 1, {})], replication_factor=1)
    return log


async def test_reading_skips_gap(log: MemoryLog) -> None:
    """Offsets that markers took are not waited for."""
    async with log.reader([P0]) as reader:
        await write_to(log, P0, b"a")
        log.faults.partitions.skip_offsets(P0, 2)
        await write_to(log, P0, b"b")
        assert [record.offset for record in await read(reader, 2)] == [0, 3]


async def test_position_passes_gap_at_end(log: MemoryLog) -> None:
    """A reader reaches the end offset though no record lies just below it."""
    await write_to(log, P0, b"a")
    log.faults.partitions.skip_offsets(P0, 2)
    async with log.reader([P0]) as reader:
        reader.seek(P0, 0)
        await read(reader, 1)
        assert await reader.poll(0.0, 10) == {}
        assert await reader.position(P0) == 3
