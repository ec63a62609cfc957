"""Dispatch batches to free executors in other processes.

Every announced executor has one slot for each model version, with room for at least two batches
for each instance (`headrace.transport.executor_registry.InFlightWindow`). A consumer for each slot
takes the batches that there are, up to its room, writes them to a partition that the executor
reads, and pulls again when completions have made room. So a batch closes when there is room for
it, as it does in one process. While no executor is known, a few batches at a time are written for
any executor that reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from headrace.models.registry import Models
from headrace.protocol.events import Completion, ExecutorEvent
from headrace.protocol.messages import Batch
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.transport.batch_io import BatchWriter, split_batch
from headrace.transport.burst_limiter import BurstLimiter, input_bytes
from headrace.transport.channels import BatchConsumer, BatchQueue, ModelKey
from headrace.transport.executor_registry import (
    ANY_EXECUTOR,
    ExecutorRegistry,
    ExecutorSlot,
    InFlightWindow,
)
from headrace.transport.heartbeat import ExecutorEventReader
from headrace.tuning import TUNING, TransportTuning

log = structlog.get_logger(__name__)


class _SlotConsumer:
    """Consumer of one slot and the number of its batches in flight.

    Attributes:
        room: most batches that may be in flight.
        in_flight: number of batches written and not known to have ended.
        changed: set when there may be new room.
    """

    __slots__ = ("changed", "consumer", "in_flight", "room", "slot", "window")

    def __init__(
        self,
        slot: ExecutorSlot,
        consumer: BatchConsumer[ModelKey, Batch],
        tuning: TransportTuning,
    ) -> None:
        self.slot = slot
        self.consumer = consumer
        self.window = InFlightWindow(tuning)
        self.room = 0
        self.in_flight = 0
        self.changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True if it takes batches and none is in flight."""
        return self.room > 0 and not self.in_flight

    def ended(self) -> None:
        """Count one batch as no longer in flight."""
        self.in_flight -= 1
        self.changed.set()

    def resize(self, room: int) -> None:
        """Set the number of batches that may be in flight."""
        self.room = room
        self.changed.set()

    def release(self) -> None:
        """Stop waiting: from now on pull only what is already there."""
        self.consumer.release()
        self.changed.set()


class _InFlight(NamedTuple):
    """Batch that was written to a known executor."""

    target: _SlotConsumer
    since_s: float


