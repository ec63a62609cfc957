"""Faults of the embedded log, and the features only it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from headrace.log.errors import (
    Fenced,
    LogUnavailable,
    OffsetOutOfRange,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, NewRecord, Record, TopicInfo, TopicPartition
from tests.support.clock import ManualClock
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling, read, values, write, write_to

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    """A log with one topic `t` of two partitions, whose requests hang for a moment at most."""
    async with MemoryLog(request_timeout_s=0.05) as log:
        await log.create_topics([TopicInfo("t", 2, {})], replication_factor=1)
        yield log


async def test_send_without_broker_fails(log: MemoryLog) -> None:
    """Its acknowledgement raises, and nothing is written."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.brokers.take_down()
        with pytest.raises(LogUnavailable):
            await write(producer, P0, b"v")
        log.faults.brokers.bring_back()
        assert await reader.end_offsets([P0]) == {P0: 0}


async def test_hung_send_is_written_when_broker_returns(log: MemoryLog) -> None:
    """Records are written in order, as by a client that retries."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.brokers.take_down(hang=True)
        runs = [*await producer.send(P0, [NewRecord(None, b"a")])]
        runs += await producer.send(P0, [NewRecord(None, b"b")])
        log.faults.brokers.bring_back()
        for sent in runs:
            await sent.acknowledged
        assert values(await read(reader, 2)) == [b"a", b"b"]


async def test_hung_send_fails_at_its_timeout(log: MemoryLog) -> None:
    """The send fails at the request timeout, and is not written later."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.brokers.take_down(hang=True)
        with pytest.raises(LogUnavailable):
            await write(producer, P0, b"v")
        log.faults.brokers.bring_back()
        assert await reader.end_offsets([P0]) == {P0: 0}


@pytest.mark.parametrize("hang", [False, True], ids=["refused", "hanging"])
async def test_metadata_requests_without_broker_fail(log: MemoryLog, hang: bool) -> None:
    """Every request says `LogUnavailable`, within its timeout."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.brokers.take_down(hang=hang)
        for question in (
            lambda: log.describe_topics(["t"]),
            lambda: log.create_topics([], replication_factor=1),
            lambda: log.committed("g", [P0]),
            lambda: producer.partitions_for("t"),
            lambda: reader.end_offsets([P0]),
            lambda: reader.beginning_offsets([P0]),
            lambda: reader.offsets_for_times({P0: 0}),
        ):
            with pytest.raises(LogUnavailable):
                await question()


async def test_commit_without_broker_fails(log: MemoryLog) -> None:
    """The committed offset is unchanged."""
    listener = RecordingListener()
    async with log.member("g", ["t"], listener) as member:
        await eventually(lambda: listener.held)
        log.faults.brokers.take_down()
        with pytest.raises(LogUnavailable):
            await member.commit({P0: Committed(1)})
        log.faults.brokers.bring_back()
        assert await member.committed([P0]) == {P0: None}


async def test_cached_partitions_are_returned_without_broker(log: MemoryLog) -> None:
    """Metadata that was asked for once is cached."""
    async with log.producer() as producer:
        await producer.partitions_for("t")
        log.faults.brokers.take_down()
        assert await producer.partitions_for("t") == 2


async def test_reader_polls_nothing_during_outage(log: MemoryLog) -> None:
    """Polls are empty while it lasts, and what was there comes afterwards."""
    async with log.reader([P0]) as reader:
        await write_to(log, P0, b"v")
        log.faults.brokers.take_down()
        assert await reader.poll(0.0, 10) == {}
        assert reader.last_contact_s() > 0.0
        log.faults.brokers.bring_back()
        assert values(await read(reader, 1)) == [b"v"]
        assert reader.last_contact_s() == 0.0


async def test_end_of_outage_wakes_waiting_poll(log: MemoryLog) -> None:
    """A poll that waits gives what was there as soon as the broker is back."""
    seen: list[Record] = []
    async with log.reader([P0]) as reader:
        await write_to(log, P0, b"v")
        log.faults.brokers.take_down()
        async with polling(reader, seen):
            log.faults.brokers.bring_back()
            await eventually(lambda: seen)


async def test_member_closes_without_broker(log: MemoryLog) -> None:
    """Closing hangs on nobody."""
    async with log.member("g", ["t"], RecordingListener()):
        log.faults.brokers.take_down(hang=True)
    assert log.faults.groups.members("g") == ()


async def test_producer_closes_without_broker(log: MemoryLog) -> None:
    """Unsent records fail, and are not left pending."""
    async with log.producer() as producer:
        log.faults.brokers.take_down(hang=True)
        (sent,) = await producer.send(P0, [NewRecord(None, b"v")])
    with pytest.raises(LogUnavailable):
        await sent.acknowledged


async def test_held_acknowledgements_arrive_when_released(log: MemoryLog) -> None:
    """The record is there to be read while its sender still waits."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.acknowledgements.hold()
        (sent,) = await producer.send(P0, [NewRecord(None, b"v")])
        acknowledged = asyncio.ensure_future(sent.acknowledged)
        assert values(await read(reader, 1)) == [b"v"]
        assert not acknowledged.done()
        log.faults.acknowledgements.release()
        await acknowledged


