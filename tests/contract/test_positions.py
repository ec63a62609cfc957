"""Positions in a partition: seeking, pausing, polling in parts, offsets by time."""

from __future__ import annotations

import asyncio

import pytest

from headrace.log.errors import Fenced, LogRefused, OffsetOutOfRange
from headrace.log.port import Committed, Log, NewRecord, Record, TopicPartition
from tests.contract.conftest import MakeTopic
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import read, values, write, write_to

TEN = [str(number).encode() for number in range(10)]


async def test_reader_without_seek_starts_at_end(log: Log, make_topic: MakeTopic) -> None:
    """A reader without a seek reads records written after it was entered, and none from before."""
    (partition,) = await make_topic()
    await write_to(log, partition, b"before")
    async with log.reader([partition]) as reader:
        await write_to(log, partition, b"after")
        assert values(await read(reader, 1)) == [b"after"]


async def test_reader_reads_from_where_it_seeks(log: Log, make_topic: MakeTopic) -> None:
    """`seek` makes an offset the next one, whatever was the end."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.reader([partition]) as reader:
        reader.seek(partition, 7)
        assert values(await read(reader, 3)) == [b"7", b"8", b"9"]


async def test_first_poll_after_seek_into_large_batch_returns_its_records(
    log: Log, make_topic: MakeTopic
) -> None:
    """The first poll returns records although many of the batch lie before the sought offset."""
    (partition,) = await make_topic()
    await write_to(log, partition, *[b"v"] * 2000)
    async with log.reader([partition]) as reader:
        for offset in (1900, 700):
            reader.seek(partition, offset)
            polled = await reader.poll(5.0, 512)
            assert polled[partition][0].offset == offset


async def test_seeking_back_reads_records_again(log: Log, make_topic: MakeTopic) -> None:
    """Records that were read already come once more."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        await write_to(log, partition, *TEN)
        await read(reader, 10)
        reader.seek(partition, 8)
        assert values(await read(reader, 2)) == [b"8", b"9"]


async def test_seeking_forward_skips_records(log: Log, make_topic: MakeTopic) -> None:
    """After a read of one record, a seek skips those that a client may hold already."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.reader([partition]) as reader:
        reader.seek(partition, 0)
        first = await read(reader, 1, max_records=1)
        reader.seek(partition, 9)
        assert values([*first, *await read(reader, 1)]) == [b"0", b"9"]


async def test_poll_returns_at_most_max_records(log: Log, make_topic: MakeTopic) -> None:
    """`max_records` bounds all partitions together, and the rest comes later, in order."""
    partitions = await make_topic(2)
    for partition in partitions:
        await write_to(log, partition, *TEN)
    sizes: list[int] = []
    found: dict[TopicPartition, list[bytes | None]] = {p: [] for p in partitions}
    async with log.reader(partitions) as reader:
        for partition in partitions:
            reader.seek(partition, 0)

        async def have_all() -> bool:
            polled = await reader.poll(0.1, 3)
            sizes.append(sum(map(len, polled.values())))
            for name, records in polled.items():
                found[name] += values(records)
            return sum(sizes) >= 20

        await eventually(have_all)
    assert max(sizes) <= 3
    assert found == dict.fromkeys(partitions, TEN)


async def test_poll_without_records_is_empty(log: Log, make_topic: MakeTopic) -> None:
    """With no record there, a poll ends by its timeout and is empty."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        assert not await reader.poll(0.05, 10)


async def test_poll_skips_only_paused_partition(log: Log, make_topic: MakeTopic) -> None:
    """Polling goes on over a pause; only the paused partition gives nothing."""
    paused, other = await make_topic(2)
    async with log.reader([paused, other]) as reader:
        reader.pause([paused])
        await write_to(log, paused, b"held back")
        await write_to(log, other, *TEN)
        assert values(await read(reader, 10)) == TEN


async def test_resumed_partition_neither_loses_nor_repeats_records(
    log: Log, make_topic: MakeTopic
) -> None:
    """Reading goes on where it stood, also when pauses come between small polls."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    found: list[Record] = []
    async with log.reader([partition]) as reader:
        reader.seek(partition, 0)
        while len(found) < 10:
            found += await read(reader, 1, max_records=3)
            reader.pause([partition])
            assert not await reader.poll(0.0, 10)
            reader.resume([partition])
    assert values(found) == TEN


async def test_resuming_wakes_waiting_poll(log: Log, make_topic: MakeTopic) -> None:
    """Records that lie there are given at once, not at the end of its timeout."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader, asyncio.TaskGroup() as tasks:
        reader.pause([partition])
        await write_to(log, partition, b"v")
        poll = tasks.create_task(reader.poll(3600.0, 10), name="poll")  # longer than the deadline
        async with log.reader([partition]) as other:
            other.seek(partition, 0)
            await read(other, 1)
            await other.poll(0.05, 1)  # in vain: by its end the first poll has long been waiting
        assert not poll.done()
        reader.resume([partition])
        async with asyncio.timeout(DEADLINE_S):
            assert values((await poll)[partition]) == [b"v"]


