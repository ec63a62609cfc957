"""The system under test: processes that together host all four stages, some of them twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.chaos.history import Fault, FaultKind, History
from tests.chaos.members import Member, now_ms

FORMS: dict[str, tuple[str, ...]] = {
    "fused": ("ingest,batcher,executor,responder",),
    "three": ("ingest", "batcher,executor", "responder"),
    "four": ("ingest", "batcher", "executor", "responder"),
}
"""Which stages share a process; a name for each way."""


class Deployment:
    """The members that run now.

    Args:
        environment: the settings of all of them.
        directory: where their output goes.
        history: where faults and changes are written down.
        supervisors: owns the tasks that keep them running.

    Attributes:
        members: those that are to run, be they up at this moment or not.
        form: how they share the stages.
    """

    def __init__(
        self,
        environment: dict[str, str],
        directory: Path,
        history: History,
        supervisors: asyncio.TaskGroup,
    ) -> None:
        self._environment = environment
        self._directory = directory
        self._history = history
        self._supervisors = supervisors
        self._started: list[tuple[Member, asyncio.Task[None]]] = []
        self.members: list[Member] = []
        self.form = ""

    async def start(self, form: str) -> None:
        """Start a process for each part of the form, and wait until all are ready."""
        self.form = form
        members = [self._start(stages) for stages in FORMS[form]]
        await asyncio.gather(*[member.wait_ready() for member in members])

    async def stop(self) -> None:
        """End all that run, in order, and at once."""
        members, self.members = self.members, []
        await asyncio.gather(*[member.stop() for member in members])

    async def save_status(self) -> None:
        """Keep the status of all that run beside their logs."""
        await asyncio.gather(*[member.save_status() for member in self.members])

    async def join(self, stages: tuple[str, ...]) -> Member:
        """One more instance of a part; returns when it serves."""
        began_ms = now_ms()
        member = self._start(",".join(stages))
        await member.wait_ready()
        self._history.add(Fault(began_ms, now_ms(), FaultKind.JOINED, stages))
        return member

    async def leave(self, member: Member) -> None:
        """One instance less."""
        began_ms = now_ms()
        self.members.remove(member)
        await member.stop()
        self._history.add(Fault(began_ms, now_ms(), FaultKind.LEFT, member.stages))

    def abandon(self) -> None:
        """Kill whatever runs."""
        for _, task in self._started:
            task.cancel()

    @property
    def crashes(self) -> list[str]:
        """Lives that ended although nobody had ended them, or that would not end."""
        return [crash for member, _ in self._started for crash in member.crashes]

    def _start(self, stages: str) -> Member:
        number = len(self._started) + 1
        output = self._directory / f"{number:02}-{stages.replace(',', '-')}"
        member = Member(stages, self._environment, output, self._history)
        task = self._supervisors.create_task(member.run(), name=f"supervisor-{output.name}")
        self._started.append((member, task))
        self.members.append(member)
        return member
