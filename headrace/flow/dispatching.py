"""Batches on their way to executors of other processes, each to one that is free.

Every executor that has announced itself has berths, at least two for each instance of a model
(`headrace.flow.fleet.Window`). A berth pulls a batch, writes it to a partition that its executor
reads, and pulls the next when the completion of this one was announced. So a batch closes when
there is room for it, as it does in one process. While no executor is known, a few writers pull for
whoever reads.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from headrace.events import Completion, ExecutorEvent
from headrace.flow.batch_edges import BatchWriter, apart
from headrace.flow.channel import PullChannel, Puller
from headrace.flow.fleet import ANYBODY, Berth, Fleet, ModelKey, Window
from headrace.flow.hearing import Hearing
from headrace.messages import Batch
from headrace.models.registry import Models
from headrace.models.version import State
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

UNACKNOWLEDGED_BATCHES = 4
"""While no executor is known."""
COMPLETION_S = 60.0
"""A batch without a completion for so long no longer counts as under way."""


class _Flight:
    """What was written of one batch; `done` is set when all of it has ended, or nobody knows."""

    __slots__ = ("berth", "done", "parts", "since_s")

    def __init__(self, berth: Berth, since_s: float) -> None:
        self.berth = berth
        self.since_s = since_s
        self.parts: set[str] = set()
        self.done = asyncio.Event()

    def ended(self, part: str) -> None:
        """A part of it needs no more waiting for."""
        self.parts.discard(part)
        if not self.parts:
            self.done.set()


class BatchOutlet:
    """Pulls batches and writes them to `batches`.

    Args:
        models: told what executors say of models.
        hearing: where executors are heard.
    """

    def __init__(
        self,
        pulls: PullChannel[ModelKey, Batch],
        writer: BatchWriter,
        models: Models,
        hearing: Hearing,
        metrics: Metrics,
    ) -> None:
        self._pulls = pulls
        self._writer = writer
        self._models = models
        self._hearing = hearing
        self._metrics = metrics
        self._fleet = Fleet()
        self._pullers: dict[Berth, list[Puller[ModelKey, Batch]]] = {}
        self._windows: dict[Berth, Window] = {}
        self._flights: dict[str, _Flight] = {}
        self._closing = False

    async def run(self) -> None:
        """Until the batcher closes."""
        async with asyncio.TaskGroup() as tasks:

            def heard(events: list[ExecutorEvent]) -> None:
                self._hear(events)
                self._arrange(tasks)

            self._arrange(tasks)
            tasks.create_task(self._hearing.run(heard), name="hear-executors")
            await self._pulls.ended()
            self._closing = True
            self._hearing.close()
            for flight in self._flights.values():
                flight.done.set()
        self._writer.close()

    def _hear(self, events: list[ExecutorEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            self._fleet.heard(event, now_s)
            self._models.heed(event)
            for completion in event.completions:
                self._ended(completion, now_s)
        self._fleet.expire(now_s)
        for flight in self._flights.values():
            if not self._fleet.knows(flight.berth.executor):
                flight.done.set()
        self._metrics.known_executors.set(len(self._fleet))

    def _ended(self, completion: Completion, now_s: float) -> None:
        flight = self._flights.pop(completion.batch_id, None)
        if flight is None:
            return
        flight.ended(completion.batch_id)
        window = self._windows.get(flight.berth)
        if window is not None and completion.compute_us:
            flight_us = int((now_s - flight.since_s) * 1e6)
            window.observe(flight_us, completion.stay_us, completion.compute_us)

    def _arrange(self, tasks: asyncio.TaskGroup) -> None:
        """Have as many pull for each berth as it has room for."""
        wanted = self._wanted()
        for berth in [berth for berth in self._pullers if berth not in wanted]:
            self._windows.pop(berth, None)
            for puller in self._pullers.pop(berth):
                puller.release()
        for berth, room in wanted.items():
            pullers = self._pullers.setdefault(berth, [])
            while len(pullers) > room:
                pullers.pop().release()
            while len(pullers) < room and not self._closing:
                puller = self._pulls.puller(berth.key)
                pullers.append(puller)
                tasks.create_task(self._fill(berth, puller), name="write-batches")

    def _wanted(self) -> dict[Berth, int]:
        """Berths of the executors; a model that none of them has is written to anybody, who then
        says why it does not run. While no executor is known all of them are.
        """
        berths = self._fleet.berths()
        if not berths:
            return {Berth(ANYBODY, None): UNACKNOWLEDGED_BATCHES}
        hosted = {berth.key for berth in berths}
        room = {
            berth: instances * self._windows.setdefault(berth, Window()).size
            for berth, instances in berths.items()
        }
        homeless = {
            (version.name, version.version) for version in self._models.versions(State.READY)
        } - hosted
        return room | {Berth(ANYBODY, key): 1 for key in homeless}

    async def _fill(self, berth: Berth, puller: Puller[ModelKey, Batch]) -> None:
        """Write one batch after the other, each when the one before has ended."""
        while not puller.ask.at_once:
            batch = await puller.pull()
            if batch is None:
                return
            partition = self._fleet.partition_of(berth.executor)
            if partition is None:
                await self._writer.write_all(batch, None)
                continue
            flight = _Flight(berth, time.monotonic())
            self._expect(flight, [batch])
            if not await self._writer.write(batch, partition):
                parts = apart(batch)
                self._expect(flight, parts)
                self._flights.pop(batch.batch_id, None)
                flight.ended(batch.batch_id)
                for part in parts:
                    if not await self._writer.write_or_refuse(part, partition):
                        self._flights.pop(part.batch_id, None)
                        flight.ended(part.batch_id)
            await self._landing(flight)

    def _expect(self, flight: _Flight, parts: list[Batch]) -> None:
        for part in parts:
            flight.parts.add(part.batch_id)
            self._flights[part.batch_id] = flight

    async def _landing(self, flight: _Flight) -> None:
        """Wait until all of it has ended."""
        try:
            async with asyncio.timeout(COMPLETION_S):
                await flight.done.wait()
        except TimeoutError:
            log.warning(
                Event.COMPLETION_MISSING,
                executor=flight.berth.executor,
                batches=sorted(flight.parts),
            )
        for part in flight.parts:
            self._flights.pop(part, None)
