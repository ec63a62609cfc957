"""Partitions of requests lose their ends, as by the election of a leader that was not in sync."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.codec import decode_response
from headrace.topics import STAGES, Stage, Topic
from tests.support.conditions import eventually
from tests.support.dying import records_of
from tests.support.pipelines import PARTITIONS, Caller, Grouping, log_for, serving, settings_of

FUSED: Grouping = [STAGES]
APART: Grouping = [STAGES[:3], (Stage.RESPONDER,)]
SENT, LOST = 100, 10
"""Records of each partition."""


class LostEndHarness:
    """A caller on a log whose partitions of requests can lose their ends."""

    def __init__(self, settings: Settings, log: MemoryLog) -> None:
        self.settings = settings
        self.log = log
        self._caller = Caller(settings, log)
        self._partitions = [
            TopicPartition(settings.topic(Topic.REQUESTS), number) for number in range(PARTITIONS)
        ]

    async def send(self, count: int) -> None:
        """Send so many requests to each partition."""
        await self._caller.send(count * PARTITIONS)

    def lose_ends(self) -> None:
        """Each partition loses its last records."""
        for partition in self._partitions:
            self.log.faults.partitions.truncate(partition, SENT - LOST)

    async def committed(self, offset: int) -> None:
        """Wait until this offset is committed for each partition."""

        async def is_committed() -> bool:
            found = await self.log.committed(self.settings.namespace, self._partitions)
            return found == dict.fromkeys(self._partitions, Committed(offset))

        await eventually(is_committed)

    async def counts(self) -> Counter[int]:
        """How many answers each request has, by its number."""
        found = await records_of(self.settings, self.log, Topic.RESPONSES)
        return Counter(int(decode_response(each.headers, each.value).id or -1) for each in found)

    async def all_answered(self, numbers: range) -> Counter[int]:
        """Wait until each of these has an answer, and return `counts`."""
        counts: Counter[int] = Counter()

        async def are_answered() -> bool:
            counts.clear()
            counts.update(await self.counts())
            return counts.keys() >= set(numbers)

        await eventually(are_answered, recheck_s=0.05)
        return counts


async def bench_with(repository: Path, guarantee: str) -> LostEndHarness:
    """A bench with this guarantee."""
    settings = settings_of(repository)
    delivery = settings.delivery.model_copy(update={"guarantee": guarantee})
    settings = settings.model_copy(update={"delivery": delivery})
    return LostEndHarness(settings, await log_for(settings))


@pytest.mark.parametrize("grouping", [FUSED, APART], ids=["fused", "responder-apart"])
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_log_end_lost_between_runs_repeats_no_answer(
    tmp_path: Path, grouping: Grouping, guarantee: str
) -> None:
    """Records that are left are not answered again; new records at lost offsets are answered."""
    bench = await bench_with(tmp_path, guarantee)
    async with serving(bench.settings, bench.log, grouping):
        await bench.send(SENT)
        await bench.committed(SENT)
    bench.lose_ends()
    async with serving(bench.settings, bench.log, grouping):
        await bench.send(1)
        counts = await bench.all_answered(range((SENT + 1) * PARTITIONS))

    assert set(counts.values()) == {1}


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_log_end_lost_while_running_repeats_no_answer(tmp_path: Path, guarantee: str) -> None:
    """Records that are left are not answered again; new records at lost offsets are answered."""
    bench = await bench_with(tmp_path, guarantee)
    async with serving(bench.settings, bench.log, FUSED):
        await bench.send(SENT)
        await bench.committed(SENT)
        bench.lose_ends()
        await bench.committed(SENT - LOST)
        await bench.send(1)
        counts = await bench.all_answered(range((SENT + 1) * PARTITIONS))

    assert set(counts.values()) == {1}


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_log_end_lost_with_separate_responder_repeats_no_answer(
    tmp_path: Path, guarantee: str
) -> None:
    """Requests that get the lost offsets can be taken for answered; those behind are answered."""
    bench = await bench_with(tmp_path, guarantee)
    async with serving(bench.settings, bench.log, APART):
        await bench.send(SENT)
        await bench.committed(SENT)
        bench.lose_ends()
        await bench.send(LOST)
        await bench.send(1)
        first_behind = (SENT + LOST) * PARTITIONS
        counts = await bench.all_answered(range(first_behind, first_behind + PARTITIONS))

    assert set(counts.values()) == {1}
