"""Seats: how they are taken, given up, and taken over after a failure."""

from __future__ import annotations

import asyncio

import pytest

from headrace.delivery.transactions import PartitionLost
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from tests.support.conditions import eventually
from tests.support.transactions import Owner, answers, compose, log_with_topics, pending_of

TRANSACTIONAL_ID = "group.requests.0"
"""The seat of the source's only partition."""


@pytest.fixture
async def log() -> MemoryLog:
    """With topics; retries follow at once."""
    return await log_with_topics()


async def owner_of(log: MemoryLog) -> Owner:
    """The owner of ten requests."""
    owner = Owner(log)
    await owner.assign(10)
    return owner


async def test_failed_fencing_leaves_no_producer(log: MemoryLog) -> None:
    """It is tried again as a whole."""
    owner = Owner(log)
    await owner.member.join()
    log.faults.brokers.take_down()
    with pytest.raises(LogUnavailable):
        await owner.assign(10)
    with pytest.raises(PartitionLost):
        await owner.transactions.commit_transaction(0, [], compose)

    log.faults.brokers.bring_back()
    await owner.assign(10)
    await owner.commit_transaction([0])
    assert await answers(log) == {0: 1}


async def test_partition_gets_new_producer_after_cancelled_transaction(log: MemoryLog) -> None:
    """The producer of the one that was under way is not used again."""
    owner = await owner_of(log)
    log.faults.transactions.hold()
    sealing_first = asyncio.create_task(
        owner.transactions.commit_transaction(0, pending_of(owner, 0), compose)
    )
    await eventually(log.faults.transactions.open)
    sealing_first.cancel()
    await asyncio.wait([sealing_first])
    log.faults.transactions.release()

    await owner.transactions.commit_transaction(0, pending_of(owner, 0, 1), compose)
    assert await answers(log) == {0: 1, 1: 1}


async def test_transaction_in_flight_is_lost_with_its_partition(log: MemoryLog) -> None:
    """The next owner writes the answers, whatever the former producer reports when it is closed."""
    owner = await owner_of(log)
    log.faults.transactions.hold()
    under_way = asyncio.create_task(owner.commit_transaction([0]))
    await eventually(log.faults.transactions.open)
    await owner.transactions.release([0])
    successor = await owner_of(log)
    log.faults.transactions.release()
    with pytest.raises(PartitionLost):
        await under_way

    await successor.commit_transaction([0])
    assert await answers(log) == {0: 1}


async def test_membership_is_asked_until_group_answers(log: MemoryLog) -> None:
    """A fenced producer has no successor before it is known whether the partition is ours."""
    owner = await owner_of(log)
    log.faults.transactions.hold()
    under_way = asyncio.create_task(owner.commit_transaction([0]))
    await eventually(log.faults.transactions.open)
    log.faults.transactions.time_out("group.requests.0")
    log.faults.brokers.take_down()
    log.faults.transactions.release()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not under_way.done()
    log.faults.brokers.bring_back()
    await under_way
    assert await answers(log) == {0: 1}


async def test_evicted_member_loses_all_partitions(log: MemoryLog) -> None:
    """It is told once, and seals nothing any more."""
    owner = await owner_of(log)
    await owner_of(log)
    owner.member.counted_in = False
    with pytest.raises(PartitionLost):
        await owner.commit_transaction([0])
    with pytest.raises(PartitionLost):
        await owner.commit_transaction([1])

    assert owner.losses == 1
    assert await answers(log) == {}


async def test_transaction_found_committed_counts_as_committed(log: MemoryLog) -> None:
    """The caller tells of these answers as of any others; they are no duplicates."""
    owner = await owner_of(log)
    log.faults.transactions.fail(TransactionFault.UNKNOWN_BUT_COMMITTED)
    pending = pending_of(owner, 0, 1)
    await owner.transactions.commit_transaction(0, pending, compose)

    assert pending == []
    assert await answers(log) == {0: 1, 1: 1}


async def test_successor_knows_answers_of_previous_owner(log: MemoryLog) -> None:
    """It gives only the others."""
    owner = await owner_of(log)
    await owner.commit_transaction([0, 2])

    successor = await owner_of(log)
    await successor.commit_transaction([0, 1, 2, 3])
    assert await answers(log) == dict.fromkeys(range(4), 1)


async def test_offsets_without_answers_are_committed(log: MemoryLog) -> None:
    """The base that a process starts from, and what is renewed."""
    owner = await owner_of(log)
    await owner.transactions.commit_remaining(0)
    committed = await log.committed("group", [owner.source])
    assert committed[owner.source] == (0, "")
    with pytest.raises(PartitionLost):
        await owner.transactions.commit_remaining(1)


async def test_unchanged_transactional_offsets_are_renewed(log: MemoryLog) -> None:
    """A broker forgets it otherwise; nothing is written as long as nothing is to be renewed."""
    owner = await owner_of(log)
    await owner.commit_transaction([0])
    log.faults.groups.forget_commits("group")
    await owner.transactions.commit_remaining(0)
    assert (await log.committed("group", [owner.source]))[owner.source] is None

    owner.renew()
    await owner.transactions.commit_remaining(0)
    assert (await log.committed("group", [owner.source]))[owner.source] == (1, "")


async def test_step_of_previous_assignment_writes_no_answer(log: MemoryLog) -> None:
    """It may come back while the same partition is being assigned anew: that one has the seat."""
    owner = await owner_of(log)
    left = pending_of(owner, 0)
    owner.revoke()
    entered = log.faults.transactions.entered_producers(TRANSACTIONAL_ID)
    log.faults.brokers.take_down(hang=True)
    fencing = asyncio.create_task(owner.fence())
    for _ in range(5):  # now its new producer waits to enter
        await asyncio.sleep(0)
    coming_back = asyncio.create_task(owner.transactions.commit_transaction(0, left, compose))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not fencing.done()
    log.faults.brokers.bring_back()
    await fencing
    await coming_back

    assert log.faults.transactions.entered_producers(TRANSACTIONAL_ID) == entered + 1
    assert left == []
    assert await answers(log) == {}


async def test_late_membership_denial_does_not_revoke_next_assignment(
    log: MemoryLog,
) -> None:
    """The denial concerns the membership that has ended meanwhile."""
    owner = await owner_of(log)
    await owner_of(log)
    owner.member.counted_in = False
    owner.member.answers.clear()
    under_way = asyncio.create_task(owner.commit_transaction([0]))
    await eventually(lambda: owner.member.asked)
    owner.revoke()
    await owner.transactions.release([0])
    await owner.member.join()
    await owner.assign(10)
    owner.member.answers.set()
    with pytest.raises(PartitionLost):
        await under_way

    assert owner.losses == 0
    await owner.commit_transaction([1])
    assert await answers(log) == {1: 1}
