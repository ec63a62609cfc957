"""The executors of other processes, as far as they have announced themselves: pure rules.

An executor is known from its first announcement until it says that it leaves, has been silent
for too long, or others have announced all its partitions, which is how its consumer group notices
that it is gone. A partition is its last announcer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median
from typing import NamedTuple, TypeAlias

from headrace.protocol.events import Completion, ExecutorEvent
from headrace.transport.burst_limiter import PACE_S

ModelKey: TypeAlias = tuple[str, str]
"""A model's name and version."""

LEAST_IN_FLIGHT = 2
"""For each instance: one batch runs, and the next one is there when it ends."""
MOST_IN_FLIGHT = 64
_WINDOW = 31
_GATHERED_US = int(PACE_S * 1e6)
"""For so long at most, room stays open while batches gather that leave together."""


ANYBODY = ""
"""In the place of an executor: whoever reads the partition whose turn it is."""


class ExecutorSlot(NamedTuple):
    """Where batches can be sent: to one executor, of one model version (None: of any)."""

    executor: str
    key: ModelKey | None


class Window:
    """How many batches may be under way to the instances of one berth.

    Two for each, or as many as end in the time that a batch takes to its executor and its
    completion back: an instance whose batches end sooner would wait for the log otherwise. What a
    batch waits at the executor does not count, so that a queue there makes the window no larger.
    """

    def __init__(self) -> None:
        self._travel_us: deque[int] = deque(maxlen=_WINDOW)
        self._busy_us: deque[int] = deque(maxlen=_WINDOW)
        self._covered = 0

    def observe(self, flights: Iterable[tuple[int, Completion]]) -> None:
        """Learn from batches that have ended.

        Args:
            flights: of each, the microseconds from before it was written until its completion
                was heard, and that.
        """
        for flight_us, completion in flights:
            self._travel_us.append(max(0, flight_us - completion.stay_us))
            self._busy_us.append(max(1, completion.busy_us))
        if self._busy_us:
            travel_us = median(self._travel_us) + _GATHERED_US
            self._covered = ceil(travel_us / median(self._busy_us))

    def room(self, instances: int) -> int:
        """For so many instances together."""
        least, most = LEAST_IN_FLIGHT * instances, MOST_IN_FLIGHT * instances
        return max(least, min(most, instances + self._covered))


class _Executor:
    """What one of them has announced."""

    def __init__(self, silent_after_s: float) -> None:
        self.silent_after_s = silent_after_s
        self.heard_s = 0.0
        self.partitions: list[int] = []
        self.instances: dict[ModelKey, int] = {}
        self.turn = 0


class ExecutorRegistry:
    """Which executors there are, what they take, and where they read."""

    def __init__(self) -> None:
        self._executors: dict[str, _Executor] = {}
        self._owners: dict[int, str] = {}

    def __len__(self) -> int:
        """How many executors are known that can be reached."""
        return sum(bool(executor.partitions) for executor in self._executors.values())

    def heard(self, event: ExecutorEvent, now_s: float) -> None:
        """Take an announcement in."""
        if event.leaving:
            self._forget(event.executor)
            return
        silent_after_s = event.silent_after_ms / 1000
        executor = self._executors.setdefault(event.executor, _Executor(silent_after_s))
        executor.silent_after_s, executor.heard_s = silent_after_s, now_s
        executor.instances = {
            (model.name, model.version): model.instances for model in event.models
        }
        for partition in set(executor.partitions).difference(event.partitions):
            self._owners.pop(partition, None)
        executor.partitions = list(event.partitions)
        for partition in event.partitions:
            self._claim(partition, event.executor)

    def expire(self, now_s: float) -> None:
        """Forget those who have been silent for too long."""
        silent = [
            name
            for name, executor in self._executors.items()
            if now_s - executor.heard_s > executor.silent_after_s
        ]
        for name in silent:
            self._forget(name)

    def berths(self) -> dict[ExecutorSlot, int]:
        """How many instances each has."""
        return {
            ExecutorSlot(name, key): instances
            for name, executor in self._executors.items()
            if executor.partitions
            for key, instances in executor.instances.items()
        }

    def knows(self, executor: str) -> bool:
        """Whether it is taken for alive, and can be reached."""
        known = self._executors.get(executor)
        return known is not None and bool(known.partitions)

    def partition_of(self, executor: str) -> int | None:
        """Where to write the next batch for it, its partitions in turn; None: it is gone."""
        known = self._executors.get(executor)
        if known is None or not known.partitions:
            return None
        known.turn += 1
        return known.partitions[known.turn % len(known.partitions)]

    def _claim(self, partition: int, name: str) -> None:
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
