"""Lanes: who goes next among requests that may share a batch.

A lane holds one tenant's waiting requests of one shape class. Within a lane, requests of equal
priority go in the order in which they came, and a step of priority is worth a fixed time of
waiting: everybody ages at the same pace, so nobody waits for ever.

Between tenants the rows are shared out evenly, by start-time fair queueing (Goyal, Vin and Cheng,
1996): the next row is that of the tenant who has been served least while it waited. It counts only
while two tenants wait at the same time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.messages import Request
from headrace.services.batcher.ranking import Ranking

if TYPE_CHECKING:
    from headrace.services.batcher.groups import Group

PRIORITY_STEP_US = 100_000
"""A request goes before another that has waited so much longer, for each step of `x-priority`."""

PATIENCE_US = 5_000_000
"""Between shape classes a request with a later deadline, or none, counts as if it had one so long
after it came, so that nothing is passed over for ever."""

MAX_REMEMBERED_TENANTS = 1024

_TOLERATED = 32
"""So many requests that have ended may lie among those that wait, before they are cleared away."""


class _Fifo:
    """Requests of one lane and one priority, in the order in which they came.

    `deadlines` are those among them that have an earlier deadline than all that came after them:
    the first is the earliest.
    """

    __slots__ = ("deadlines", "ended", "head_start_us", "priority", "requests", "rows")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.head_start_us = priority * PRIORITY_STEP_US
        self.requests: deque[Request] = deque()
        self.deadlines: deque[Request] = deque()
        self.ended = 0
        self.rows = 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.rows += request.rows
        deadline_ms = request.envelope.deadline_ms
        if deadline_ms:
            deadlines = self.deadlines
            while deadlines and deadlines[-1].envelope.deadline_ms >= deadline_ms:
                deadlines.pop()
            deadlines.append(request)

    def first(self) -> Request | None:
        requests = self.requests
        while requests and requests[0].failure is not None:
            requests.popleft()
            self.ended -= 1
        return requests[0] if requests else None

    def take_first(self) -> Request:
        request = self.requests.popleft()
        self.rows -= request.rows
        return request

    def end(self, request: Request) -> None:
        """One of them has ended; it leaves when it comes to the top, or with many others."""
        self.rows -= request.rows
        self.ended += 1
        if self.ended > _TOLERATED and self.ended * 2 > len(self.requests):
            self.requests = deque(one for one in self.requests if one.failure is None)
            self.deadlines = deque(one for one in self.deadlines if one.failure is None)
            self.ended = 0

    def earliest_deadline_us(self) -> int | None:
        deadlines = self.deadlines
        while deadlines and (deadlines[0].formed_us or deadlines[0].failure is not None):
            deadlines.popleft()
        return deadlines[0].envelope.deadline_ms * 1000 if deadlines else None


class Lane:
    """One tenant's waiting requests of one shape class."""

    __slots__ = ("_fifos", "count", "group", "rows", "tenant")

    def __init__(self, group: Group, tenant: Tenant) -> None:
        self.group = group
        self.tenant = tenant
        self.count = 0
        self.rows = 0
        self._fifos: list[_Fifo] = []

    @property
    def is_empty(self) -> bool:
        return not self.count

    def add(self, request: Request) -> None:
        """At the end of those of its priority."""
        self._fifo(request.envelope.priority).add(request)
        self.count += 1
        self.rows += request.rows

    def first(self) -> Request | None:
        """The request that goes next."""
        fifo = self._first_fifo()
        return None if fifo is None else fifo.first()

    def take_first(self) -> Request:
        """Take out what `first` has given."""
        fifo = self._first_fifo()
        assert fifo is not None
        request = fifo.take_first()
        self.count -= 1
        self.rows -= request.rows
        return request

    def end(self, request: Request) -> None:
        """A request has failed while it waited."""
        self.count -= 1
        self.rows -= request.rows
        self._fifo(request.envelope.priority).end(request)

    def came_us(self) -> int:
        """When the one that has waited longest came."""
        firsts = [first.ingested_us for fifo in self._fifos if (first := fifo.first()) is not None]
        return min(firsts)

    def earliest_deadline_us(self) -> int | None:
        """Of those that wait; None where none of them has one."""
        found = [fifo.earliest_deadline_us() for fifo in self._fifos]
        return min((each for each in found if each is not None), default=None)

    def urgency_us(self) -> int:
        """The moment by which its most urgent request should be done, for comparison."""
        moments = []
        for fifo in self._fifos:
            first = fifo.first()
            if first is not None:
                moment_us = first.ingested_us + PATIENCE_US
                deadline_us = fifo.earliest_deadline_us()
                if deadline_us is not None and deadline_us < moment_us:
                    moment_us = deadline_us
                moments.append(moment_us - fifo.head_start_us)
        return min(moments)

    def rows_before(self, priority: int) -> int:
        """Rows of requests with this priority or a higher one."""
        return sum(fifo.rows for fifo in self._fifos if fifo.priority >= priority)

    def waiting(self) -> list[Request]:
        """All of them."""
        return [one for fifo in self._fifos for one in fifo.requests if one.failure is None]

    def _fifo(self, priority: int) -> _Fifo:
        for fifo in self._fifos:
            if fifo.priority == priority:
                return fifo
        fifo = _Fifo(priority)
        self._fifos.append(fifo)
        return fifo

    def _first_fifo(self) -> _Fifo | None:
        fifos = self._fifos
        if len(fifos) == 1:
            return fifos[0] if fifos[0].first() is not None else None
        best: _Fifo | None = None
        best_us = 0
        for fifo in fifos:
            first = fifo.first()
            if first is not None:
                moment_us = first.ingested_us - fifo.head_start_us
                if best is None or moment_us < best_us:
                    best, best_us = fifo, moment_us
        return best


class Tenant:
    """All that waits for one tenant in one model's queue."""

    __slots__ = ("by_urgency", "lanes", "name", "rows")

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self.by_urgency: Ranking[Lane] = Ranking(Lane.urgency_us)

    @property
    def is_empty(self) -> bool:
        return not self.lanes


class Shares:
    """How many rows each tenant has had, in start-time fair queueing's virtual time."""

    __slots__ = ("_finished", "_now")

    def __init__(self) -> None:
        self._now = 0
        self._finished: dict[str, int] = {}

    def start(self, tenant: Tenant) -> int:
        """The virtual time at which the tenant's next row begins; the lowest goes first."""
        return max(self._now, self._finished.get(tenant.name, 0))

    def served(self, tenant: Tenant, rows: int) -> None:
        """A tenant has had so many rows while others waited."""
        self._now = self.start(tenant)
        self._finished[tenant.name] = self._now + rows
        if len(self._finished) > MAX_REMEMBERED_TENANTS:
            ahead = {name: at for name, at in self._finished.items() if at > self._now}
            self._finished = ahead if len(ahead) <= MAX_REMEMBERED_TENANTS else {}

    def forget(self) -> None:
        """Nobody competes any more."""
        if self._finished:
            self._now = 0
            self._finished = {}
