"""Registry of the announced executors in other processes; no I/O.

An executor is known from its first announcement until it announces that it leaves, has been silent
for too long, or others have announced all its partitions: its consumer group has then reassigned
them. A partition belongs to the executor that announced it last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median
from typing import NamedTuple

from headrace.protocol.events import Completion, ExecutorEvent
from headrace.transport.channels import ModelKey
from headrace.tuning import TUNING, TransportTuning

ANY_EXECUTOR = ""
"""Executor name of a slot for any executor; its batches go to the partitions round-robin."""


class ExecutorSlot(NamedTuple):
    """Destination of batches: one executor and one model version (None: any version)."""

    executor: str
    key: ModelKey | None


class InFlightWindow:
    """Number of batches that may be in flight to the instances of one slot.

    Two for each instance, or as many as end during the round trip of a batch to its executor and
    of its completion back; an instance with shorter runs would otherwise wait for the log. The
    batch's wait at the executor does not count, so a queue there does not enlarge the window.
    """

    def __init__(self, tuning: TransportTuning = TUNING.transport) -> None:
        self._tuning = tuning
        self._travel_us: deque[int] = deque(maxlen=tuning.round_trips_observed)
        self._busy_us: deque[int] = deque(maxlen=tuning.round_trips_observed)
        self._covered = 0

    def observe(self, flights: Iterable[tuple[int, Completion]]) -> None:
        """Update the window from batches that have ended.

        Args:
            flights: one entry a batch: the microseconds from before its write until its
                completion was read, and the completion.
        """
        for flight_us, completion in flights:
            self._travel_us.append(max(0, flight_us - completion.stay_us))
            self._busy_us.append(max(1, completion.busy_us))
        if self._busy_us:
            # Room may stay unused for this long while batches are collected for one write.
            collect_us = int(self._tuning.max_write_delay_s * 1e6)
            travel_us = median(self._travel_us) + collect_us
            self._covered = ceil(travel_us / median(self._busy_us))

    def room(self, instances: int) -> int:
        """Return the number of batches that may be in flight to so many instances together."""
        least = self._tuning.min_batches_per_instance * instances
        most = self._tuning.max_batches_per_instance * instances
        return max(least, min(most, instances + self._covered))


class _Executor:
    """State that one executor has announced: its instances and the partitions that it reads."""

    def __init__(self, silent_after_s: float) -> None:
        self.silent_after_s = silent_after_s
        self.last_event_s = 0.0
        self.partitions: list[int] = []
        self.instances: dict[ModelKey, int] = {}
        self.turn = 0


class ExecutorRegistry:
    """Known executors, their model instances and the partitions that they read.

    Args:
        partitions: number of partitions of `batches`. Others that are announced are ignored: they
            cannot be written to.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = range(partitions)
        self._executors: dict[str, _Executor] = {}
        self._owners: dict[int, str] = {}

    def __len__(self) -> int:
        """Return the number of known executors that read a partition."""
        return sum(bool(executor.partitions) for executor in self._executors.values())

    def apply(self, event: ExecutorEvent, now_s: float) -> None:
        """Apply an announcement."""
        if event.leaving:
            self._forget(event.executor)
            return
        silent_after_s = event.silent_after_ms / 1000
        executor = self._executors.setdefault(event.executor, _Executor(silent_after_s))
        executor.silent_after_s, executor.last_event_s = silent_after_s, now_s
        executor.instances = {
            (model.name, model.version): model.instances for model in event.models
        }
        announced = [each for each in event.partitions if each in self._partitions]
        for partition in set(executor.partitions).difference(announced):
            self._owners.pop(partition, None)
        executor.partitions = announced
        for partition in announced:
            self._assign_partition(partition, event.executor)

    def expire(self, now_s: float) -> None:
        """Forget executors that have been silent for too long."""
        silent = [
            name
            for name, executor in self._executors.items()
            if now_s - executor.last_event_s > executor.silent_after_s
        ]
        for name in silent:
            self._forget(name)

    def slots(self) -> dict[ExecutorSlot, int]:
        """Return the slots with their numbers of instances."""
        return {
            ExecutorSlot(name, key): instances
            for name, executor in self._executors.items()
            if executor.partitions
            for key, instances in executor.instances.items()
        }

    def partition_of(self, executor: str) -> int | None:
        """Return the executor's next partition, round-robin; None if the executor is gone."""
        known = self._executors.get(executor)
        if known is None or not known.partitions:
            return None
        known.turn += 1
        return known.partitions[known.turn % len(known.partitions)]

    def _assign_partition(self, partition: int, name: str) -> None:
        former = self._owners.get(partition)
        self._owners[partition] = name
        if former is None or former == name:
            return
        loser = self._executors.get(former)
        if loser is None:
            return
        loser.partitions = [one for one in loser.partitions if one != partition]
        if not loser.partitions:
            self._forget(former)

    def _forget(self, name: str) -> None:
        executor = self._executors.pop(name, None)
        if executor is None:
            return
        for partition in executor.partitions:
            if self._owners.get(partition) == name:
                del self._owners[partition]
