"""The embedded log's transactions: what stays hidden, what is aborted, and what tests can break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from headrace.log.errors import Fenced, LogUnavailable, TopicForbidden
from headrace.log.memory import MemoryLog, TransactionFault
from headrace.log.port import Committed, NewRecord, TopicInfo, TopicPartition
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling, read, values, write_to

ANSWERS = TopicPartition("answers", 0)
SOURCE = TopicPartition("source", 0)
ID = "group.source.0"
ONE = {ANSWERS: [NewRecord(b"k", b"one")]}
AT_ONE = {SOURCE: Committed(1)}


@pytest.fixture
async def log() -> MemoryLog:
    """A log with a topic of answers and one of requests."""
    log = MemoryLog()
    topics = [TopicInfo(each.topic, 1, {}) for each in (ANSWERS, SOURCE)]
    await log.create_topics(topics, replication_factor=1)
    return log


@asynccontextmanager
async def held_seal(log: MemoryLog) -> AsyncIterator[asyncio.Task[None]]:
    """A seal that has written everything and not ended yet; it is let go at the end."""
    async with log.transactional_producer(ID, "group") as producer:
        log.faults.transactions.hold()
        sealing = asyncio.create_task(producer.commit_transaction(ONE, AT_ONE), name="transaction")
        await asyncio.sleep(0)
        try:
            yield sealing
        finally:
            log.faults.transactions.release()
            await asyncio.wait([sealing])
            sealing.exception()  # read here: some tests only look at what the log shows


async def committed(log: MemoryLog) -> Committed | None:
    return (await log.committed("group", [SOURCE]))[SOURCE]


async def test_open_transaction_is_invisible(log: MemoryLog) -> None:
    """Neither a reader nor the group sees anything of it before it ends."""
    async with log.reader([ANSWERS]) as reader, held_seal(log):
        assert not await reader.poll(0.0, 10)
        assert await committed(log) is None


async def test_member_reads_offsets_only_after_open_transaction_has_ended(log: MemoryLog) -> None:
    """Others read the former offset meanwhile."""
    listener = RecordingListener()
    async with log.member("group", [SOURCE.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        async with held_seal(log) as sealing:
            reading = asyncio.create_task(member.committed([SOURCE]))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not reading.done()
            assert await committed(log) is None
            log.faults.transactions.release()
            await sealing
            assert await reading == {SOURCE: Committed(1)}


async def test_offsets_of_open_transaction_are_not_waited_for_endlessly() -> None:
    """The reason is that of the transaction, not of the connection."""
    log = MemoryLog(tuning=replace(TUNING.memory, stable_offsets_timeout_s=0.0))
    topics = [TopicInfo(each.topic, 1, {}) for each in (ANSWERS, SOURCE)]
    await log.create_topics(topics, replication_factor=1)
    listener = RecordingListener()
    async with log.member("group", [SOURCE.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        async with held_seal(log):
            with pytest.raises(LogUnavailable, match="open transaction"):
                await member.committed([SOURCE])


async def test_open_transaction_hides_later_records(log: MemoryLog) -> None:
    """Readers stop at the last stable offset, although later records are acknowledged."""
    async with log.reader([ANSWERS]) as reader:
        async with held_seal(log):
            await write_to(log, ANSWERS, b"later")
            assert not await reader.poll(0.0, 10)
            assert await reader.end_offsets([ANSWERS]) == {ANSWERS: 0}
        assert values(await read(reader, 2)) == [b"one", b"later"]


async def test_open_transaction_is_not_found_by_time(log: MemoryLog) -> None:
    """Offsets are looked up by time below the last stable offset only."""
    async with held_seal(log), log.reader([ANSWERS]) as reader:
        assert await reader.offsets_for_times({ANSWERS: 0}) == {ANSWERS: None}


async def test_reader_starting_during_transaction_sees_its_records(log: MemoryLog) -> None:
    """It starts at the last stable offset, so that what the transaction holds is read."""
    async with held_seal(log) as sealing, log.reader([ANSWERS]) as reader:
        log.faults.transactions.release()
        await sealing
        assert values(await read(reader, 1)) == [b"one"]


async def test_successor_aborts_open_transaction(log: MemoryLog) -> None:
    """The records leave a gap, the offsets never count, and the former producer is fenced."""
    async with log.reader([ANSWERS]) as reader:
        async with (
            held_seal(log) as sealing,
            log.transactional_producer(ID, "group") as successor,
        ):
            assert await committed(log) is None
            log.faults.transactions.release()
            with pytest.raises(Fenced):
                await sealing
            await successor.commit_transaction({ANSWERS: [NewRecord(b"k", b"two")]}, AT_ONE)
        (record,) = await read(reader, 1)
    assert (record.value, record.offset) == (b"two", 2)  # after the aborted record and its marker


async def test_reader_passes_over_partition_of_aborted_records(log: MemoryLog) -> None:
    """Its position goes past them, so that nobody waits for what never comes."""
    async with held_seal(log), log.transactional_producer(ID, "group"):
        pass
    async with log.reader([ANSWERS]) as reader:
        reader.seek(ANSWERS, 0)
        assert not await reader.poll(0.0, 10)
        assert await reader.position(ANSWERS) == 2


async def test_transaction_over_timeout_is_aborted(log: MemoryLog) -> None:
    """The broker fences its producer; the group knows nothing of that."""
    listener = RecordingListener()
    async with log.member("group", [SOURCE.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        async with held_seal(log) as sealing:
            log.faults.transactions.time_out(ID)
            log.faults.transactions.release()
            with pytest.raises(Fenced):
                await sealing
        assert await member.is_member()
    assert await committed(log) is None


async def test_timing_out_without_open_transaction_is_refused(log: MemoryLog) -> None:
    """A test that expects one where there is none is told so."""
    async with log.transactional_producer(ID, "group"):
        with pytest.raises(ValueError, match="expected an open transaction"):
            log.faults.transactions.time_out(ID)


@pytest.mark.parametrize(
    ("fault", "error", "after"),
    [
        (TransactionFault.UNKNOWN_BUT_COMMITTED, LogUnavailable, Committed(1)),
        (TransactionFault.UNKNOWN_AND_OPEN, LogUnavailable, None),
        (TransactionFault.TIMED_OUT, Fenced, None),
    ],
)
async def test_faulted_transaction_has_expected_outcome(
    log: MemoryLog, fault: TransactionFault, error: type[Exception], after: Committed | None
) -> None:
    """The caller gets the expected error, and a successor finds the expected offsets."""
    log.faults.transactions.fail(fault)
    async with log.transactional_producer(ID, "group") as producer:
        with pytest.raises(error):
            await producer.commit_transaction(ONE, AT_ONE)
    async with log.transactional_producer(ID, "group"):
        assert await committed(log) == after


async def test_transaction_after_faulted_one_is_committed(log: MemoryLog) -> None:
    """A fault is used up by one seal."""
    log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
    async with log.transactional_producer(ID, "group") as producer:
        with pytest.raises(LogUnavailable):
            await producer.commit_transaction(ONE, AT_ONE)
    async with log.transactional_producer(ID, "group") as producer:
        await producer.commit_transaction(ONE, AT_ONE)
    assert await committed(log) == Committed(1)


async def test_committed_offsets_may_lag_until_successor_enters(log: MemoryLog) -> None:
    """A reader that has not entered may see an old value, as on Kafka."""
    log.faults.transactions.let_offsets_lag()
    async with log.transactional_producer(ID, "group") as producer:
        await producer.commit_transaction(ONE, AT_ONE)
    assert await committed(log) is None
    async with log.transactional_producer(ID, "group"):
        assert await committed(log) == Committed(1)


async def test_lagging_offsets_catch_up(log: MemoryLog) -> None:
    """Without a successor they are seen once the fault is over."""
    log.faults.transactions.let_offsets_lag()
    async with log.transactional_producer(ID, "group") as producer:
        await producer.commit_transaction(ONE, AT_ONE)
    log.faults.transactions.let_offsets_catch_up()
    assert await committed(log) == Committed(1)


async def test_transaction_without_broker_has_unknown_outcome(log: MemoryLog) -> None:
    """It raises `LogUnavailable`, and nothing was written."""
    async with log.transactional_producer(ID, "group") as producer:
        log.faults.brokers.take_down()
        with pytest.raises(LogUnavailable):
            await producer.commit_transaction(ONE, AT_ONE)
    log.faults.brokers.bring_back()
    async with log.reader([ANSWERS]) as reader:
        assert await reader.end_offsets([ANSWERS]) == {ANSWERS: 0}


async def test_forbidden_topic_aborts_whole_transaction(log: MemoryLog) -> None:
    """Access rules refuse one of its topics: nothing of it is seen."""
    log.faults.topics.forbid(ANSWERS.topic)
    async with log.transactional_producer(ID, "group") as producer:
        with pytest.raises(TopicForbidden, match=ANSWERS.topic):
            await producer.commit_transaction(ONE, AT_ONE)
    async with log.transactional_producer(ID, "group"):
        assert await committed(log) is None


async def test_evicted_member_is_denied_by_group(log: MemoryLog) -> None:
    """A stalled process that was thrown out without noticing hears it from the group."""
    listener = RecordingListener()
    async with log.member("group", [SOURCE.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        (member_id,) = log.faults.groups.members("group")
        log.faults.groups.expire_session("group", member_id, noticed=False)
        assert not await member.is_member()


async def test_rebalancing_member_is_confirmed_by_group(log: MemoryLog) -> None:
    """The partitions have no other owner until the rebalance has ended."""
    answer: list[bool] = []

    async def ask(_: object) -> None:
        answer.append(await member.is_member())

    listener = RecordingListener(revoked=ask)
    async with log.member("group", [SOURCE.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        log.faults.groups.force_rebalance("group")
        await eventually(lambda: listener.assignments == 2)
    assert answer == [True]


async def test_retention_keeps_open_transaction() -> None:
    """Records of an open transaction are not trimmed, however many records follow."""
    log = MemoryLog(retention_bytes=2000)
    topics = [TopicInfo(each.topic, 1, {}) for each in (ANSWERS, SOURCE)]
    await log.create_topics(topics, replication_factor=1)
    async with log.reader([ANSWERS]) as reader:
        async with held_seal(log):
            for _ in range(10):
                await write_to(log, ANSWERS, b"x" * 500)
            assert await reader.beginning_offsets([ANSWERS]) == {ANSWERS: 0}
        assert values(await read(reader, 1))[0] == b"one"
