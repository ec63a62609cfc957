"""Sealing against a model: whatever fails, whoever owns the partition, each is answered once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from headrace.flow import sealing
from headrace.flow.answered import Progress
from headrace.flow.books import Books, Outgoing, requests_of
from headrace.flow.inflight import Budget, Ledger
from headrace.flow.sealing import Lost, Sealing, Unsealed
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import SealFault
from headrace.log.port import Committed, Consumer, NewRecord, TopicInfo, TopicPartition
from headrace.messages import Envelope, Request
from headrace.telemetry.metrics import Metrics
from tests.support.visible import visible

SOURCE = TopicPartition("requests", 0)
ANSWERS = TopicPartition("answers", 0)

Fault = SealFault | None
Step = tuple[list[int], Fault, bool]
"""Offsets that end, what becomes of the seal, and whether another owner comes afterwards."""


class _Member:
    """What a seat asks of its consumer."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def is_member(self) -> bool:
        return True

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        return await self._log.committed("group", partitions)


class Owner:
    """One owner of the source partition, from its assignment on."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._ledger = Ledger(Budget(1_000_000), lambda: None)
        self._books = Books(self._ledger, None, SOURCE.topic, SOURCE.topic)
        metrics = Metrics(CollectorRegistry())
        self.sealing = Sealing(log, self._books, "group", metrics, lambda: None)
        self.requests: dict[int, Request] = {}

    async def assign(self, offsets: int) -> None:
        """Fence, read what is committed, and admit what is not answered."""
        await self.sealing.fence(cast(Consumer, _Member(self._log)), [0])
        committed = (await self._log.committed("group", [SOURCE]))[SOURCE]
        progress = Progress(0) if committed is None else Progress.from_committed(committed)
        assignment = self._ledger.assign(SOURCE, progress)
        for offset in range(progress.base, offsets):
            if offset in progress:
                assignment.skip(offset)
                continue
            receipt = assignment.admit(offset, 1)
            origin = (0, offset, receipt.previous, 0)
            self.requests[offset] = Request(receipt, origin, None, None, [], Envelope())

    async def seal(self, offsets: list[int]) -> None:
        """Answer these, as far as they are not answered, until that is done."""
        outgoing = [(self.requests.pop(each), ANSWERS) for each in offsets if each in self.requests]
        while outgoing:
            try:
                await self.sealing.seal(0, outgoing, compose)
            except Unsealed:
                continue
            return


def compose(outgoing: Sequence[Outgoing]) -> dict[TopicPartition, list[NewRecord]]:
    """One record for each, which says whose answer it is."""
    return {
        ANSWERS: [
            NewRecord(None, None, [("x-request", f"requests/0/{request.offset}".encode())])
            for request in requests_of(outgoing)
        ]
    }


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """All offsets end, some of them again and again, as under several owners."""
    offsets = draw(st.permutations(range(24)))
    cut = draw(st.lists(st.integers(0, 24), max_size=6).map(sorted))
    parts = [offsets[start:stop] for start, stop in zip([0, *cut], [*cut, 24], strict=True)]
    faults = st.one_of(st.none(), st.sampled_from(SealFault))
    return [(part, draw(faults), draw(st.booleans())) for part in parts]


async def answers(log: MemoryLog) -> Counter[int]:
    """How often each offset has a visible answer."""
    found = Counter[int]()
    for record in await visible(log, ANSWERS.topic):
        found[int((dict(record.headers)["x-request"] or b"").rsplit(b"/", 1)[1])] += 1
    return found


async def play(play_steps: list[Step]) -> None:
    """Go through the steps, with a check after each."""
    log = MemoryLog()
    topics: list[Any] = [TopicInfo(each.topic, 1, {}) for each in (SOURCE, ANSWERS)]
    await log.create_topics(topics, replication_factor=1)
    owner, former = Owner(log), None
    await owner.assign(24)
    done: set[int] = set()
    for offsets, fault, changes in play_steps:
        if fault is not None:
            log.faults.spoil_seals(fault)
        await owner.seal(list(offsets))
        done.update(offsets)
        assert await answers(log) == Counter(done)
        committed = (await log.committed("group", [SOURCE]))[SOURCE]
        progress = Progress(0) if committed is None else Progress.from_committed(committed)
        assert {offset for offset in range(24) if offset in progress} == done
        if changes:
            former, owner = owner, Owner(log)
            await owner.assign(24)
            with pytest.raises(Lost):
                await zombie_seals(former)
            assert await answers(log) == Counter(done)
    log.faults.spoil_seals()
    await owner.seal(list(range(24)))
    assert await answers(log) == Counter(range(24))


async def zombie_seals(former: Owner) -> None:
    """The group does not count it in any more, and it does not know."""

    async def is_member() -> bool:
        return False

    for seat in former.sealing._seats.values():
        seat.consumer.is_member = is_member  # type: ignore[method-assign]  # it is a zombie's
    if not former.requests:
        raise Lost("nothing was left that it could try")
    await former.seal(list(former.requests))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_each_request_is_answered_once_whoever_answers_and_whatever_fails(
    some_steps: list[Step],
) -> None:
    """After each step what is visible and what is committed tell the same story."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealing, "RETRY_S", 0.0)
        asyncio.run(play(some_steps))