class BatchDispatcher:
    """Pull batches and write them to `batches`.

    Args:
        models: receives what executors announce about their models.
        event_reader: reader of the executors' events.
    """

    def __init__(
        self,
        batch_queue: BatchQueue[ModelKey, Batch],
        writer: BatchWriter,
        models: Models,
        event_reader: ExecutorEventReader,
        metrics: Metrics,
        tuning: TransportTuning = TUNING.transport,
    ) -> None:
        self._tuning = tuning
        self._batch_queue = batch_queue
        self._writer = writer
        assert models.remote is not None  # this process has no executor
        self._models, self._remote = models, models.remote
        self._event_reader = event_reader
        self._metrics = metrics
        self._registry = ExecutorRegistry(writer.partitions)
        self._limiter = BurstLimiter(tuning)
        self._slots: dict[ExecutorSlot, _SlotConsumer] = {}
        self._flights: dict[str, _InFlight] = {}
        self._closing = False

    async def run(self) -> None:
        """Dispatch until the batcher closes."""
        async with asyncio.TaskGroup() as tasks:

            def apply(events: list[ExecutorEvent]) -> None:
                self._apply_events(events)
                self._update_slots(tasks)

            self._update_slots(tasks)
            tasks.create_task(self._event_reader.run(apply), name="read-executor-events")
            await self._batch_queue.ended()
            self._closing = True
            self._event_reader.close()
            for target in self._slots.values():
                target.changed.set()
        self._writer.close()

    def _apply_events(self, events: list[ExecutorEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            self._registry.apply(event, now_s)
            self._remote.apply_event(event)
            self._record_completions(event.completions, now_s)
        self._registry.expire(now_s)
        self._drop_overdue(now_s)
        self._metrics.known_executors.set(len(self._registry))

    def _record_completions(self, completions: Sequence[Completion], now_s: float) -> None:
        flights: dict[_SlotConsumer, list[tuple[int, Completion]]] = {}
        for completion in completions:
            flight = self._flights.pop(completion.batch_id, None)
            if flight is None:
                continue
            flight.target.ended()
            flight_us = int((now_s - flight.since_s) * 1e6)
            flights.setdefault(flight.target, []).append((flight_us, completion))
        for target, ended in flights.items():
            target.window.observe(ended)

    def _drop_overdue(self, now_s: float) -> None:
        """Stop waiting for completions that are overdue. `_flights` is ordered by start time."""
        overdue: dict[str, list[str]] = {}
        for batch_id, flight in self._flights.items():
            if now_s - flight.since_s < self._tuning.completion_timeout_s:
                break
            overdue.setdefault(flight.target.slot.executor, []).append(batch_id)
        for executor, batch_ids in overdue.items():
            log.warning(Event.COMPLETION_MISSING, executor=executor, batches=sorted(batch_ids))
            for batch_id in batch_ids:
                self._flights.pop(batch_id).target.ended()

    def _update_slots(self, tasks: asyncio.TaskGroup) -> None:
        """Start a consumer for each new slot, and release those of slots that are removed."""
        instances = self._desired_slots()
        for slot in self._slots.keys() - instances.keys():
            removed = self._slots.pop(slot)
            removed.release()
            self._flights = {
                batch_id: flight
                for batch_id, flight in self._flights.items()
                if flight.target is not removed
            }
        for slot, count in instances.items():
            target = self._slots.get(slot)
            if target is None:
                if self._closing:
                    continue
                target = _SlotConsumer(slot, self._batch_queue.consumer(slot.key), self._tuning)
                self._slots[slot] = target
                tasks.create_task(self._write_to_slot(target), name="write-batches")
            known = slot.executor != ANY_EXECUTOR
            target.resize(target.window.room(count) if known else count)

    def _desired_slots(self) -> dict[ExecutorSlot, int]:
        """Return the slots of the executors with their numbers of instances. A model that no
        executor has gets a slot of any executor, which then answers why it does not run. While no
        executor is known, all models share one such slot.
        """
        slots = self._registry.slots()
        if not slots:
            return {ExecutorSlot(ANY_EXECUTOR, None): self._tuning.max_undirected_batches}
        hosted = {slot.key for slot in slots}
        unhosted = {
            (version.name, version.version) for version in self._models.catalog.servable()
        } - hosted
        if self._models.wanted.is_followed:
            # An executor that had the version is gone, and others still load it: its requests wait.
            return slots
        return slots | {ExecutorSlot(ANY_EXECUTOR, key): 1 for key in unhosted}

    async def _write_to_slot(self, target: _SlotConsumer) -> None:
        """Write batches while there are any and there is room."""
        consumer = target.consumer
        while room := await self._wait_for_room(target):
            batch = await consumer.pull()
            if batch is None:
                return
            batches = [batch]
            while len(batches) < room and not consumer.demand.is_last:
                if self._is_other_idle(target):
                    await asyncio.sleep(0)  # it takes a batch as well, instead of none
                batch = consumer.pull_nowait()
                if batch is None:
                    break
                batches.append(batch)
            requests = [request for each in batches for request in each.requests]
            self._limiter.record_write(len(requests), input_bytes(requests), time.monotonic())
            await self._write(target, batches)
            # Otherwise the last batches would stay in memory while this waits.
            del batch, batches, requests

    def _is_other_idle(self, target: _SlotConsumer) -> bool:
        """Return True if another executor of the same model has nothing to do."""
        return any(
            other is not target and other.slot.key == target.slot.key and other.is_idle
            for other in self._slots.values()
        )

    async def _wait_for_room(self, target: _SlotConsumer) -> int:
        """Wait for room and return how many batches this slot may write; 0 once the slot has been
        released and another slot serves its model.
        """
        while not (self._closing or target.consumer.demand.is_last):
            if target.room > target.in_flight:
                delay_s = self._limiter.delay_s(time.monotonic())
                if not delay_s:
                    return min(target.room - target.in_flight, self._tuning.max_batches_per_write)
                await asyncio.sleep(delay_s)
            else:
                target.changed.clear()
                await target.changed.wait()
        return self._tuning.max_batches_per_write if self._closing or self._is_last(target) else 0

    def _is_last(self, target: _SlotConsumer) -> bool:
        """Return True if no other slot serves the model of this released one, and none will once
        the registry has dropped the model. This slot then takes all waiting batches: the executor
        that reads them answers why they do not run.
        """
        key = target.slot.key
        served = {other.slot.key for other in self._slots.values()}
        return key is not None and served.isdisjoint((key, None))

    async def _write(self, target: _SlotConsumer, batches: list[Batch]) -> None:
        partition = self._registry.partition_of(target.slot.executor)
        if partition is None:
            async with asyncio.TaskGroup() as tasks:
                for batch in batches:
                    tasks.create_task(self._writer.write_all(batch, None), name="write-batch")
            return
        self._track(target, batches)
        for batch in await self._writer.write(batches, partition):
            parts = split_batch(batch, batch.requests, batch.reason)
            self._track(target, parts)
            self._untrack([batch])
            self._untrack(await self._writer.write_or_refuse(parts, partition))

    def _track(self, target: _SlotConsumer, batches: Sequence[Batch]) -> None:
        flight = _InFlight(target, time.monotonic())
        for batch in batches:
            self._flights[batch.batch_id] = flight
        target.in_flight += len(batches)

    def _untrack(self, batches: Sequence[Batch]) -> None:
        """Remove batches that were not written from those in flight."""
        for batch in batches:
            flight = self._flights.pop(batch.batch_id, None)
            if flight is not None:
                flight.target.ended()
