"""Requests that wait, in groups that may share a batch, with the group at hand that is to go next.

However many shapes wait, the next group is found without looking at the others: groups lie in
heaps by the age of their first request, and an entry that is out of date is put right when it
comes to the top.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import NamedTuple, Protocol

from headrace.messages import Request

_TOLERATED = 32
"""So many requests that have ended may lie among those that wait, before they are cleared away."""


class BatchLimits(Protocol):
    """What a model allows; a `headrace.models.registry.ModelVersion` has these."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def max_queue_delay_ms(self) -> float: ...


class Group:
    """Waiting requests of one model, version and shape class, in the order in which they came."""

    __slots__ = ("_ended", "is_listed_full", "limits", "requests", "rows", "size_bytes")

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.requests: deque[Request] = deque()
        self.rows = 0
        self.size_bytes = 0
        self.is_listed_full = False
        self._ended = 0

    def add(self, request: Request) -> None:
        """At the end."""
        self.requests.append(request)
        self.rows += request.rows
        self.size_bytes += request.size_bytes

    def first(self) -> Request | None:
        """The request that has waited longest and has not ended meanwhile."""
        requests = self.requests
        while requests and requests[0].failure is not None:
            requests.popleft()
            self._ended -= 1
        return requests[0] if requests else None

    def take_first(self) -> Request:
        """Take out what `first` has given."""
        request = self.requests.popleft()
        self._uncount(request)
        return request

    def end(self, request: Request) -> None:
        """Take a request that has failed out of the counts; it leaves the queue later."""
        self._uncount(request)
        self._ended += 1
        if self._ended > _TOLERATED and self._ended * 2 > len(self.requests):
            self.requests = deque(one for one in self.requests if one.failure is None)
            self._ended = 0

    def _uncount(self, request: Request) -> None:
        self.rows -= request.rows
        self.size_bytes -= request.size_bytes

    @property
    def is_full(self) -> bool:
        """More would not fit into one batch."""
        return (
            self.rows >= self.limits.max_batch_size
            or self.size_bytes >= self.limits.max_batch_bytes
        )


class _Entry(NamedTuple):
    """A group in a heap; `order` keeps groups from being compared."""

    ingested_us: int
    order: int
    shape_class: tuple[int, ...]
    group: Group


class ModelQueue:
    """All that waits for one version of a model."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._delay_us = int(limits.max_queue_delay_ms * 1000)
        self._order = count()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._by_age: list[_Entry] = []
        self._full: list[_Entry] = []

    def add(self, request: Request) -> None:
        """The request begins to wait."""
        shape_class = request.shape_class
        group = self._groups.get(shape_class)
        if group is None:
            group = self._groups[shape_class] = Group(self._limits)
            heapq.heappush(self._by_age, self._entry(request, group))
        group.add(request)
        if self._delay_us and group.is_full and not group.is_listed_full:
            group.is_listed_full = True
            heapq.heappush(self._full, self._entry(request, group))

    def end(self, request: Request) -> None:
        """The request has failed while it waited."""
        self._groups[request.shape_class].end(request)

    def ripest(self, now_us: int, *, at_once: bool, full_only: bool = False) -> Group | None:
        """Of the groups that may close, the one whose first request has waited longest.

        Args:
            now_us: groups whose delay is over may close, and full ones.
            at_once: all may.
            full_only: others may not.
        """
        oldest = self._oldest()
        if oldest is None:
            return None
        if full_only and not at_once:
            return oldest.group if oldest.group.is_full else None
        if at_once or oldest.ingested_us + self._delay_us <= now_us:
            return oldest.group
        while self._full:
            group = self._full[0].group
            if group.first() is not None and group.is_full:
                return group
            heapq.heappop(self._full)
            group.is_listed_full = False
        return None

    def due_us(self) -> int | None:
        """When the oldest group's delay is over; None where nothing waits."""
        oldest = self._oldest()
        return None if oldest is None else oldest.ingested_us + self._delay_us

    def _oldest(self) -> _Entry | None:
        by_age = self._by_age
        while by_age:
            entry = by_age[0]
            first = entry.group.first()
            if first is None:  # forgotten, since shapes come and go
                heapq.heappop(by_age)
                del self._groups[entry.shape_class]
            elif first.ingested_us != entry.ingested_us:
                heapq.heapreplace(by_age, self._entry(first, entry.group))
            else:
                return entry
        return None

    def _entry(self, first: Request, group: Group) -> _Entry:
        return _Entry(first.ingested_us, next(self._order), first.shape_class, group)