async def test_lost_acknowledgement_leaves_record(log: MemoryLog) -> None:
    """The sender is told of a failure that was none, once."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.acknowledgements.lose(1)
        with pytest.raises(LogUnavailable):
            await write(producer, P0, b"first")
        await write(producer, P0, b"second")
        assert values(await read(reader, 2)) == [b"first", b"second"]


async def test_held_commits_take_effect_when_released(log: MemoryLog) -> None:
    """A commit under way is not there before it is answered."""
    listener = RecordingListener()
    async with log.member("g", ["t"], listener) as member, asyncio.TaskGroup() as tasks:
        await eventually(lambda: listener.held)
        log.faults.groups.hold_commits()
        commit = tasks.create_task(member.commit({P0: Committed(1)}), name="commit")
        assert await member.committed([P0]) == {P0: None}
        log.faults.groups.release_commits()
        await commit
        assert await member.committed([P0]) == {P0: Committed(1)}


async def test_member_with_expired_session_is_fenced_and_rejoins(log: MemoryLog) -> None:
    """Its partitions are revoked, a commit meanwhile is refused, and it joins anew."""
    refused: list[Fenced] = []

    async def revoked(partitions: Sequence[TopicPartition]) -> None:
        assert member.membership is None
        try:
            await member.commit({partition: Committed(1) for partition in partitions})
        except Fenced as error:
            refused.append(error)

    listener = RecordingListener(revoked=revoked)
    member = log.member("g", ["t"], listener)
    async with member:
        await eventually(lambda: listener.held)
        (before,) = log.faults.groups.members("g")
        log.faults.groups.expire_session("g", before)
        await eventually(lambda: listener.assignments == 2)
        (after,) = log.faults.groups.members("g")
        assert len(refused) == 1
        assert listener.held == {P0, P1}
        assert before != after


async def test_stalled_member_reads_until_its_commit_is_refused(log: MemoryLog) -> None:
    """It does not know that its partitions are another's by now."""
    listener, other = RecordingListener(), RecordingListener()
    async with log.member("g", ["t"], listener) as member:
        await eventually(lambda: listener.held)
        log.faults.groups.expire_session("g", log.faults.groups.members("g")[0], noticed=False)
        async with log.member("g", ["t"], other):
            await eventually(lambda: other.held == {P0, P1})
            await write_to(log, P0, b"v")
            assert values(await read(member, 1)) == [b"v"]
            with pytest.raises(Fenced):
                await member.commit({P0: Committed(1)})
            await eventually(lambda: len(listener.held) == len(other.held) == 1)


async def test_member_draining_too_long_is_evicted() -> None:
    """The others do not wait for ever, and the late one joins anew."""
    log = MemoryLog(auto_create_partitions=2, rebalance_timeout_s=0.05)
    release = asyncio.Event()

    async def revoked(_: Sequence[TopicPartition]) -> None:
        await release.wait()

    slow, other = RecordingListener(revoked=revoked), RecordingListener()
    async with log.member("g", ["t"], slow):
        await eventually(lambda: slow.held)
        async with log.member("g", ["t"], other):
            await eventually(lambda: other.held == {P0, P1})
            release.set()
            await eventually(lambda: len(slow.held) == len(other.held) == 1)


async def test_forced_rebalance_revokes_and_reassigns_all_partitions(log: MemoryLog) -> None:
    """Eager rebalancing: even a lone member gives up everything."""
    listener = RecordingListener()
    async with log.member("g", ["t"], listener):
        await eventually(lambda: listener.held)
        log.faults.groups.force_rebalance("g")
        await eventually(lambda: listener.assignments == 2)
        assert listener.revocations == 1
        assert listener.held == {P0, P1}


async def test_rebalance_clears_pauses_and_uncommitted_positions(log: MemoryLog) -> None:
    """Records read but not committed come again, also those of a paused partition."""
    listener = RecordingListener()
    await write_to(log, P0, b"v")
    async with log.member("g", ["t"], listener) as member:
        await read(member, 1)
        member.pause([P0])
        log.faults.groups.force_rebalance("g")
        assert values(await read(member, 1)) == [b"v"]


async def test_group_does_not_rebalance_during_outage(log: MemoryLog) -> None:
    """No member can learn of a rebalance before the broker is back."""
    listener = RecordingListener()
    async with log.member("g", ["t"], listener) as member:
        await eventually(lambda: listener.held)
        log.faults.brokers.take_down()
        log.faults.groups.force_rebalance("g")
        await member.poll(0.0, 1)
        assert listener.revocations == 0
        log.faults.brokers.bring_back()
        await eventually(lambda: listener.assignments == 2)


async def test_topic_created_later_is_assigned(log: MemoryLog) -> None:
    """A subscription may come before its topic."""
    listener = RecordingListener()
    async with log.member("g", ["later"], listener):
        await eventually(lambda: listener.assignments == 1)
        await log.create_topics([TopicInfo("later", 1, {})], replication_factor=1)
        await eventually(lambda: listener.held == {TopicPartition("later", 0)})


