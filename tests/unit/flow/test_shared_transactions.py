"""Transactions that several partitions share: what goes into one, and who learns of its failure."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.delivery.offset_store import PendingAnswer
from headrace.delivery.transactions import PartitionLost
from headrace.log.errors import Fenced, RecordsRefused
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import NewRecord, TopicPartition
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.transactions import (
    ANSWERS,
    AT_ONCE,
    Owner,
    answers,
    compose,
    log_with_topics,
    pending_of,
)

NUMBERS = range(3)
IMPATIENT = replace(AT_ONCE, max_shared_wait_s=0.0)
TOO_LARGE = NewRecord(None, bytes(2_000_000))


class Written(list[NewRecord]):
    """Records, to which a weak reference is possible."""


@pytest.fixture
async def log() -> MemoryLog:
    """With three source partitions."""
    return await log_with_topics(len(NUMBERS))


@pytest.fixture
async def owner(log: MemoryLog) -> Owner:
    """The owner of ten requests of each partition."""
    owner = Owner(log, NUMBERS)
    await owner.assign(10)
    return owner


def commits(owner: Owner, *offsets: int) -> list[asyncio.Task[None]]:
    """Begin to commit these offsets of each partition, in turn."""
    return [asyncio.create_task(owner.commit_transaction(offsets, each)) for each in NUMBERS]


async def held(log: MemoryLog, owner: Owner) -> list[asyncio.Task[None]]:
    """Commit offset 0 of each partition: the first is alone in an open transaction, which is held,
    and the others wait for the next one.
    """
    log.faults.transactions.hold()
    tasks = commits(owner, 0)
    await eventually(log.faults.transactions.open)
    return tasks


async def all_answers(log: MemoryLog) -> list[Counter[int]]:
    """How often each offset has a visible answer, for each partition."""
    return [await answers(log, number) for number in NUMBERS]


async def open_partitions(log: MemoryLog) -> list[set[int]]:
    """The source partitions of each open transaction, once there is one."""
    await eventually(log.faults.transactions.open)
    return [{each.partition for each in found} for found in log.faults.transactions.open().values()]


async def hold_second(log: MemoryLog, tasks: list[asyncio.Task[None]]) -> None:
    """Let the first transaction end, and hold the one for which the others have waited."""
    log.faults.transactions.release_held()
    await tasks[0]
    await eventually(log.faults.transactions.open)


async def test_partitions_ready_during_transaction_share_next_one(
    log: MemoryLog, owner: Owner
) -> None:
    """One transaction is open at a time; the second holds all that waited for it."""
    tasks = await held(log, owner)
    assert await open_partitions(log) == [{0}]
    await hold_second(log, tasks)
    assert await open_partitions(log) == [{1, 2}]
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    assert await all_answers(log) == [{0: 1}] * len(NUMBERS)


async def test_records_refused_in_shared_transaction_concern_one_partition(
    log: MemoryLog, owner: Owner
) -> None:
    """The transaction is not begun. The others commit at once, each with its own producer."""

    def compose_too_large(_: object) -> dict[TopicPartition, list[NewRecord]]:
        return {ANSWERS: [TOO_LARGE]}

    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    pending = pending_of(owner, 0, number=1)
    refused = asyncio.create_task(
        owner.transactions.commit_transaction(1, pending, compose_too_large)
    )
    third = asyncio.create_task(owner.commit_transaction([0], 2))
    await asyncio.sleep(0)
    log.faults.transactions.release()
    await asyncio.gather(first, third)
    with pytest.raises(RecordsRefused) as caught:
        await refused

    assert list(caught.value.refused[ANSWERS]) == [0]
    assert [len(await answers(log, number)) for number in NUMBERS] == [1, 0, 1]


async def test_partition_with_refused_records_shares_no_next_transaction(
    log: MemoryLog, owner: Owner
) -> None:
    """Its next ones may be refused as well, and would make the others commit alone again."""

    def compose_too_large(_: object) -> dict[TopicPartition, list[NewRecord]]:
        return {ANSWERS: [TOO_LARGE]}

    with pytest.raises(RecordsRefused):
        await owner.transactions.commit_transaction(
            1, pending_of(owner, 0, number=1), compose_too_large
        )
    tasks = await held(log, owner)
    await eventually(lambda: len(log.faults.transactions.open()) == 2)
    assert sorted(await open_partitions(log), key=sorted) == [{0}, {1}]
    log.faults.transactions.release()
    await asyncio.gather(*tasks)


async def test_next_transaction_begins_at_once_however_many_share_the_last(log: MemoryLog) -> None:
    """It does not wait until each partition has learnt of the end of the last one."""
    log, numbers = await log_with_topics(60), range(60)
    owner = Owner(log, numbers)
    await owner.assign(2)
    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    tasks = [asyncio.create_task(owner.commit_transaction([0], each)) for each in numbers[1:]]
    await asyncio.sleep(0)
    await hold_second(log, [first])
    assert await open_partitions(log) == [set(numbers[1:])]
    late = asyncio.create_task(owner.commit_transaction([1], 0))
    await asyncio.sleep(0)
    log.faults.transactions.release_held()
    for _ in range(10):
        await asyncio.sleep(0)
    assert await open_partitions(log) == [{0}]
    log.faults.transactions.release()
    await asyncio.gather(*tasks, late)


async def test_large_answers_of_one_partition_delay_no_other(log: MemoryLog, owner: Owner) -> None:
    """They have a transaction of their own, and wait for no other either."""

    def compose_large(_: object) -> dict[TopicPartition, list[NewRecord]]:
        return {ANSWERS: [NewRecord(None, bytes(600_000))] * 2}

    log.faults.transactions.hold()
    pending = pending_of(owner, 0, number=2)
    large = asyncio.create_task(owner.transactions.commit_transaction(2, pending, compose_large))
    small = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(lambda: len(log.faults.transactions.open()) == 2)
    assert sorted(await open_partitions(log), key=sorted) == [{0}, {2}]
    log.faults.transactions.release()
    await asyncio.gather(large, small)


@pytest.mark.parametrize("fault", list(TransactionFault))
async def test_failed_shared_transaction_is_resolved_for_each_partition(
    log: MemoryLog, owner: Owner, fault: TransactionFault
) -> None:
    """Each reads its own offsets, waits until the failed transaction has ended, and repeats its
    part alone, without any failure of its own.
    """
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    log.faults.transactions.fail(fault)
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    assert owner.aborted == 0
    assert await all_answers(log) == [{0: 1}] * len(NUMBERS)


@pytest.mark.parametrize("by_broker", [False, True])
async def test_shared_transaction_that_times_out_counts_once(
    log: MemoryLog, owner: Owner, by_broker: bool
) -> None:
    """None of its partitions needs smaller transactions for that: alone they are quick enough."""
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    if by_broker:
        log.faults.transactions.fail(TransactionFault.TIMED_OUT)
    else:
        log.faults.transactions.slow_down(0)
    log.faults.transactions.release_held()
    await eventually(lambda: counted(owner, "headrace_transaction_timeouts_total"))
    log.faults.transactions.slow_down(None)
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    assert counted(owner, "headrace_transaction_timeouts_total") == 1
    assert owner.aborted == 0


async def test_partitions_stay_alone_longer_after_shared_transaction_that_timed_out(
    log: MemoryLog,
) -> None:
    """Together they may write too much, and each try would cost them a whole timeout."""
    owner = Owner(log, NUMBERS, replace(AT_ONCE, unshared_after_failure_s=0.0))
    await owner.assign(10)
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    log.faults.transactions.slow_down(0)
    log.faults.transactions.release_held()
    await eventually(lambda: counted(owner, "headrace_transaction_timeouts_total"))
    log.faults.transactions.slow_down(None)
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    log.faults.transactions.hold()
    tasks = commits(owner, 1)
    await eventually(lambda: len(log.faults.transactions.open()) == len(NUMBERS))
    log.faults.transactions.release()
    await asyncio.gather(*tasks)


async def test_progress_of_failed_shared_transaction_is_committed_alone(
    log: MemoryLog, owner: Owner
) -> None:
    """Without answers there is nothing by which the partition could know of a success."""
    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    owner.renew()
    others = [asyncio.create_task(owner.transactions.commit_remaining(each)) for each in (1, 2)]
    await asyncio.sleep(0)
    await hold_second(log, [first])
    log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
    log.faults.transactions.release()
    await asyncio.gather(*others)

    sources = [TopicPartition(owner.source.topic, number) for number in (1, 2)]
    committed = await log.committed("group", sources)
    assert None not in committed.values()


def counted(owner: Owner, name: str, **labels: str) -> float:
    """The value of a counter; 0 if it was never set."""
    return owner.registry.get_sample_value(name, labels) or 0.0


def test_partition_stays_alone_until_refused_records_are_tried_again() -> None:
    """Otherwise each try would make the others repeat their part."""
    longest_pause_s = TUNING.responder.max_transaction_retry_s
    assert TUNING.delivery.unshared_after_refusal_s > longest_pause_s


async def test_partitions_commit_alone_after_shared_transaction_failed(
    log: MemoryLog, owner: Owner
) -> None:
    """The cause, whatever it is, then stops only the partition that has it."""
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    log.faults.transactions.fail(TransactionFault.TIMED_OUT)
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    log.faults.transactions.hold()
    tasks = commits(owner, 1)
    await eventually(lambda: len(log.faults.transactions.open()) == len(NUMBERS))
    log.faults.transactions.release()
    await asyncio.gather(*tasks)


async def test_transaction_that_hangs_delays_no_other_partition_for_long(log: MemoryLog) -> None:
    """They have waited long enough, and have transactions of their own, the next time at once."""
    owner = Owner(log, NUMBERS, IMPATIENT)
    await owner.assign(10)
    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    others = [asyncio.create_task(owner.commit_transaction([0], each)) for each in (1, 2)]
    await eventually(lambda: len(log.faults.transactions.open()) == len(NUMBERS))
    assert log.faults.transactions.entered_producers("group.requests.0") == 1  # it still hangs
    log.faults.transactions.release()
    await asyncio.gather(first, *others)

    assert await all_answers(log) == [{0: 1}] * len(NUMBERS)


async def test_partition_that_was_delayed_waits_for_no_next_transaction(log: MemoryLog) -> None:
    """A transaction that hangs would otherwise delay each of its steps."""
    tuning = replace(AT_ONCE, max_shared_wait_s=0.01)
    owner = Owner(log, NUMBERS, tuning)
    await owner.assign(10)
    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    second = asyncio.create_task(owner.commit_transaction([0], 1))
    await eventually(lambda: len(log.faults.transactions.open()) == 2)
    log.faults.transactions.release()
    await asyncio.gather(first, second)

    log.faults.transactions.hold()
    tasks = commits(owner, 1)[:2]
    for _ in range(5):  # turns of the loop, in which no limit of time passes
        await asyncio.sleep(0)
    both = list(await open_partitions(log))
    log.faults.transactions.release()
    await asyncio.gather(*tasks)
    assert both == [{0}, {1}]


async def test_part_of_shared_transaction_that_hangs_waits_for_its_end(log: MemoryLog) -> None:
    """It may be committed, so it is not sent again in the meantime."""
    owner = Owner(log, NUMBERS, replace(AT_ONCE, max_shared_wait_s=0.05))
    await owner.assign(10)
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    later = asyncio.create_task(owner.commit_transaction([1], 0))  # its wait ends after theirs
    await eventually(lambda: len(log.faults.transactions.open()) == 2)
    assert sorted(await open_partitions(log), key=sorted) == [{0}, {1, 2}]
    log.faults.transactions.release()
    await asyncio.gather(*tasks, later)

    assert await all_answers(log) == [{0: 1, 1: 1}, {0: 1}, {0: 1}]


async def test_more_partitions_than_fit_take_turns(log: MemoryLog) -> None:
    """The offsets of a shared transaction are one batch, which has a largest size."""
    owner = Owner(log, NUMBERS, replace(AT_ONCE, max_shared_parts=1))
    await owner.assign(10)
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    assert await open_partitions(log) == [{1}]
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    assert await all_answers(log) == [{0: 1}] * len(NUMBERS)


async def test_step_cancelled_while_it_waits_keeps_its_producer(
    log: MemoryLog, owner: Owner
) -> None:
    """Nothing was sent, so there is no outcome to find out."""
    tasks = await held(log, owner)
    tasks[2].cancel()
    await asyncio.wait([tasks[2]])
    log.faults.transactions.release()
    await asyncio.gather(*tasks[:2])
    await owner.commit_transaction([1], 2)

    assert log.faults.transactions.entered_producers("group.requests.2") == 1
    assert [len(await answers(log, number)) for number in NUMBERS] == [1, 1, 1]


async def test_records_of_failed_transaction_are_freed_at_once(
    log: MemoryLog, owner: Owner
) -> None:
    """Their partition was released: no cycle of references holds them until a collection."""
    written: list[weakref.ref[Written]] = []

    def compose_written(_: object) -> dict[TopicPartition, list[NewRecord]]:
        records = Written([NewRecord(None, b"answer")])
        written.append(weakref.ref(records))
        return {ANSWERS: records}

    async def commit(number: int) -> None:
        with pytest.raises(PartitionLost):
            await owner.transactions.commit_transaction(
                number, pending_of(owner, 0, number=number), compose_written
            )

    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    tasks = [asyncio.create_task(commit(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    await hold_second(log, [first])
    await owner.transactions.release([1, 2])
    log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
    gc.disable()
    try:
        log.faults.transactions.release()
        await asyncio.gather(*tasks)
        tasks.clear()
        assert [each() for each in written] == [None, None]
    finally:
        gc.enable()


async def test_cancelled_shared_transaction_is_repeated_for_others(
    log: MemoryLog, owner: Owner
) -> None:
    """The task whose producer it uses is cancelled; the next owner of that id ends it."""
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    (transactional_id,) = log.faults.transactions.open()
    leading = int(transactional_id.rsplit(".", 1)[1])
    tasks[leading].cancel()
    await asyncio.wait([tasks[leading]])
    log.faults.transactions.release()
    await owner.commit_transaction([1], leading)  # initialises its producer again
    (other,) = set(NUMBERS) - {0, leading}
    await tasks[other]

    assert await answers(log, other) == {0: 1}
    assert await answers(log, leading) == {1: 1}


async def test_partition_whose_step_was_cancelled_waits_for_its_shared_transaction(
    log: MemoryLog, owner: Owner
) -> None:
    """Its offsets are not written yet, so reading them would say that nothing is under way; and
    they would then replace those of its next step.
    """
    tasks = await held(log, owner)
    log.faults.transactions.hold_writes()
    log.faults.transactions.release_held()
    await tasks[0]
    tasks[2].cancel()
    await asyncio.wait([tasks[2]])
    next_step = asyncio.create_task(owner.commit_transaction([1], 2))
    for _ in range(20):
        await asyncio.sleep(0)
    log.faults.transactions.release()
    await asyncio.gather(tasks[1], next_step)

    successor = Owner(log, NUMBERS)
    await successor.assign(10)
    assert await answers(log, 2) == {0: 1, 1: 1}
    assert not {(2, 0), (2, 1)} & successor.requests.keys()


async def test_requests_revoked_while_they_wait_are_not_answered(
    log: MemoryLog, owner: Owner
) -> None:
    """Their partition has been assigned anew, and other records may have their offsets."""
    tasks = await held(log, owner)
    owner.revoke()
    log.faults.transactions.release()
    await asyncio.gather(*tasks)

    assert await all_answers(log) == [{0: 1}, {}, {}]


async def test_requests_left_out_of_transaction_are_composed_no_more(
    log: MemoryLog, owner: Owner
) -> None:
    """What was composed last is what counts as answered."""
    composed: list[int] = []

    def count(pending: Sequence[PendingAnswer]) -> dict[TopicPartition, list[NewRecord]]:
        composed.append(len(pending))
        return compose(pending)

    log.faults.transactions.hold()
    first = asyncio.create_task(owner.commit_transaction([0], 0))
    await eventually(log.faults.transactions.open)
    pending = pending_of(owner, 0, 1, number=1)
    second = asyncio.create_task(owner.transactions.commit_transaction(1, pending, count))
    await asyncio.sleep(0)
    owner.revoke()
    log.faults.transactions.release()
    await asyncio.gather(first, second)

    assert composed == [2, 0]


async def test_partition_released_while_it_waits_counts_as_no_failed_commit(
    log: MemoryLog, owner: Owner
) -> None:
    """Nothing has failed, and nothing is repeated here."""
    tasks = await held(log, owner)
    await owner.transactions.release([1, 2])
    log.faults.transactions.release()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert counted(owner, "headrace_commit_failures_total", reason="unavailable") == 0


async def test_released_partition_leaves_shared_transaction(log: MemoryLog, owner: Owner) -> None:
    """It is released while it waits: the others commit without it."""
    tasks = await held(log, owner)
    await owner.transactions.release([2])
    log.faults.transactions.release()
    with pytest.raises(PartitionLost):
        await tasks[2]
    await asyncio.gather(*tasks[:2])

    assert [len(await answers(log, number)) for number in NUMBERS] == [1, 1, 0]


async def test_partition_assigned_again_waits_for_its_shared_transaction(
    log: MemoryLog, owner: Owner
) -> None:
    """The producer of another partition could still write its offsets, in the same generation."""
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    (transactional_id,) = log.faults.transactions.open()
    assert transactional_id == "group.requests.1"
    fencing = asyncio.create_task(owner.fence([2]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not fencing.done()
    log.faults.transactions.release()
    await fencing
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    assert outcomes == [None, None, None]
    assert await all_answers(log) == [{0: 1}] * len(NUMBERS)


async def test_partitions_assigned_again_in_former_generation_are_not_fenced(
    log: MemoryLog, owner: Owner
) -> None:
    """The group has rebalanced in between: another process may own them."""
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    fencing = asyncio.create_task(owner.fence([2]))
    await asyncio.sleep(0)
    await owner.member.join()
    log.faults.transactions.release()
    with pytest.raises(Fenced):
        await fencing
    await asyncio.gather(*tasks, return_exceptions=True)

    assert log.faults.transactions.entered_producers("group.requests.2") == 1


async def test_fences_of_one_partition_follow_each_other(log: MemoryLog, owner: Owner) -> None:
    """Otherwise the producer of one of them would stay open, unknown to the process."""
    log.faults.transactions.hold_entries()
    fences = [asyncio.create_task(owner.fence([2])), asyncio.create_task(owner.fence([2]))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert log.faults.transactions.waiting_entries == 1
    log.faults.transactions.release()
    await asyncio.gather(*fences)


async def test_fence_that_waits_for_another_ends_with_its_generation(
    log: MemoryLog, owner: Owner
) -> None:
    """It would fence an owner of the next generation."""
    log.faults.transactions.hold_entries()
    first, second = (asyncio.create_task(owner.fence([2])) for _ in range(2))
    await eventually(lambda: log.faults.transactions.waiting_entries)
    await owner.member.join()
    log.faults.transactions.release()
    await first
    with pytest.raises(Fenced):
        await second


async def test_member_of_new_generation_gives_up_partitions_of_former_one(
    log: MemoryLog, owner: Owner
) -> None:
    """The group counts it in, but its partitions may have other owners by now."""
    await owner.member.join()
    with pytest.raises(PartitionLost):
        await owner.commit_transaction([0])

    assert owner.losses == 1
    assert await answers(log) == {}


async def test_zombie_cannot_commit_with_producer_of_another_partition(log: MemoryLog) -> None:
    """Only partition 0 has a new owner. The former one commits partition 1 with the producer of
    partition 2, and the group refuses it by its generation.
    """
    zombie = Owner(log, NUMBERS)
    await zombie.assign(10)
    successor = Owner(log, [0])
    await successor.assign(10)
    zombie.member.counted_in = False
    for number in (1, 2):
        with pytest.raises(PartitionLost):
            await zombie.commit_transaction([0], number)

    assert await all_answers(log) == [{}, {}, {}]
    assert zombie.losses == 1


async def test_next_owner_waits_for_transaction_of_another_producer(
    log: MemoryLog, owner: Owner
) -> None:
    """A process has written offsets of partitions 1 and 2 with the producer of one of them, and
    stopped. The next owner of the other one reads its offsets when both have a next owner.
    """
    tasks = await held(log, owner)
    await hold_second(log, tasks)
    (transactional_id,) = log.faults.transactions.open()
    leading = int(transactional_id.rsplit(".", 1)[1])
    (other,) = set(NUMBERS) - {0, leading}
    next_of_other, next_of_leading = Owner(log, [other]), Owner(log, [leading])
    assigning = asyncio.create_task(next_of_other.assign(10))
    await eventually(lambda: next_of_other.member.is_reading)
    assert not assigning.done()
    await next_of_leading.assign(10)
    await assigning

    log.faults.transactions.release()
    owner.member.counted_in = False
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes[1:]] == [PartitionLost, PartitionLost]
    assert await all_answers(log) == [{0: 1}, {}, {}]
    assert (other, 0) in next_of_other.requests
