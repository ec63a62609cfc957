"""What an instance runs next: fresh batches, pulled ahead while it computes, and failed ones.

While a run of some length is under way, the next batch is pulled just in time and gathered into
the block that is not in use, so that it can begin when the run ends. Parts of failed batches and
fresh batches take turns. A batch that the backend could not run now waits for its moment, while
others run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from headrace.clock import Clock
from headrace.crash_isolation.run_gate import Entry
from headrace.models.backend import Arrays
from headrace.protocol.messages import Batch, Request
from headrace.transport.channels import BatchConsumer

AHEAD_FROM_US = 2000
"""The timers of the event loop have steps of a millisecond: shorter runs are not looked beyond."""
LEAD_US = 1000
"""By so much more than gathering takes the next batch closes before the run's predicted end."""


class PreparedBatch(NamedTuple):
    """A batch to run.

    Attributes:
        ended: those of its requests that were no longer wanted when it was gathered.
        requests: the others.
        arrays: their rows; None while they are not gathered.
        began_us, gathered_us: when gathering began and ended, in epoch microseconds.
        clock: of these stamps, and of those of its run; None where gathering has not begun.
        fresh: it has not run before.
        attempts: how often these requests have run together.
        entry: of its run, if that was begun behind the one before it.
    """

    batch: Batch
    ended: list[Request]
    requests: list[Request]
    arrays: Arrays | None = None
    began_us: int = 0
    gathered_us: int = 0
    clock: Clock | None = None
    fresh: bool = True
    entry: Entry | None = None
    attempts: int = 0

    @property
    def started(self) -> bool:
        """Whether its run was begun already."""
        return self.entry is not None


class _Later(NamedTuple):
    """A batch to be run again, at a moment of the loop's clock; the earliest sorts first."""

    at_s: float
    number: int
    batch: Batch
    attempts: int


class Prefetch:
    """One instance's batches.

    Args:
        puller: of fresh ones.
        gather: makes one ready, ahead of its turn.
        tasks: the instance's own; what pulls ahead belongs to them.
    """

    def __init__(
        self,
        puller: BatchConsumer[tuple[str, str], Batch],
        gather: Callable[[Batch], PreparedBatch],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._puller = puller
        self._gather = gather
        self._tasks = tasks
        self._parts: deque[Batch] = deque()
        self._later: list[_Later] = []
        self._numbers = count()
        self._fresh_turn = False
        self._pulling: asyncio.Task[PreparedBatch | None] | None = None
        self._gathering_us = 0

    def put_aside(self, parts: Iterable[Batch]) -> None:
        """Parts of a batch that failed: they are run when it is their turn."""
        self._parts.extend(parts)

    def put_off(self, batch: Batch, pause_s: float, attempts: int) -> None:
        """A batch that may work later: it is run after a pause."""
        at_s = asyncio.get_running_loop().time() + pause_s
        heappush(self._later, _Later(at_s, next(self._numbers), batch, attempts))

    async def next(self) -> PreparedBatch | None:
        """The next batch; None when there will be no more."""
        begun = self._begun()
        if begun is not None:
            return begun
        if self._later and self._wait_s() <= 0:
            return self._due()
        if self._parts:
            taken = self._fresh_now() if self._fresh_turn else None
            self._fresh_turn = not self._fresh_turn
            return taken or _of(self._parts.popleft(), fresh=False)
        return await (self._fresh_or_due() if self._later else self._fresh())

    def _begun(self) -> PreparedBatch | None:
        """A batch whose run was begun ahead. What is begun now would wait for it on the thread,
        where neither its deadlines nor its time are looked at.
        """
        pulling = self._pulling
        taken = pulling.result() if pulling is not None and pulling.done() else None
        if taken is None or not taken.started:
            return None
        self._pulling, self._fresh_turn = None, False
        return taken

    def _wait_s(self) -> float:
        return self._later[0].at_s - asyncio.get_running_loop().time()

    def _due(self) -> PreparedBatch:
        _, _, batch, attempts = heappop(self._later)
        return _of(batch, fresh=False)._replace(attempts=attempts)

    async def _fresh_or_due(self) -> PreparedBatch | None:
        """Whatever comes first. Nobody cancels a pull, whose batch would be lost with it."""
        if self._pulling is None:
            self._pulling = self._tasks.create_task(self._pull(), name="executor-pull")
        self._puller.hurry()
        await asyncio.wait([self._pulling], timeout=self._wait_s())
        if self._pulling.done():
            taken = await self._fresh()
            if taken is not None:
                return taken
            await asyncio.sleep(self._wait_s())
        return self._due()

    def look_ahead(self, now_us: int, run_us: int | None) -> None:
        """A run begins that is predicted to take so long: have the next batch ready at its end."""
        if run_us is None or run_us < AHEAD_FROM_US or self._parts or self._pulling is not None:
            return
        if self._later and self._wait_s() <= 0:
            return  # it is its turn
        close_at_us = now_us + run_us - LEAD_US - 2 * self._gathering_us
        self._pulling = self._tasks.create_task(
            self._pull_ahead(max(now_us, close_at_us)), name="executor-pull-ahead"
        )

    async def _pull_ahead(self, close_at_us: int) -> PreparedBatch | None:
        batch = await self._puller.pull(close_at_us)
        if batch is None:
            return None
        taken = self._gather(batch)
        # Forgets slowly, since what comes late costs more than what comes early.
        self._gathering_us = max(
            taken.gathered_us - taken.began_us, self._gathering_us - self._gathering_us // 8
        )
        return taken

    async def _fresh(self) -> PreparedBatch | None:
        pulling, self._pulling = self._pulling, None
        if pulling is not None:
            if not pulling.done():  # the run has ended earlier than was predicted
                self._puller.hurry()
            return await pulling
        return await self._pull()

    async def _pull(self) -> PreparedBatch | None:
        batch = await self._puller.pull()
        return None if batch is None else _of(batch)

    def _fresh_now(self) -> PreparedBatch | None:
        """A fresh batch, if there is one now."""
        if self._pulling is None:
            batch = self._puller.take()
            return None if batch is None else _of(batch)
        if not self._pulling.done():
            return None
        pulling, self._pulling = self._pulling, None
        return pulling.result()


def _of(batch: Batch, *, fresh: bool = True) -> PreparedBatch:
    return PreparedBatch(batch, [], batch.requests, fresh=fresh)
