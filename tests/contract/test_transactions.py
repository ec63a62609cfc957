"""Records and offsets sealed together: seen whole or not at all, by one producer of an id."""

from __future__ import annotations

import asyncio

import pytest

from headrace.log.errors import (
    Fenced,
    LogRefused,
    RecordsRefused,
    UnknownPartition,
)
from headrace.log.port import (
    Committed,
    Log,
    NewRecord,
    TopicInfo,
    TopicPartition,
    TransactionalProducer,
)
from headrace.tuning import TUNING
from tests.contract.conftest import MakeTopic
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling, read, values, write_to


def _news(*contents: bytes) -> list[NewRecord]:
    return [NewRecord(b"key", content) for content in contents]


async def _committed(log: Log, group: str, partition: TopicPartition) -> Committed | None:
    return (await log.committed(group, [partition]))[partition]


async def _is_committed(log: Log, group: str, partition: TopicPartition, offset: int) -> None:
    """Wait for a sealed offset, which Kafka shows some milliseconds after the seal has ended."""

    async def is_there() -> bool:
        found = await _committed(log, group, partition)
        return found is not None and found.offset == offset

    await eventually(is_there, what=f"{group} has committed {partition} at {offset}")


async def _after_a_successor(log: Log, name: str, partition: TopicPartition) -> Committed | None:
    """Return the committed offsets of the group, as a successor of its producer sees them."""
    async with log.transactional_producer(name, name):
        return await _committed(log, name, partition)