async def test_pausing_or_seeking_unassigned_partition_is_refused(
    log: Log, make_topic: MakeTopic
) -> None:
    """A partition that is not the reader's is refused by name."""
    mine, other = await make_topic(2)
    async with log.reader([mine]) as reader:
        with pytest.raises(Fenced, match=str(other)):
            reader.pause([other])
        with pytest.raises(Fenced, match=str(other)):
            reader.resume([other])
        with pytest.raises(Fenced, match=str(other)):
            reader.seek(other, 0)


async def test_offset_beyond_end_is_out_of_range(log: Log, make_topic: MakeTopic) -> None:
    """`poll` raises, and names the partition and the position."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.reader([partition]) as reader:
        reader.seek(partition, 99)
        with pytest.raises(OffsetOutOfRange) as caught:
            await read(reader, 1)
    assert caught.value.positions == {partition: 99}


async def test_seek_after_offset_out_of_range_continues_reading(
    log: Log, make_topic: MakeTopic
) -> None:
    """After a seek into what is held, reading goes on."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.reader([partition]) as reader:
        reader.seek(partition, 99)
        with pytest.raises(OffsetOutOfRange):
            await read(reader, 1)
        reader.seek(partition, 9)
        assert values(await read(reader, 1)) == [b"9"]


async def test_offsets_of_beginning_and_end_follow_records(log: Log, make_topic: MakeTopic) -> None:
    """An empty partition begins and ends at 0; a written one ends after its last record."""
    written, empty = await make_topic(2)
    await write_to(log, written, *TEN)
    async with log.reader([written, empty]) as reader:
        assert await reader.beginning_offsets([written, empty]) == {written: 0, empty: 0}
        assert await reader.end_offsets([written, empty]) == {written: 10, empty: 0}


@pytest.mark.parametrize(
    ("timestamp_ms", "offset"),
    [(0, 0), (1_600_000_001_000, 0), (1_600_000_001_001, 1), (1_600_000_003_001, None)],
    ids=["before", "at", "between", "after"],
)
async def test_offsets_by_time_are_first_at_or_after_timestamp(
    log: Log, make_topic: MakeTopic, timestamp_ms: int, offset: int | None
) -> None:
    """The first record at or after a time; None where there is none."""
    (partition,) = await make_topic(retention_ms="-1")
    async with log.producer() as producer:
        for second in (1, 2, 3):
            at_ms = 1_600_000_000_000 + 1000 * second
            await write(producer, partition, NewRecord(None, b"v", (), at_ms))
    async with log.reader([partition]) as reader:
        assert await reader.offsets_for_times({partition: timestamp_ms}) == {partition: offset}


async def test_reader_has_no_committed_offset(log: Log, make_topic: MakeTopic) -> None:
    """It is in no group, so there is nothing to ask for and nothing to commit to."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        assert await reader.committed([partition]) == {partition: None}
        with pytest.raises(LogRefused):
            await reader.commit({partition: Committed(0)})


async def test_contact_is_recent_while_polling(log: Log, make_topic: MakeTopic) -> None:
    """A log that answers was heard of within seconds."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        await reader.poll(0.1, 1)
        assert 0.0 <= reader.last_contact_s() < 5.0


async def test_position_is_behind_last_returned_record(log: Log, make_topic: MakeTopic) -> None:
    """It is where one sought, and moves with what polls return."""
    (partition,) = await make_topic()
    await write_to(log, partition, b"a", b"b", b"c")
    async with log.reader([partition]) as reader:
        reader.seek(partition, 1)
        assert await reader.position(partition) == 1
        await read(reader, 2)
        assert await reader.position(partition) == 3


async def test_position_of_unassigned_partition_is_refused(log: Log, make_topic: MakeTopic) -> None:
    """Only an assigned partition has one."""
    mine, other = await make_topic(2)
    async with log.reader([mine]) as reader:
        with pytest.raises(Fenced, match=str(other)):
            await reader.position(other)


@pytest.mark.parametrize(("timestamp_ms", "offset"), [(-(10**14), 0), (-1, 0), (10**30, None)])
async def test_offset_is_found_for_time_that_no_record_can_have(
    log: Log, make_topic: MakeTopic, timestamp_ms: int, offset: int | None
) -> None:
    """A person may ask for the year 1960, or for nanoseconds."""
    (partition,) = await make_topic()
    await write_to(log, partition, b"first", b"second")
    async with log.reader([partition]) as reader:
        assert await reader.offsets_for_times({partition: timestamp_ms}) == {partition: offset}
