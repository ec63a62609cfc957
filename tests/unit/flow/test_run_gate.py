"""Runs enter beside each other, or alone, and are marked before."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from headrace.crash_isolation.poison_search import Alone
from headrace.crash_isolation.run_gate import RunGate
from headrace.log.port import TopicPartition

ONE = TopicPartition("requests", 0)


class RunGateHarness:
    """A gate, and the story of what was marked and what entered."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.may_keep = asyncio.Event()
        self.may_keep.set()
        self.gate = RunGate(self._keep)
        self.gate.is_marking = True

    async def _keep(self) -> None:
        await self.may_keep.wait()
        alone = "" if self.gate.alone is None else f" alone {self.gate.alone.offset}"
        self.story.append(f"mark {sorted(self.gate.running(ONE))}{alone}")

    async def beside(self, offset: int, ended: asyncio.Event) -> None:
        """Run beside others until `ended`."""
        entry = await self.gate.enter([(ONE, offset)])
        self.story.append(f"run {offset}")
        await ended.wait()
        self.gate.leave(entry)

    async def alone(self, offset: int, ended: asyncio.Event) -> None:
        """Run alone until `ended`."""
        await self.gate.enter_alone(Alone(ONE, offset, 0))
        self.story.append(f"run {offset} alone")
        await ended.wait()
        self.gate.leave_alone()


async def ack() -> None:
    """Let all tasks get as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def start(*runs: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    """Start runs in this order."""
    tasks = [asyncio.create_task(run) for run in runs]
    await ack()
    return tasks


async def test_suspect_run_is_marked_before_it_begins() -> None:
    """While the mark cannot be written, nothing begins; what waits shares a write."""
    bench, ended = RunGateHarness(), asyncio.Event()
    bench.may_keep.clear()
    ended.set()
    runs = await start(bench.beside(1, ended), bench.beside(2, ended), bench.beside(3, ended))
    before = list(bench.story)
    bench.may_keep.set()
    await asyncio.gather(*runs)

    assert before == []
    assert bench.story == ["mark [1, 2, 3]", "run 1", "mark [2, 3]", "run 2", "run 3"]


async def test_suspect_run_waits_until_all_others_have_left() -> None:
    """The run is marked as alone when all others have left, not before."""
    bench, first, second = RunGateHarness(), asyncio.Event(), asyncio.Event()
    runs = await start(bench.beside(1, first), bench.alone(7, second))
    before = list(bench.story)
    first.set()
    await ack()
    second.set()
    await asyncio.gather(*runs)

    assert before == ["mark [1]", "run 1"]
    assert bench.story[2:] == ["mark [] alone 7", "run 7 alone"]


async def test_other_runs_pass_between_two_suspect_runs() -> None:
    """Runs that waited for the first suspect go before the second one."""
    bench, ends = RunGateHarness(), [asyncio.Event() for _ in range(3)]
    runs = await start(bench.alone(7, ends[0]), bench.alone(8, ends[1]), bench.beside(1, ends[2]))
    during = list(bench.story)
    ends[0].set()
    await ack()
    between = bench.story[len(during) :]
    for each in ends:
        each.set()
    await asyncio.gather(*runs)

    assert during == ["mark [] alone 7", "run 7 alone"]
    assert between == ["mark [1]", "run 1"]
    assert bench.story[-1] == "run 8 alone"


async def test_run_gate_stays_closed_when_run_ends_its_process() -> None:
    """A run marked as alone while the process ends would be taken for the culprit."""
    bench, never = RunGateHarness(), asyncio.Event()
    dying, suspect = await start(bench.beside(1, never), bench.alone(7, never))
    dying.cancel()
    await ack()
    suspect.cancel()
    await ack()

    assert bench.story == ["mark [1]", "run 1"]
