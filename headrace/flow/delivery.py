"""Records on their way from a poll to the first stage."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.flow.inflight import Assignment
from headrace.flow.suspects import Unit
from headrace.log.port import Record, TopicPartition

RECORD_OVERHEAD_BYTES = 1024
"""Charged for every record that waits, beside its value: many small ones are large as well."""


class Trial(NamedTuple):
    """What the first stage has to know of records that are suspect.

    Attributes:
        condemned: to be answered without being run.
        run_place: given where one record runs alone: before each of its requests, if it has
            several, to be called with the request's place.
    """

    condemned: frozenset[Unit]
    run_place: Callable[[int], Awaitable[None]] | None


class Delivery(NamedTuple):
    """Records of one partition, in offset order, not yet admitted; on trial while suspect.

    With `skipped`, no records: all up to this offset are gone unread.
    """

    assignment: Assignment
    records: Sequence[Record]
    trial: Trial | None = None
    skipped: int | None = None


class Arrivals:
    """What was polled and waits for the first stage.

    Attributes:
        waiting_bytes: of all of it.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Delivery, int]] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self.waiting_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for delivery, _ in self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Add what was read; tells nobody yet, see `tell`."""
        size_bytes = waiting_bytes(delivery.records)
        self._waiting.append((delivery, size_bytes))
        self.waiting_bytes += size_bytes

    def tell(self) -> None:
        """Wake the first stage."""
        self._arrived.set()

    async def next(self) -> Delivery | None:
        """The oldest; None after the end, when nothing is left."""
        while not self._waiting:
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        delivery, size_bytes = self._waiting.popleft()
        self.waiting_bytes -= size_bytes
        return delivery

    def end(self) -> None:
        """Forget what waits, and let nothing more come."""
        self._ended = True
        self.drop(None)
        self._arrived.set()

    def drop(self, partitions: frozenset[TopicPartition] | None) -> None:
        """Forget what was read of these or all; their next owner reads it again."""
        self._waiting = deque(
            (delivery, size_bytes)
            for delivery, size_bytes in self._waiting
            if partitions is not None and delivery.assignment.partition not in partitions
        )
        self.waiting_bytes = sum(size_bytes for _, size_bytes in self._waiting)


def waiting_bytes(records: Sequence[Record]) -> int:
    """What records take that wait; their headers are counted as part of the overhead."""
    values = sum([len(record.value) for record in records if record.value is not None])
    return values + RECORD_OVERHEAD_BYTES * len(records)
