"""Dispatch batches to free executors in other processes.

Every announced executor has one slot for each model version, with room for at least two batches
for each instance (`headrace.transport.executor_registry.Window`). A consumer for each slot takes
the batches that there are, up to its room, writes them to a partition that the executor reads, and
pulls again when completions have made room. So a batch closes when there is room for it, as it
does in one process. While no executor is known, a few batches at a time are written for any
executor that reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from headrace.models.registry import Models
from headrace.models.version import State
from headrace.protocol.events import Completion, ExecutorEvent
from headrace.protocol.messages import Batch
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.transport.batch_io import BatchWriter, apart
from headrace.transport.burst_limiter import Pace
from headrace.transport.channels import BatchConsumer, BatchQueue
from headrace.transport.executor_events import ExecutorEventReader
from headrace.transport.executor_registry import (
    ANYBODY,
    ExecutorRegistry,
    ExecutorSlot,
    ModelKey,
    Window,
)

log = structlog.get_logger(__name__)

UNACKNOWLEDGED_BATCHES = 4
"""Number of unacknowledged batches while no executor is known."""
MAX_WRITTEN = 16
"""Most batches in one write to an executor, so that the others get their share."""
COMPLETION_S = 60.0
"""A batch without a completion for this long no longer counts as in flight."""


class _Station:
    """Consumer of one slot and the number of its batches in flight.

    Attributes:
        room: most batches that may be in flight.
        under_way: number of batches written and not known to have ended.
        changed: set when there may be new room.
    """

    __slots__ = ("berth", "changed", "puller", "room", "under_way", "window")

    def __init__(self, berth: ExecutorSlot, puller: BatchConsumer[ModelKey, Batch]) -> None:
        self.berth = berth
        self.puller = puller
        self.window = Window()
        self.room = 0
        self.under_way = 0
        self.changed = asyncio.Event()

    def ended(self) -> None:
        """Count one batch as no longer in flight."""
        self.under_way -= 1
        self.changed.set()

    def resize(self, room: int) -> None:
        """Set the number of batches that may be in flight."""
        self.room = room
        self.changed.set()

    def release(self) -> None:
        """Stop waiting: from now on pull only what is already there."""
        self.puller.release()
        self.changed.set()


class _Flight(NamedTuple):
    """Batch that was written to a known executor."""

    station: _Station
    since_s: float


class BatchDispatcher:
    """Pull batches and write them to `batches`.

    Args:
        models: receives what executors announce about their models.
        hearing: reader of the executors' events.
    """

    def __init__(
        self,
        pulls: BatchQueue[ModelKey, Batch],
        writer: BatchWriter,
        models: Models,
        hearing: ExecutorEventReader,
        metrics: Metrics,
    ) -> None:
        self._pulls = pulls
        self._writer = writer
        self._models = models
        self._hearing = hearing
        self._metrics = metrics
        self._fleet = ExecutorRegistry()
        self._pace = Pace()
        self._stations: dict[ExecutorSlot, _Station] = {}
        self._flights: dict[str, _Flight] = {}
        self._closing = False

    async def run(self) -> None:
        """Dispatch until the batcher closes."""
        async with asyncio.TaskGroup() as tasks:

            def heard(events: list[ExecutorEvent]) -> None:
                self._hear(events)
                self._arrange(tasks)

            self._arrange(tasks)
            tasks.create_task(self._hearing.run(heard), name="hear-executors")
            await self._pulls.ended()
            self._closing = True
            self._hearing.close()
            for station in self._stations.values():
                station.changed.set()
        self._writer.close()

    def _hear(self, events: list[ExecutorEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            self._fleet.heard(event, now_s)
            self._models.heed(event)
            self._ended(event.completions, now_s)
        self._fleet.expire(now_s)
        self._give_up(now_s)
        self._metrics.known_executors.set(len(self._fleet))

    def _ended(self, completions: Sequence[Completion], now_s: float) -> None:
        flights: dict[_Station, list[tuple[int, Completion]]] = {}
        for completion in completions:
            flight = self._flights.pop(completion.batch_id, None)
            if flight is None:
                continue
            flight.station.ended()
            flight_us = int((now_s - flight.since_s) * 1e6)
            flights.setdefault(flight.station, []).append((flight_us, completion))
        for station, ended in flights.items():
            station.window.observe(ended)

    def _give_up(self, now_s: float) -> None:
        """Stop waiting for completions that are overdue. `_flights` is ordered by start time."""
        overdue: dict[str, list[str]] = {}
        for batch_id, flight in self._flights.items():
            if now_s - flight.since_s < COMPLETION_S:
                break
            overdue.setdefault(flight.station.berth.executor, []).append(batch_id)
        for executor, batch_ids in overdue.items():
            log.warning(Event.COMPLETION_MISSING, executor=executor, batches=sorted(batch_ids))
            for batch_id in batch_ids:
                self._flights.pop(batch_id).station.ended()

    def _arrange(self, tasks: asyncio.TaskGroup) -> None:
        """Start a consumer for each new slot, and release those of slots that are gone."""
        instances = self._wanted()
        for berth in self._stations.keys() - instances.keys():
            gone = self._stations.pop(berth)
            gone.release()
            self._flights = {
                batch_id: flight
                for batch_id, flight in self._flights.items()
                if flight.station is not gone
            }
        for berth, count in instances.items():
            station = self._stations.get(berth)
            if station is None:
                if self._closing:
                    continue
                station = _Station(berth, self._pulls.puller(berth.key))
                self._stations[berth] = station
                tasks.create_task(self._fill(station), name="write-batches")
            known = berth.executor != ANYBODY
            station.resize(station.window.room(count) if known else count)

    def _wanted(self) -> dict[ExecutorSlot, int]:
        """Return the slots of the executors with their numbers of instances. A model that no
        executor has gets a slot of any executor, which then answers why it does not run. While no
        executor is known, all models share one such slot.
        """
        berths = self._fleet.berths()
        if not berths:
            return {ExecutorSlot(ANYBODY, None): UNACKNOWLEDGED_BATCHES}
        hosted = {berth.key for berth in berths}
        homeless = {
            (version.name, version.version) for version in self._models.versions(State.READY)
        } - hosted
        return berths | {ExecutorSlot(ANYBODY, key): 1 for key in homeless}

    async def _fill(self, station: _Station) -> None:
        """Write batches while there are any and there is room."""
        puller = station.puller
        while room := await self._room(station):
            batch = await puller.pull()
            if batch is None:
                return
            batches = [batch]
            while len(batches) < room and not puller.ask.at_once:
                batch = puller.take()
                if batch is None:
                    break
                batches.append(batch)
            self._pace.left(sum(len(each.requests) for each in batches), time.monotonic())
            await self._write(station, batches)

    async def _room(self, station: _Station) -> int:
        """Wait for room and return how many batches this slot may write; 0 once the slot has been
        released and another slot serves its model.
        """
        while not (self._closing or station.puller.ask.at_once):
            if station.room > station.under_way:
                pause_s = self._pace.pause_s(time.monotonic())
                if not pause_s:
                    return min(station.room - station.under_way, MAX_WRITTEN)
                await asyncio.sleep(pause_s)
            else:
                station.changed.clear()
                await station.changed.wait()
        return MAX_WRITTEN if self._closing or self._is_last(station) else 0

    def _is_last(self, station: _Station) -> bool:
        """True if no other slot serves the model of this released one, and none will once the
        registry has dropped the model. This slot then takes all waiting batches: the executor
        that reads them answers why they do not run.
        """
        key = station.berth.key
        served = {other.berth.key for other in self._stations.values()}
        return key is not None and served.isdisjoint((key, None))

    async def _write(self, station: _Station, batches: list[Batch]) -> None:
        partition = self._fleet.partition_of(station.berth.executor)
        if partition is None:
            async with asyncio.TaskGroup() as tasks:
                for batch in batches:
                    tasks.create_task(self._writer.write_all(batch, None), name="write-batch")
            return
        self._expect(station, batches)
        for batch in await self._writer.write(batches, partition):
            parts = apart(batch)
            self._expect(station, parts)
            self._forget([batch])
            self._forget(await self._writer.write_or_refuse(parts, partition))

    def _expect(self, station: _Station, batches: Sequence[Batch]) -> None:
        flight = _Flight(station, time.monotonic())
        for batch in batches:
            self._flights[batch.batch_id] = flight
        station.under_way += len(batches)

    def _forget(self, batches: Sequence[Batch]) -> None:
        """Remove batches that were not written from those in flight."""
        for batch in batches:
            flight = self._flights.pop(batch.batch_id, None)
            if flight is not None:
                flight.station.ended()
