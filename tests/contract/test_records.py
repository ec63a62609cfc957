"""Records come back as they were written, in order, or are refused with a reason."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.log.errors import LogUnavailable, RecordRefused, RecordTooLarge, UnknownPartition
from headrace.log.port import Log, NewRecord, SentBatch, TopicPartition, Wanted
from tests.contract.conftest import MakeTopic
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import read, values, write, write_to

MEBIBYTE = 1024 * 1024


@pytest.mark.parametrize(
    "record",
    [
        NewRecord(b"key", b"value", (("content-type", b"text/plain"),)),
        NewRecord(None, b"without a key"),
        NewRecord(b"tombstone", None),
        NewRecord(b"", b""),
        NewRecord(b"\x00\xff", bytes(range(256))),
        NewRecord(b"k", b"v", (("null", None), ("empty", b""), ("bytes", b"\x00\x01"))),
        NewRecord(b"k", b"v", (("twice", b"1"), ("other", b"2"), ("twice", b"3"))),
        NewRecord(b"k", b"v", (("größe", b"utf-8 name"), ("", b"empty name"))),
        NewRecord(b"k", b"v", (("größe", b"1"), ("gr\udcf6\udcdfe", b"latin-1 name"), ("n", None))),
    ],
    ids=[
        "plain",
        "null-key",
        "tombstone",
        "empty",
        "binary",
        "headers",
        "repeated",
        "names",
        "names-of-any-bytes",
    ],
)
async def test_record_survives_round_trip(
    log: Log, make_topic: MakeTopic, record: NewRecord
) -> None:
    """Key, value and headers are kept, with null and empty told apart and headers in order."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader, log.producer() as producer:
        await write(producer, partition, record)
        (found,) = await read(reader, 1)
    assert (found.key, found.value, tuple(found.headers)) == tuple(record[:3])


async def test_first_batch_only_leaves_the_other_records(log: Log, make_topic: MakeTopic) -> None:
    """The caller sends those once the batch is acknowledged."""
    (partition,) = await make_topic(max_message_bytes="10000")
    records = [NewRecord(None, b"%d" % number * 4000) for number in range(5)]
    async with log.reader([partition]) as reader, log.producer() as producer:
        (sent,) = await producer.send(partition, records, first_batch_only=True)
        await sent.acknowledged
        await write(producer, partition, b"next")
        found = await read(reader, sent.size + 1)
    assert [each[:1] for each in values(found) if each] == [b"0", b"1", b"n"]


async def test_record_carries_its_topic_partition_and_offset(
    log: Log, make_topic: MakeTopic
) -> None:
    """Topic, partition and offset are those it was written to."""
    partitions = await make_topic(3)
    async with log.reader(partitions) as reader:
        await write_to(log, partitions[2], b"a", b"b")
        found = await read(reader, 2)
    assert [(r.topic, r.partition, r.offset) for r in found] == [
        (*partitions[2], 0),
        (*partitions[2], 1),
    ]


async def test_records_around_non_utf8_header_name_keep_their_order(
    log: Log, make_topic: MakeTopic
) -> None:
    """They travel together or not, but none is lost, and each has its own headers."""
    (partition,) = await make_topic()
    names = ["good", "gr\udcf6\udcdfe", "other", "\udcff", "last"]
    sent = [NewRecord(b"k", b"%d" % place, [(name, b"")]) for place, name in enumerate(names)]
    async with log.reader([partition]) as reader, log.producer() as producer:
        await write(producer, partition, *sent)
        found = await read(reader, len(sent))
    assert [(each.value, each.headers[0][0]) for each in found] == [
        (b"%d" % place, name) for place, name in enumerate(names)
    ]


