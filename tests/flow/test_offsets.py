"""Reading and resetting what is answered, on the embedded log."""

from __future__ import annotations

import pytest

from headrace.config import Settings, make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import ConfigurationError
from headrace.log.errors import Fenced, LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import Committed, NewRecord, TopicInfo, TopicPartition
from headrace.tools.offsets import Target, read_offsets, reset
from headrace.tools.offsets.resetting import Edge, GroupActive
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling, write_to
from tests.support.transactions import leave_transaction_open

FIRST, SECOND = (TopicPartition("headrace.requests", number) for number in (0, 1))
STUCK = AckedOffsets(3, [(4, 9)])
"""Offset 3 is not answered, and five that came after it are."""


@pytest.fixture(params=["at_least_once", "exactly_once"])
def settings(request: pytest.FixtureRequest) -> Settings:
    """The defaults, with either guarantee."""
    return make_settings({"delivery": {"guarantee": request.param}})


@pytest.fixture
async def log() -> MemoryLog:
    """Ten requests in each of two partitions; of the first, some are answered."""
    log = MemoryLog()
    await log.create_topics([TopicInfo(FIRST.topic, 2, {})], replication_factor=1)
    for partition in (FIRST, SECOND):
        records = [NewRecord(None, b"v", (), 1000 * number) for number in range(10)]
        await write_to(log, partition, *records)
    await log.commit("headrace", {FIRST: STUCK.committable()})
    return log


async def committed(log: MemoryLog) -> dict[TopicPartition, AckedOffsets | None]:
    found = await log.committed("headrace", [FIRST, SECOND])
    return {
        each: None if at is None else AckedOffsets.from_committed(at) for each, at in found.items()
    }


async def test_progress_is_read_with_bounds_of_partitions(
    log: MemoryLog, settings: Settings
) -> None:
    """Base, ranges and ends of every source partition, committed or not."""
    first, second = await read_offsets(log, settings)
    assert (first.progress, first.end, first.lag, first.unanswered) == (STUCK, 10, 7, 2)
    assert (second.committed, second.end, second.lag) == (None, 10, 10)


async def test_offsets_behind_open_transaction_are_counted_as_hidden(
    log: MemoryLog, settings: Settings
) -> None:
    """No service reads them, so the lag does not have them, and their callers wait."""
    await leave_transaction_open(log, FIRST, "of-another-producer")
    await write_to(log, FIRST, b"behind it")
    first, second = await read_offsets(log, settings)
    assert (first.end, first.lag, first.hidden, second.hidden) == (10, 7, 2, 0)


async def test_reading_progress_of_missing_topic_is_refused(settings: Settings) -> None:
    """Without it there is nothing to show, and the fix is named."""
    with pytest.raises(ConfigurationError, match="headrace topics create"):
        await read_offsets(MemoryLog(), settings)


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        (Target(edge=Edge.EARLIEST), AckedOffsets(0), AckedOffsets(0)),
        (Target(edge=Edge.LATEST), AckedOffsets(10), AckedOffsets(10)),
        (Target(offset=5), AckedOffsets(9), AckedOffsets(5)),
        (Target(timestamp_ms=1500), AckedOffsets(2), AckedOffsets(2)),
        (Target(timestamp_ms=99_000), AckedOffsets(10), AckedOffsets(10)),
    ],
    ids=["earliest", "latest", "offset", "time", "after-the-last"],
)
async def test_reset_moves_all_partitions(
    log: MemoryLog, settings: Settings, target: Target, first: AckedOffsets, second: AckedOffsets
) -> None:
    """Each to its own end or record, with the answered ranges that still hold."""
    await reset(log, settings, target)
    assert await committed(log) == {FIRST: first, SECOND: second}


async def test_reset_passes_over_one_stuck_record(log: MemoryLog, settings: Settings) -> None:
    """The five that overtook it stay answered, and the other partition is left alone."""
    (done,) = await reset(log, settings, Target(offset=4), [0])
    assert (done.skips, done.repeats) == (1, 0)
    assert await committed(log) == {FIRST: AckedOffsets(9), SECOND: None}


async def test_reset_dry_run_changes_nothing(log: MemoryLog, settings: Settings) -> None:
    """It says what a reset would do."""
    resets = await reset(log, settings, Target(edge=Edge.LATEST), dry_run=True)
    assert [each.skips for each in resets] == [2, 10]
    assert await committed(log) == {FIRST: STUCK, SECOND: None}


async def test_reset_replaces_metadata_of_another_version(
    log: MemoryLog, settings: Settings
) -> None:
    """A reset is how a group that `run` refuses is put right."""
    await log.commit("headrace", {FIRST: Committed(3, "written by another")})
    await reset(log, settings, Target(offset=6), [0])
    assert (await committed(log))[FIRST] == AckedOffsets(6)


async def test_reset_to_offset_outside_partition_is_refused(
    log: MemoryLog, settings: Settings
) -> None:
    """It names the partition and what it holds."""
    with pytest.raises(ConfigurationError, match=r"partition 0: expected .* 0 to 10, got 11"):
        await reset(log, settings, Target(offset=11))


async def test_reset_of_missing_partition_is_refused(log: MemoryLog, settings: Settings) -> None:
    """It names those that are."""
    with pytest.raises(ConfigurationError, match="expected a partition from 0 to 1, got 2"):
        await reset(log, settings, Target(offset=0), [2])


@pytest.mark.parametrize("group", ["headrace", "headrace.ingest", "headrace.executor"])
async def test_reset_while_stage_runs_is_refused(
    log: MemoryLog, settings: Settings, group: str
) -> None:
    """While a stage runs, in whichever group, it is refused with who that is."""
    listener = RecordingListener()
    async with log.member(group, [FIRST.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held)
        with pytest.raises(GroupActive, match=f"{group}: {member.member_id}"):
            await reset(log, settings, Target(edge=Edge.EARLIEST))
    assert await committed(log) == {FIRST: STUCK, SECOND: None}


async def test_reset_fences_producer_of_ended_process(log: MemoryLog) -> None:
    """With exactly once, a zombie's offsets cannot count after the reset."""
    settings = make_settings({"delivery": {"guarantee": "exactly_once"}})
    zombie = log.transactional_producer("headrace.headrace.requests.0", "headrace")
    async with zombie:
        await reset(log, settings, Target(edge=Edge.EARLIEST))
        with pytest.raises(Fenced):
            await zombie.commit_transaction({}, {FIRST: Committed(10)})
    assert (await committed(log))[FIRST] == AckedOffsets(0)


async def test_reset_ends_transaction_of_another_partitions_producer(log: MemoryLog) -> None:
    """A suspended process has written offsets of the second partition with the first one's, and
    could still commit them.
    """
    settings = make_settings({"delivery": {"guarantee": "exactly_once"}})
    async with log.transactional_producer("headrace.headrace.requests.0", "headrace") as zombie:
        log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
        with pytest.raises(LogUnavailable):
            await zombie.commit_transaction({}, {SECOND: Committed(10)})
    await reset(log, settings, Target(offset=5), [1])
    assert log.faults.transactions.open() == {}
    assert (await committed(log))[SECOND] == AckedOffsets(5)