async def test_transaction_commits_records_and_offsets(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Records of a committed transaction are read; the group's offset keeps its metadata."""
    answers, source = await make_topic(2)
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await producer.commit_transaction(
            {answers: _news(b"a", b"b")}, {source: Committed(7, "v1")}
        )
        assert values(await read(reader, 2)) == [b"a", b"b"]
    assert await _after_a_successor(log, unique_name, source) == Committed(7, "v1")


async def test_consecutive_transactions_of_one_producer_are_committed(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """One producer seals again and again, over several partitions, in order."""
    partitions = await make_topic(3)
    async with (
        log.reader(partitions) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        for number in range(20):
            content = str(number).encode()
            await producer.commit_transaction(
                {each: _news(content) for each in partitions}, {partitions[0]: Committed(number)}
            )
        found = await read(reader, 60)
    for each in partitions:
        mine = [record for record in found if record.partition == each.partition]
        assert values(mine) == [str(number).encode() for number in range(20)]
    assert await _after_a_successor(log, unique_name, partitions[0]) == Committed(19)


async def test_transaction_of_only_records_or_only_offsets_is_committed(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Either may be empty, and so may both."""
    answers, source = await make_topic(2)
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await producer.commit_transaction({}, {})
        await producer.commit_transaction({}, {source: Committed(3)})
        await producer.commit_transaction({answers: _news(b"a")}, {})
        await producer.commit_transaction({answers: []}, {source: Committed(4)})
        assert values(await read(reader, 1)) == [b"a"]
    assert await _after_a_successor(log, unique_name, source) == Committed(4)


async def test_transaction_marker_occupies_offset(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """The end of a transaction leaves a gap of one in every partition that it wrote to."""
    (answers,) = await make_topic()
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await producer.commit_transaction({answers: _news(b"a", b"b")}, {})
        await producer.commit_transaction({answers: _news(b"c")}, {})
        assert [record.offset for record in await read(reader, 3)] == [0, 1, 3]
        ends = await reader.end_offsets([answers])
    assert ends == {answers: 5}


async def test_transaction_commits_offsets_of_two_topics(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """One group, several topics: as a responder does that reads results of requests."""
    (source,) = await make_topic()
    other = TopicPartition(f"{unique_name}-other", 0)
    await log.create_topics([TopicInfo(other.topic, 1, {})], replication_factor=1)
    async with log.transactional_producer(unique_name, unique_name) as producer:
        await producer.commit_transaction({}, {source: Committed(5, "v1"), other: Committed(9)})
    await _after_a_successor(log, unique_name, source)
    assert await log.committed(unique_name, [source, other]) == {
        source: Committed(5, "v1"),
        other: Committed(9),
    }


async def test_successor_fences_producer_of_same_id(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Once another producer of the id has entered, the former one seals nothing any more."""
    answers, source = await make_topic(2)
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as former,
        log.transactional_producer(unique_name, unique_name) as successor,
    ):
        with pytest.raises(Fenced):
            await former.commit_transaction({answers: _news(b"zombie")}, {source: Committed(99)})
        await successor.commit_transaction({answers: _news(b"mine")}, {source: Committed(1)})
        assert values(await read(reader, 1)) == [b"mine"]
    assert await _after_a_successor(log, unique_name, source) == Committed(1)


async def test_fenced_producer_cannot_commit_offsets_alone(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A zombie that has only offsets to seal is refused as well."""
    (source,) = await make_topic()
    async with (
        log.transactional_producer(unique_name, unique_name) as former,
        log.transactional_producer(unique_name, unique_name),
    ):
        with pytest.raises(Fenced):
            await former.commit_transaction({}, {source: Committed(99)})
    assert await _committed(log, unique_name, source) is None


async def test_producer_of_other_id_is_not_fenced(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Producers of different ids seal side by side, also into one partition."""
    (answers,) = await make_topic()
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(f"{unique_name}-1", unique_name) as one,
        log.transactional_producer(f"{unique_name}-2", unique_name) as two,
    ):
        await asyncio.gather(
            *(each.commit_transaction({answers: _news(b"v")}, {}) for each in (one, two)),
        )
        await one.commit_transaction({answers: _news(b"v")}, {})
        assert len(await read(reader, 3)) == 3


async def test_successor_reads_latest_committed_offsets(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Committed offsets that are read after a successor entered are never old, 100 times."""
    (source,) = await make_topic()
    seen: list[Committed | None] = []
    for number in range(1, 101):
        async with log.transactional_producer(unique_name, unique_name) as producer:
            seen.append(await _committed(log, unique_name, source))
            await producer.commit_transaction({}, {source: Committed(number)})
    assert seen == [None, *map(Committed, range(1, 100))]


async def test_oversized_record_is_refused_before_transaction_begins(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """All of them are named; nothing of the seal is seen, and its producer seals what is left."""
    answers, source = await make_topic(2, max_message_bytes="2000")
    sent = _news(b"x" * 5000, b"small", b"x" * 6000)
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        with pytest.raises(RecordsRefused) as refusal:
            await producer.commit_transaction({answers: sent}, {source: Committed(7)})
        assert list(refusal.value.refused) == [answers]
        assert list(refusal.value.refused[answers]) == [0, 2]
        assert producer.is_usable
        await producer.commit_transaction({answers: sent[1:2]}, {source: Committed(1)})
        assert values(await read(reader, 1)) == [b"small"]
    assert await _after_a_successor(log, unique_name, source) == Committed(1)


async def test_refused_records_far_behind_in_transaction_are_named_by_their_place(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Records are packed some at a time; a refused one is named by its place among all of them."""
    (answers,) = await make_topic(max_message_bytes="2000")
    places = (TUNING.kafka.packed_records + 1, 2 * TUNING.kafka.packed_records)
    contents = [b"small"] * (places[1] + 2)
    for place in places:
        contents[place] = b"x" * 5000
    async with log.transactional_producer(unique_name, unique_name) as producer:
        with pytest.raises(RecordsRefused) as refusal:
            await producer.commit_transaction({answers: _news(*contents)}, {})
    assert list(refusal.value.refused[answers]) == list(places)


async def test_many_small_records_are_split_into_batches_within_topic_limit(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """The limit is one of batches: answers that pass it together travel in several, in order."""
    (answers,) = await make_topic(max_message_bytes="2000")
    count = 2 * TUNING.kafka.packed_records + 50
    contents = [str(number).encode() * 50 for number in range(count)]
    async with (
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await producer.commit_transaction({answers: _news(*contents)}, {})
        assert values(await read(reader, count)) == contents


async def test_transaction_into_missing_partition_is_refused(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """It is named, and nothing else of the seal is seen."""
    (answers,) = await make_topic()
    stranger = TopicPartition(f"{unique_name}-missing", 0)
    async with log.transactional_producer(unique_name, unique_name) as producer:
        with pytest.raises(UnknownPartition, match=str(stranger)):
            await producer.commit_transaction({stranger: _news(b"a")}, {answers: Committed(7)})
    assert await _after_a_successor(log, unique_name, answers) is None


async def test_metadata_that_is_too_long_is_refused(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """4,097 characters fail the seal, and its records are not seen."""
    answers, source = await make_topic(2)
    async with log.reader([answers]) as reader:
        async with log.transactional_producer(unique_name, unique_name) as producer:
            with pytest.raises(LogRefused):
                await producer.commit_transaction(
                    {answers: _news(b"hidden")}, {source: Committed(7, "x" * 4097)}
                )
        async with log.transactional_producer(unique_name, unique_name) as successor:
            await successor.commit_transaction(
                {answers: _news(b"seen")}, {source: Committed(8, "x" * 4096)}
            )
        assert values(await read(reader, 1)) == [b"seen"]
    assert await _after_a_successor(log, unique_name, source) == Committed(8, "x" * 4096)


async def test_failed_producer_refuses_further_transactions(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """It says so itself, so that nobody seals after a failed seal by mistake."""
    (answers,) = await make_topic()
    async with log.transactional_producer(unique_name, unique_name) as producer:
        with pytest.raises(LogRefused):
            await producer.commit_transaction({}, {answers: Committed(7, "x" * 4097)})
        assert not producer.is_usable
        with pytest.raises(RuntimeError):
            await producer.commit_transaction({answers: _news(b"small")}, {})


async def test_unfinished_transaction_is_ended_by_successor(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Whether a seal that was broken off counts, the offsets say, and the records agree."""
    answers, source = await make_topic(2)
    async with log.reader([answers]) as reader:
        for number in range(1, 11):
            async with log.transactional_producer(unique_name, unique_name) as producer:
                at = await _committed(log, unique_name, source)
                done = 0 if at is None else at.offset
                sealing = asyncio.create_task(
                    producer.commit_transaction(
                        {answers: _news(str(done).encode())}, {source: Committed(done + 1)}
                    ),
                    name="transaction",
                )
                await asyncio.wait([sealing], timeout=0.0005 * number)
                sealing.cancel()
                await asyncio.wait([sealing])
        last = await _after_a_successor(log, unique_name, source)
        count = 0 if last is None else last.offset
        await write_to(log, answers, b"end")
        found = values(await read(reader, count + 1))
    assert found == [*(str(number).encode() for number in range(count)), b"end"]


async def test_transaction_racing_successor_is_committed_whole_or_aborted(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A zombie that seals while its successor enters is fenced, or was first; both ends agree."""
    answers, source = await make_topic(2)
    zombies = 0
    async with log.reader([answers]) as reader:
        for number in range(1, 11):
            async with log.transactional_producer(unique_name, unique_name) as former:
                sealing = asyncio.create_task(
                    former.commit_transaction(
                        {answers: _news(b"%d" % number)}, {source: Committed(number)}
                    ),
                    name="transaction",
                )
                async with log.transactional_producer(unique_name, unique_name):
                    at = await _committed(log, unique_name, source)
                    await asyncio.wait([sealing])
                    sealed = sealing.exception() is None
                    assert (at == Committed(number)) == sealed
            zombies += not sealed
        await write_to(log, answers, b"end")
        found = await read(reader, 11 - zombies)
    assert len(found) == 11 - zombies


async def test_producers_of_different_ids_start_concurrently(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Twelve partitions assigned at once have their producers, none fencing another."""
    partitions = await make_topic(12)

    async def enter(partition: TopicPartition) -> TransactionalProducer:
        name = f"{unique_name}.{partition.partition}"
        return await log.transactional_producer(name, unique_name).__aenter__()

    producers = await asyncio.gather(*map(enter, partitions))
    for partition, producer in zip(partitions, producers, strict=True):
        await producer.commit_transaction({}, {partition: Committed(1)})
    await asyncio.gather(*(each.close() for each in producers))

    # A broker writes the marker that makes an offset visible after it has answered the commit.
    for partition in partitions:
        await _is_committed(log, unique_name, partition, 1)


async def test_member_with_assignment_is_confirmed_by_group(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """While it holds its partitions in the current generation the group counts it in."""
    partitions = await make_topic(2)
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == set(partitions))
        assert await member.is_member()


async def test_fenced_producer_stays_group_member(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A producer that lost its id to another says nothing about the group."""
    (partition,) = await make_topic()
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        async with (
            log.transactional_producer(unique_name, unique_name) as former,
            log.transactional_producer(unique_name, unique_name),
        ):
            with pytest.raises(Fenced):
                await former.commit_transaction({partition: _news(b"a")}, {})
            assert await member.is_member()


async def test_offsets_of_former_generation_are_refused(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Whichever producer writes them, and although nobody has fenced it (KIP-447)."""
    answers, source = await make_topic(2)
    await write_to(log, source, *[b"request"] * 5)
    listener, other = RecordingListener(), RecordingListener()
    async with (
        log.member(unique_name, [unique_name], listener) as member,
        polling(member, []),
        log.reader([answers]) as reader,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await eventually(lambda: listener.held == {answers, source})
        former = member.membership
        assert former is not None
        await producer.commit_transaction(
            {answers: _news(b"a")}, {source: Committed(1)}, member.membership
        )
        async with (
            log.member(unique_name, [unique_name], other) as second,
            polling(second, []),
        ):
            await eventually(lambda: len(listener.held) == len(other.held) == 1)
            with pytest.raises(Fenced):
                await producer.commit_transaction(
                    {answers: _news(b"b")}, {source: Committed(2)}, former
                )
            async with log.transactional_producer(unique_name, unique_name) as successor:
                await successor.commit_transaction(
                    {answers: _news(b"c")}, {source: Committed(3)}, member.membership
                )
            assert await member.committed([source]) == {source: Committed(3)}
            assert values(await read(reader, 2)) == [b"a", b"c"]


async def test_member_reads_offsets_of_ended_transactions_at_once(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Several producers commit in turn, and what is read is never behind and never goes back."""
    (source,) = await make_topic()
    listener = RecordingListener()
    async with (
        log.member(unique_name, [unique_name], listener) as member,
        polling(member, []),
        log.transactional_producer(f"{unique_name}-1", unique_name) as one,
        log.transactional_producer(f"{unique_name}-2", unique_name) as two,
    ):
        await eventually(lambda: listener.held == {source})
        for number in range(1, 21):
            producer = one if number % 2 else two
            await producer.commit_transaction({}, {source: Committed(number)}, member.membership)
            assert await member.committed([source]) == {source: Committed(number)}


async def test_reader_without_group_is_not_member(log: Log, make_topic: MakeTopic) -> None:
    """It is in no group that could count it in."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        assert not await reader.is_member()
        assert reader.membership is None


async def test_member_starts_at_offset_committed_in_transaction(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A member starts at the offset that was sealed for its group."""
    (partition,) = await make_topic()
    await write_to(log, partition, *(str(number).encode() for number in range(10)))
    async with log.transactional_producer(unique_name, unique_name) as producer:
        await producer.commit_transaction({}, {partition: Committed(8)})
    await _is_committed(log, unique_name, partition, 8)
    async with log.member(unique_name, [unique_name], RecordingListener()) as member:
        assert values(await read(member, 2)) == [b"8", b"9"]