async def test_poll_is_limited_by_bytes(log: Log, make_topic: MakeTopic) -> None:
    """The record that meets the limit is the last of its poll, and the others follow."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        await write_to(log, partition, *[bytes(100_000)] * 8)
        sizes: list[int] = []
        while sum(sizes) < 8:
            polled = await reader.poll(0.2, 500, 150_000)
            sizes += [len(records) for records in polled.values()]
    assert max(sizes) <= 2


async def test_records_of_many_chunks_keep_their_order(log: Log, make_topic: MakeTopic) -> None:
    """Chunks sent one after the other, unacknowledged in between, stay in order."""
    (partition,) = await make_topic()
    sent = [str(number).encode() for number in range(5000)]
    async with log.reader([partition]) as reader, log.producer() as producer:
        batches: list[SentBatch] = []
        for start in range(0, len(sent), 97):
            chunk = [NewRecord(None, value) for value in sent[start : start + 97]]
            batches += await producer.send(partition, chunk)
        for batch in batches:
            await batch.acknowledged
        found = await read(reader, len(sent))
    assert values(found) == sent


async def test_records_stay_in_their_partition(log: Log, make_topic: MakeTopic) -> None:
    """Each partition counts its own offsets and keeps its own order."""
    partitions = await make_topic(2)
    async with log.reader(partitions) as reader:
        await write_to(log, partitions[0], b"a0", b"a1")
        await write_to(log, partitions[1], b"b0", b"b1")
        found = await read(reader, 4)
    by_partition = {
        p: [(r.offset, r.value) for r in found if r.partition == p.partition] for p in partitions
    }
    assert by_partition == {
        partitions[0]: [(0, b"a0"), (1, b"a1")],
        partitions[1]: [(0, b"b0"), (1, b"b1")],
    }


async def test_record_keeps_given_timestamp(log: Log, make_topic: MakeTopic) -> None:
    """A record's own timestamp, in milliseconds, is the one that is read."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        await write_to(log, partition, NewRecord(None, b"v", (), 1_600_000_000_123))
        (found,) = await read(reader, 1)
    assert found.timestamp == 1_600_000_000_123


async def test_record_without_timestamp_is_stamped(log: Log, make_topic: MakeTopic) -> None:
    """The stamp is the time of day at which it was sent."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        before_ms = time.time_ns() // 1_000_000
        await write_to(log, partition, b"v")
        after_ms = time.time_ns() // 1_000_000
        (found,) = await read(reader, 1)
    assert before_ms <= found.timestamp <= after_ms


async def test_large_record_is_written_where_topic_allows_it(
    log: Log, make_topic: MakeTopic
) -> None:
    """Two mebibytes travel once `max.message.bytes` allows them."""
    (partition,) = await make_topic(max_message_bytes=str(4 * MEBIBYTE))
    value = bytes(range(256)) * (2 * MEBIBYTE // 256)
    async with log.reader([partition]) as reader:
        await write_to(log, partition, value)
        (found,) = await read(reader, 1)
    assert found.value == value


async def test_record_that_is_too_large_is_refused(log: Log, make_topic: MakeTopic) -> None:
    """The topic's `max.message.bytes` is what decides."""
    (partition,) = await make_topic(max_message_bytes=str(MEBIBYTE))
    async with log.producer() as producer:
        with pytest.raises(RecordTooLarge):
            await write(producer, partition, bytes(2 * MEBIBYTE))


async def test_producer_goes_on_after_record_that_was_too_large(
    log: Log, make_topic: MakeTopic
) -> None:
    """A refusal harms neither what was sent before nor what is sent after."""
    (partition,) = await make_topic(max_message_bytes=str(MEBIBYTE))
    async with log.reader([partition]) as reader, log.producer() as producer:
        await write(producer, partition, b"before")
        with pytest.raises(RecordTooLarge):
            await write(producer, partition, bytes(2 * MEBIBYTE))
        await write(producer, partition, b"after")
        found = await read(reader, 2)
    assert values(found) == [b"before", b"after"]


async def test_compacted_topic_takes_no_record_without_key(log: Log, make_topic: MakeTopic) -> None:
    """Such a record could never be compacted, and is refused."""
    (partition,) = await make_topic(cleanup_policy="compact")
    async with log.producer() as producer:
        with pytest.raises(RecordRefused):
            await write(producer, partition, NewRecord(None, b"v"))


