"""Sealing against a model: whatever fails, whoever owns the partition, each is answered once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.transactions import PartitionLost
from headrace.log.memory.faults import TransactionFault
from tests.support.transactions import SOURCE, Owner, answers, log_with_topics

Fault = TransactionFault | None
Step = tuple[list[int], Fault, bool]
"""Offsets that end, what becomes of the seal, and whether another owner comes afterwards."""


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """All offsets end, some of them again and again, as under several owners."""
    offsets = draw(st.permutations(range(24)))
    cut = draw(st.lists(st.integers(0, 24), max_size=6).map(sorted))
    parts = [offsets[start:stop] for start, stop in zip([0, *cut], [*cut, 24], strict=True)]
    faults = st.one_of(st.none(), st.sampled_from(TransactionFault))
    return [(part, draw(faults), draw(st.booleans())) for part in parts]


async def play(play_steps: list[Step]) -> None:
    """Go through the steps, with a check after each."""
    log = await log_with_topics()
    owner, former = Owner(log), None
    await owner.assign(24)
    done: set[int] = set()
    for offsets, fault, changes in play_steps:
        if fault is not None:
            log.faults.transactions.fail(fault)
        await owner.commit_transaction(list(offsets))
        done.update(offsets)
        assert await answers(log) == Counter(done)
        committed = (await log.committed("group", [SOURCE]))[SOURCE]
        progress = AckedOffsets(0) if committed is None else AckedOffsets.from_committed(committed)
        assert {offset for offset in range(24) if offset in progress} == done
        if changes:
            former, owner = owner, Owner(log)
            await owner.assign(24)
            with pytest.raises(PartitionLost):
                await zombie_seals(former)
            assert await answers(log) == Counter(done)
    log.faults.transactions.fail()
    await owner.commit_transaction(list(range(24)))
    assert await answers(log) == Counter(range(24))


async def zombie_seals(former: Owner) -> None:
    """The group does not count it in any more, and it does not know."""
    former.member.counted_in = False
    if not former.requests:
        raise PartitionLost("nothing was left that it could try")
    await former.commit_transaction(list(former.requests))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_transactions_under_faults_answer_each_request_once(
    some_steps: list[Step],
) -> None:
    """After each step what is visible and what is committed tell the same story."""
    asyncio.run(play(some_steps))
