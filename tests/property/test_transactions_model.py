"""Transactions against a model: whatever fails, whoever owns a partition, each is answered once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.transactions import PartitionLost
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import TopicPartition
from tests.support.transactions import SOURCE, Owner, answers, log_with_topics

NUMBERS = range(3)
OFFSETS = range(12)

Place = tuple[int, int]
"""A source partition and an offset."""
Fault = TransactionFault | None
Step = tuple[list[Place], Fault, bool]
"""What ends, what becomes of the next transaction, and whether another owner comes afterwards."""


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """All requests end, in any order, in a few steps."""
    places = draw(st.permutations([(number, offset) for number in NUMBERS for offset in OFFSETS]))
    cut = draw(st.lists(st.integers(0, len(places)), max_size=6).map(sorted))
    parts = [places[start:stop] for start, stop in zip([0, *cut], [*cut, len(places)], strict=True)]
    faults = st.one_of(st.none(), st.sampled_from(TransactionFault))
    return [(part, draw(faults), draw(st.booleans())) for part in parts]


async def play(play_steps: list[Step]) -> None:
    """Go through the steps, with a check after each."""
    log = await log_with_topics(len(NUMBERS))
    owner = Owner(log, NUMBERS)
    await owner.assign(len(OFFSETS))
    done: set[Place] = set()
    for places, fault, changes in play_steps:
        if fault is not None:
            log.faults.transactions.fail(fault)
        await commit(owner, places)
        done.update(places)
        await check(log, done)
        if changes:
            former, owner = owner, Owner(log, NUMBERS)
            await owner.assign(len(OFFSETS))
            with pytest.raises(PartitionLost):
                await zombie_commits(former)
            await check(log, done)
    log.faults.transactions.fail()
    everything = [(number, offset) for number in NUMBERS for offset in OFFSETS]
    await commit(owner, everything)
    await check(log, set(everything))


async def commit(owner: Owner, places: list[Place]) -> None:
    """Commit each partition's answers; they share transactions as it happens."""
    by_number = {
        number: [offset for each, offset in places if each == number] for number in NUMBERS
    }
    outcomes = await asyncio.gather(
        *(owner.commit_transaction(offsets, number) for number, offsets in by_number.items()),
        return_exceptions=True,
    )
    for error in filter(None, outcomes):
        raise error


async def check(log: MemoryLog, done: set[Place]) -> None:
    """What is visible and what is committed are the same."""
    for number in NUMBERS:
        offsets = {offset for each, offset in done if each == number}
        assert await answers(log, number) == Counter(offsets)
        source = TopicPartition(SOURCE.topic, number)
        committed = (await log.committed("group", [source]))[source]
        progress = AckedOffsets(0) if committed is None else AckedOffsets.from_committed(committed)
        assert {offset for offset in OFFSETS if offset in progress} == offsets


async def zombie_commits(former: Owner) -> None:
    """The group does not count it in any more, and it does not know."""
    former.member.counted_in = False
    if not former.requests:
        raise PartitionLost("nothing was left that it could try")
    await commit(former, list(former.requests))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_transactions_under_faults_answer_each_request_once(some_steps: list[Step]) -> None:
    """After each step what is visible and what is committed tell the same story."""
    asyncio.run(play(some_steps))
