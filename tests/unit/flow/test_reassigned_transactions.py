"""Transactions of a partition that is assigned anew, because its topic lost records or is new."""

from __future__ import annotations

import asyncio

import pytest

from headrace.delivery.offset_store import PendingAnswer
from headrace.delivery.transactions import TransactionAborted
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import TopicInfo
from headrace.protocol.messages import Envelope, Request
from tests.support.conditions import eventually
from tests.support.sources import GROUP, ONE, Stage, committed, fill, reading
from tests.support.transactions import ANSWERS, compose
from tests.support.visible import visible


@pytest.fixture
async def log() -> MemoryLog:
    """With ten requests."""
    log = MemoryLog()
    topics = [TopicInfo(each.topic, 1, {}) for each in (ONE, ANSWERS)]
    await log.create_topics(topics, replication_factor=1)
    await fill(log, 10)
    return log


def pending_of(stage: Stage, *offsets: int) -> list[PendingAnswer]:
    """Take requests of a stage that are not revoked."""
    found: list[PendingAnswer] = []
    for offset in offsets:
        (ack_handle,) = [
            each for each in stage.ack_handles if each.offset == offset and not each.revoked
        ]
        stage.ack_handles.remove(ack_handle)
        origin = (ONE.partition, offset, ack_handle.previous, 0)
        request = Request(ack_handle, *origin, None, None, [], Envelope())
        found.append((request, ANSWERS))
    return found


async def commit(stage: Stage, pending: list[PendingAnswer]) -> None:
    """Commit answers, and repeat what was aborted."""
    transactions = stage.source.transactions
    assert transactions is not None
    while pending:
        try:
            await transactions.commit_transaction(ONE.partition, pending, compose)
        except TransactionAborted:
            continue
        return


async def test_rebalance_while_truncated_partition_is_assigned_again_leaves_it_a_producer(
    log: MemoryLog,
) -> None:
    """Both fence it, one after the other; the last of them fails at first."""
    transactions = log.faults.transactions
    async with reading(log, exactly_once=True) as stage:
        await eventually(lambda: len(stage.offsets) == 10)
        await commit(stage, pending_of(stage, *range(10)))
        transactions.hold_entries()
        log.faults.partitions.truncate(ONE, 8)
        await eventually(lambda: transactions.waiting_entries)  # assigned again
        log.faults.groups.force_rebalance(GROUP)
        transactions.release_entry(fails=True)
        await eventually(lambda: transactions.waiting_entries)  # by the rebalance
        transactions.release_entry()
        await eventually(lambda: transactions.waiting_entries)  # assigned again, the second try
        transactions.release_entry(fails=True)
        transactions.release()
        await fill(log, 1)
        await eventually(lambda: stage.offsets[-1] == 8)
        await commit(stage, pending_of(stage, 8))
        found = await committed(log)

    assert found is not None
    assert found.offset == 9


async def test_answers_to_replaced_topic_do_not_count_for_new_one(log: MemoryLog) -> None:
    """A transaction of the former topic fails, and its recovery reads what it has committed."""
    async with reading(log, exactly_once=True) as stage:
        await eventually(lambda: len(stage.offsets) == 10)
        log.faults.transactions.hold()
        former = asyncio.create_task(commit(stage, pending_of(stage, *range(5))))
        await eventually(log.faults.transactions.open)
        log.faults.topics.replace(ONE.topic)
        await fill(log, 3)
        await eventually(lambda: stage.offsets[10:] == [0, 1, 2])
        log.faults.transactions.fail(TransactionFault.UNKNOWN_BUT_COMMITTED)
        log.faults.transactions.release()
        await former
        before = len(await visible(log, ANSWERS.topic))
        await commit(stage, pending_of(stage, 0, 1, 2))
        after = len(await visible(log, ANSWERS.topic))

    assert after - before == 3