async def test_position_below_retention_is_out_of_range(log: MemoryLog) -> None:
    """`poll` raises until the reader seeks to what is still there."""
    await write_to(log, P0, b"0", b"1", b"2")
    async with log.reader([P0]) as reader:
        reader.seek(P0, 0)
        log.faults.partitions.trim(P0, 2)
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange, match="t/0: expected an offset from 2 to 3"):
                await reader.poll(0.0, 10)
        reader.seek(P0, (await reader.beginning_offsets([P0]))[P0])
        assert values(await read(reader, 1)) == [b"2"]


async def test_out_of_range_partition_loses_no_record_of_another(log: MemoryLog) -> None:
    """A poll that raises has moved no position."""
    await write_to(log, P0, b"gone", b"kept")
    async with log.reader([P0, P1]) as reader:
        reader.seek(P0, 0)
        log.faults.partitions.trim(P0, 1)
        await write_to(log, P1, b"other")
        with pytest.raises(OffsetOutOfRange):
            await reader.poll(0.0, 10)
        reader.seek(P0, 1)
        assert sorted(filter(None, values(await read(reader, 2)))) == [b"kept", b"other"]


async def test_busy_partition_does_not_starve_another(log: MemoryLog) -> None:
    """Partitions take turns, poll by poll."""
    await write_to(log, P0, *[b"busy"] * 100)
    async with log.reader([P0, P1]) as reader:
        reader.seek(P0, 0)
        await write_to(log, P1, b"quiet")
        polled = [await reader.poll(0.0, 10) for _ in range(2)]
    assert [list(each) for each in polled] == [[P0], [P1, P0]]


async def test_memory_log_stamps_records_by_injected_clock() -> None:
    """Time is the caller's, so that a test can hold it."""
    clock = ManualClock(1000)
    log = MemoryLog(auto_create_partitions=1, now_ms=clock.now_ms)
    async with log.reader([P0]) as reader:
        await write_to(log, P0, b"a")
        clock.advance_ms(5)
        await write_to(log, P0, b"b")
        assert [record.timestamp for record in await read(reader, 2)] == [1000, 1005]


async def test_missing_topics_are_created_where_allowed() -> None:
    """The log creates them if it is configured like a broker with `auto.create.topics.enable`."""
    async with MemoryLog(auto_create_partitions=3).producer() as producer:
        assert await producer.partitions_for("new") == 3
    async with MemoryLog().producer() as producer:
        with pytest.raises(UnknownPartition):
            await producer.send(P0, [NewRecord(None, b"v")])


async def test_retention_of_topic_overrides_that_of_log() -> None:
    """`retention.bytes` is honoured, within the log's own bound."""
    log = MemoryLog(retention_bytes=100_000)
    small = TopicInfo("t", 1, {"retention.bytes": "10000"})
    large = TopicInfo("u", 1, {"retention.bytes": "1000000"})
    await log.create_topics([small, large], replication_factor=1)
    partitions = [TopicPartition("t", 0), TopicPartition("u", 0)]
    for partition in partitions:
        await write_to(log, partition, *[bytes(1000)] * 500)
    async with log.reader(partitions) as reader:
        begin = await reader.beginning_offsets(partitions)
    assert [500 - begin[partition] for partition in partitions] == [7, 79]


async def test_polling_closed_consumer_fails(log: MemoryLog) -> None:
    """A poll after `close` is a mistake, and is told so."""
    async with log.reader([P0]) as reader:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        await reader.poll(0.0, 1)


@pytest.mark.parametrize(
    ("name", "partitions", "message"),
    [
        ("", 1, "topic name"),
        ("a b", 1, "topic name"),
        ("..", 1, "topic name"),
        ("t2", 0, "least 1"),
    ],
)
async def test_topic_name_invalid_for_kafka_is_refused(
    log: MemoryLog, name: str, partitions: int, message: str
) -> None:
    """Names and numbers of partitions follow Kafka's rules."""
    with pytest.raises(ValueError, match=message):
        await log.create_topics([TopicInfo(name, partitions, {})], replication_factor=1)


@pytest.mark.parametrize("hidden", [False, True], ids=["visible", "hidden"])
async def test_forbidden_topic_refuses_records(log: MemoryLog, hidden: bool) -> None:
    """Records are refused until the topic is allowed again, as with access rules."""
    async with log.producer() as producer, log.reader([P0]) as reader:
        log.faults.topics.forbid("t", hidden=hidden)
        with pytest.raises(TopicForbidden, match="not allowed to write to topic t"):
            await write(producer, P0, b"v")
        log.faults.topics.allow("t")
        await write(producer, P0, b"w")
        assert values(await read(reader, 1)) == [b"w"]


async def test_hidden_topic_shows_no_partitions(log: MemoryLog) -> None:
    """One that may be seen but not written has them."""
    async with log.producer() as producer:
        log.faults.topics.forbid("t", hidden=True)
        with pytest.raises(TopicForbidden):
            await producer.partitions_for("t")
        log.faults.topics.forbid("t")
        assert await producer.partitions_for("t") == 2