async def test_acknowledged_record_can_be_read(log: Log, make_topic: MakeTopic) -> None:
    """Once `acknowledged` has ended, the end offset counts the record."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader, log.producer() as producer:
        (sent,) = await producer.send(partition, [NewRecord(None, b"v")])
        await sent.acknowledged
        assert await reader.end_offsets([partition]) == {partition: 1}


async def test_finished_producer_has_written_all_and_takes_no_more(
    log: Log, make_topic: MakeTopic
) -> None:
    """What was sent is acknowledged; another record may be sent by another producer."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        async with log.producer() as producer:
            (sent,) = await producer.send(partition, [NewRecord(b"k", b"v")])
            await producer.finish(DEADLINE_S)
            with pytest.raises(LogUnavailable, match="finished"):
                await producer.send(partition, [NewRecord(b"k", b"late")])
        await sent.acknowledged
        assert await reader.end_offsets([partition]) == {partition: 1}


async def test_sent_batches_contain_all_records(log: Log, make_topic: MakeTopic) -> None:
    """The sizes of the batches that a chunk is cut into add up to the chunk."""
    (partition,) = await make_topic()
    async with log.producer() as producer:
        chunk = [NewRecord(None, bytes(1000))] * 1500
        batches = await producer.send(partition, chunk)
        for sent in batches:
            await sent.acknowledged
    assert sum(sent.size for sent in batches) == 1500


async def test_empty_chunk_makes_no_batch(log: Log, make_topic: MakeTopic) -> None:
    """Sending nothing needs no acknowledgement."""
    (partition,) = await make_topic()
    async with log.producer() as producer:
        assert list(await producer.send(partition, [])) == []


async def test_send_to_unknown_partition_is_refused(log: Log, make_topic: MakeTopic) -> None:
    """A partition number beyond the topic's is a clear error, at once."""
    (partition,) = await make_topic()
    async with log.producer() as producer:
        with pytest.raises(UnknownPartition, match="has 1 partition"):
            await producer.send(TopicPartition(partition.topic, 1), [NewRecord(None, b"v")])


async def test_send_to_unknown_topic_is_refused(log: Log, unique_name: str) -> None:
    """No topic is made by sending to it."""
    async with log.producer() as producer:
        with pytest.raises(UnknownPartition, match="no such topic"):
            await producer.send(TopicPartition(unique_name, 0), [NewRecord(None, b"v")])


@pytest.mark.parametrize(
    "record",
    [
        NewRecord(None, "text"),  # type: ignore[arg-type]  # what is wrong with it is the point
        NewRecord(7, b"v"),  # type: ignore[arg-type]  # as above
        NewRecord(None, b"v", (("name", "text"),)),  # type: ignore[arg-type]  # as above
    ],
    ids=["value", "key", "header"],
)
async def test_value_other_than_bytes_is_refused(
    log: Log, make_topic: MakeTopic, record: NewRecord
) -> None:
    """Text or a number is refused before anything is sent."""
    (partition,) = await make_topic()
    async with log.producer() as producer:
        with pytest.raises(TypeError):
            await producer.send(partition, [record])


async def test_finish_does_not_wait_for_record_that_is_no_bytes(
    log: Log, make_topic: MakeTopic
) -> None:
    """What was sent before it is acknowledged, and nothing else is waited for."""
    (partition,) = await make_topic()
    async with log.producer() as producer:
        with pytest.raises(TypeError):
            await producer.send(partition, [NewRecord(None, "text")])  # type: ignore[arg-type]
        async with asyncio.timeout(DEADLINE_S / 2):
            await producer.finish(DEADLINE_S)


async def test_fetch_returns_records_between_its_offsets(log: Log, make_topic: MakeTopic) -> None:
    """They come in order, with their offsets, and none from before the first."""
    (partition,) = await make_topic()
    for number in range(6):
        await write_to(log, partition, b"%d" % number)
    found = await log.fetch(partition, 2, 4, MEBIBYTE)
    assert [(r.offset, r.value) for r in found if r.offset <= 4] == [
        (2, b"2"),
        (3, b"3"),
        (4, b"4"),
    ]
    assert found[0].offset == 2


async def test_fetch_with_small_responses_returns_all_records(
    log: Log, make_topic: MakeTopic
) -> None:
    """A response that holds fewer records than asked for is followed by another."""
    (partition,) = await make_topic()
    large = [bytes([number]) * 100_000 for number in range(5)]
    async with log.producer() as producer:
        for each in large:
            await write(producer, partition, each)
    found = await log.fetch(partition, 0, 4, 1)
    assert values(found) == large


async def test_fetch_returns_wanted_records_and_few_others(log: Log, make_topic: MakeTopic) -> None:
    """Others are returned in order as long as their values have the bytes that are allowed."""
    (partition,) = await make_topic()
    for number in range(8):
        await write_to(log, partition, b"%d" % number)
    found = await log.fetch(partition, 1, 6, MEBIBYTE, Wanted({1, 4, 6}, others_bytes=1))
    assert values(found) == [b"1", b"2", b"4", b"6"]


async def test_fetched_record_equals_polled_one(log: Log, make_topic: MakeTopic) -> None:
    """Key, headers and timestamp are the same either way."""
    (partition,) = await make_topic()
    record = NewRecord(b"k", b"v", (("größe", b"1"), ("gr\udcf6\udcdfe", None)), 1_700_000_000_123)
    async with log.reader([partition]) as reader, log.producer() as producer:
        await write(producer, partition, record)
        (polled,) = await read(reader, 1)
    (fetched,) = await log.fetch(partition, 0, 0, MEBIBYTE)
    assert fetched._replace(headers=list(fetched.headers)) == polled._replace(
        headers=list(polled.headers)
    )


async def test_fetch_beyond_end_returns_what_is_there(log: Log, make_topic: MakeTopic) -> None:
    """It does not wait for records that may never come."""
    (partition,) = await make_topic()
    await write_to(log, partition, b"only")
    assert values(await log.fetch(partition, 0, 7, MEBIBYTE)) == [b"only"]
    assert not await log.fetch(partition, 5, 7, MEBIBYTE)


async def test_fetch_passes_over_transaction_markers(log: Log, make_topic: MakeTopic) -> None:
    """Markers take offsets and are no records."""
    (partition,) = await make_topic()
    async with log.transactional_producer(f"{partition.topic}-t", partition.topic) as producer:
        for value in (b"first", b"second"):
            await producer.commit_transaction({partition: [NewRecord(None, value)]}, {})
    found = await log.fetch(partition, 0, 2, MEBIBYTE)
    assert [(r.offset, r.value) for r in found] == [(0, b"first"), (2, b"second")]


async def test_fetch_from_unknown_partition_is_refused(log: Log, make_topic: MakeTopic) -> None:
    """The error names the partition."""
    (partition,) = await make_topic()
    unknown = TopicPartition(partition.topic, 7)
    with pytest.raises(UnknownPartition, match="it has 1 partitions"):
        await log.fetch(unknown, 0, 0, MEBIBYTE)


async def test_written_ends_are_behind_last_records(log: Log, make_topic: MakeTopic) -> None:
    """An empty partition ends at 0, and a transaction's marker takes an offset."""
    written, sealed, empty = await make_topic(3)
    await write_to(log, written, b"first", b"second")
    async with log.transactional_producer(f"{sealed.topic}-t", sealed.topic) as producer:
        await producer.commit_transaction({sealed: [NewRecord(None, b"sealed")]}, {})

    async def are_behind() -> bool:
        return await log.written_ends([written, sealed, empty]) == {written: 2, sealed: 2, empty: 0}

    await eventually(are_behind, what="the marker is written")


async def test_written_end_of_unknown_partition_is_refused(log: Log, make_topic: MakeTopic) -> None:
    """As a fetch from it is."""
    (partition,) = await make_topic()
    with pytest.raises(UnknownPartition):
        await log.written_ends([partition._replace(partition=1)])
