"""Fair queueing: the order of requests that may share a batch.

A `TenantQueue` holds one tenant's waiting requests of one shape class. Requests of equal priority
are FIFO, and a priority step is worth a fixed waiting time: all requests age at the same rate, so
none starves.

Tenants share rows evenly by start-time fair queueing (Goyal, Vin and Cheng, 1996): the next row
goes to the tenant served least while it waited. Service counts only while two tenants wait at the
same time.

A `ShapeGroup` has the queues of one shape class, whose requests may share a batch.

A `LazyHeap` updates its entries lazily: an entry is corrected when it reaches the top. A key that
has risen needs nothing before that; a key that has fallen needs a new entry.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, Protocol, TypeVar

from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Request
from headrace.tuning import BatcherTuning


class Fifo:
    """Requests of one tenant, shape class and priority, in order of arrival.

    Attributes:
        requests: the queue; it may still contain requests that have ended.
        row_count: one-element list with the waiting rows of this tenant and priority in all
            shape classes.
        deadlines: requests with an earlier deadline than all later arrivals (a monotonic queue):
            the first has the earliest.
        ended, ended_bytes: number and size of the requests in it that have ended.
    """

    __slots__ = (
        "_tuning",
        "deadlines",
        "ended",
        "ended_bytes",
        "head_start_us",
        "priority",
        "requests",
        "row_count",
    )

    def __init__(self, priority: int, row_count: list[int], tuning: BatcherTuning) -> None:
        self._tuning = tuning
        self.row_count = row_count
        self.priority = priority
        self.head_start_us = priority * tuning.priority_step_us
        self.requests: deque[Request] = deque()
        self.deadlines: deque[Request] = deque()
        self.ended = self.ended_bytes = 0

    def add_deadlines(self, requests: Sequence[Request]) -> None:
        """Record the deadlines of the requests queued last."""
        deadlines = self.deadlines
        for request in requests:
            due_us = request.due_us
            while deadlines and deadlines[-1].due_us >= due_us:
                deadlines.pop()
            deadlines.append(request)

    def first(self) -> Request | None:
        """Return the oldest request that has not ended; None if there is none."""
        requests = self.requests
        while requests and requests[0].failure is not None:
            self.ended_bytes -= self.pop().size_bytes
            self.ended -= 1
        return requests[0] if requests else None

    def pop(self) -> Request:
        """Remove and return the first of `requests`."""
        request = self.requests.popleft()
        deadlines = self.deadlines
        if deadlines and deadlines[0] is request:
            deadlines.popleft()
        return request

    def count_ended(self, size_bytes: int) -> None:
        """Count an ended request; it is removed when it is first, or together with others: many, or
        large ones, whose bytes are charged to no budget any more.
        """
        self.ended += 1
        self.ended_bytes += size_bytes
        self.first()  # mostly it is: with equal timeouts requests expire in their order
        tuning = self._tuning
        are_many = self.ended > tuning.max_stale_entries and self.ended * 2 > len(self.requests)
        if are_many or self.ended_bytes > tuning.max_stale_bytes:
            self.requests = deque(one for one in self.requests if one.failure is None)
            self.deadlines.clear()
            self.add_deadlines([one for one in self.requests if one.due_us])
            self.ended = self.ended_bytes = 0

    def earliest_due_us(self) -> int:
        """Return the earliest deadline of the waiting requests; 0 if none has one. While some have
        `ended`, it may be a later one, or 0: that of a request before them is not in `deadlines`.
        """
        deadlines = self.deadlines
        while deadlines and deadlines[0].failure is not None:
            deadlines.popleft()
        return deadlines[0].due_us if deadlines else 0

    def urgency_us(self, first: Request) -> int:
        """Return when its most urgent request should be done, for comparison."""
        moment_us = first.arrived_us + self._tuning.patience_us
        due_us = self.earliest_due_us()
        if due_us:
            moment_us = min(moment_us, due_us)
        return moment_us - self.head_start_us


class TenantQueue:
    """One tenant's waiting requests of one shape class.

    Attributes:
        count: number of waiting requests.
        fifos: one for each priority, in no order; mostly there is one.
    """

    __slots__ = ("_tuning", "count", "fifos", "group", "tenant")

    def __init__(
        self, group: ShapeGroup, tenant: Tenant, priority: int, tuning: BatcherTuning
    ) -> None:
        self._tuning = tuning
        self.group = group
        self.tenant = tenant
        self.count = 0
        self.fifos = [Fifo(priority, tenant.row_count_for(priority), tuning)]

    @property
    def is_empty(self) -> bool:
        """True if no request waits."""
        return not self.count

    def fifo_for(self, priority: int) -> Fifo:
        """Return the FIFO of a priority; create it if needed."""
        for fifo in self.fifos:
            if fifo.priority == priority:
                return fifo
        fifo = Fifo(priority, self.tenant.row_count_for(priority), self._tuning)
        self.fifos.append(fifo)
        return fifo

    def next_fifo(self) -> Fifo:
        """Return the FIFO whose first request goes next; the queue must not be empty."""
        fifos = self.fifos
        if len(fifos) == 1:
            return fifos[0]
        best: Fifo | None = None
        best_us = 0
        for fifo in fifos:
            first = fifo.first()
            if first is not None:
                moment_us = first.arrived_us - fifo.head_start_us
                if best is None or moment_us < best_us:
                    best, best_us = fifo, moment_us
        assert best is not None
        return best

    def oldest_arrival_us(self) -> int:
        """Return when the oldest waiting request arrived."""
        return min(first.arrived_us for first in map(Fifo.first, self.fifos) if first is not None)

    def urgency_us(self) -> int:
        """Return the urgency of the most urgent FIFO; see `Fifo.urgency_us`."""
        return min(
            fifo.urgency_us(first) for fifo in self.fifos if (first := fifo.first()) is not None
        )

    def earliest_due_us(self) -> int:
        """Return the earliest deadline of the waiting requests; 0 if none has one."""
        if any(fifo.ended for fifo in self.fifos):
            # Few wait where this is called, so all may be looked at.
            found = [one.due_us for one in self.waiting()]
        else:
            found = [fifo.earliest_due_us() for fifo in self.fifos if fifo.deadlines]
        return min(filter(None, found), default=0)

    def waiting(self) -> list[Request]:
        """Return all waiting requests."""
        return [one for fifo in self.fifos for one in fifo.requests if one.failure is None]


class Tenant:
    """One tenant's waiting requests in one model's queue.

    Attributes:
        rows: waiting rows by priority, each in a one-element list that its queues share.
    """

    __slots__ = ("by_urgency", "name", "queues", "rows")

    def __init__(self, name: str, tuning: BatcherTuning) -> None:
        self.name = name
        self.rows: dict[int, list[int]] = {}
        self.queues: dict[tuple[int, ...], TenantQueue] = {}
        self.by_urgency: LazyHeap[TenantQueue] = LazyHeap(
            TenantQueue.urgency_us, tuning.max_stale_entries
        )

    @property
    def is_empty(self) -> bool:
        """True if the tenant has no waiting requests."""
        return not self.queues

    def count_rows(self) -> int:
        """Return the number of waiting rows of all priorities."""
        return sum([row_count[0] for row_count in self.rows.values()])

    def row_count_for(self, priority: int) -> list[int]:
        """Return the one-element list that counts the rows of a priority."""
        return self.rows.setdefault(priority, [0])


class FairQueue:
    """Rows served to each tenant, in the virtual time of start-time fair queueing."""

    __slots__ = ("_finished", "_max_remembered", "_now")

    def __init__(self, max_remembered: int) -> None:
        self._max_remembered = max_remembered
        self._now = 0
        self._finished: dict[str, int] = {}

    def start(self, tenant: Tenant) -> int:
        """Return the virtual start time of the tenant's next row; the lowest goes first."""
        return max(self._now, self._finished.get(tenant.name, 0))

    def record_served(self, tenant: Tenant, rows: int) -> None:
        """Count rows served to a tenant while others waited."""
        self._now = self.start(tenant)
        self._finished[tenant.name] = self._now + rows
        if len(self._finished) > self._max_remembered:
            self._finished = {name: at for name, at in self._finished.items() if at > self._now}
            if len(self._finished) > self._max_remembered:
                self.reset()

    def reset(self) -> None:
        """Forget all tenants. Virtual time never goes back, so no tenant's start does either."""
        if self._finished:
            self._now = max(self._now, *self._finished.values())
            self._finished = {}


class BatchLimits(Protocol):
    """Batch limits of a model; implemented by `headrace.models.version.ModelVersion`."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def max_queue_delay_ms(self) -> float: ...
    @property
    def latency(self) -> Latency | None: ...


class ShapeGroup:
    """Waiting requests of one model, version and shape class.

    Attributes:
        best_rows: the batch size with the best known throughput.
    """

    __slots__ = (
        "best_rows",
        "by_service",
        "is_listed_full",
        "limits",
        "max_bytes",
        "queues",
        "rows",
        "shape_class",
        "size_bytes",
    )

    def __init__(
        self,
        shape_class: tuple[int, ...],
        limits: BatchLimits,
        fair_queue: FairQueue,
        tuning: BatcherTuning,
    ) -> None:
        self.shape_class = shape_class
        self.limits = limits
        self.best_rows = limits.max_batch_size
        self.max_bytes = limits.max_batch_bytes
        self.queues: dict[str, TenantQueue] = {}
        self.by_service: LazyHeap[TenantQueue] = LazyHeap(
            lambda queue: fair_queue.start(queue.tenant), tuning.max_stale_entries
        )
        self.rows = 0
        self.size_bytes = 0
        self.is_listed_full = False
        self.update_best_rows()

    def update_best_rows(self) -> None:
        """Update the best batch size."""
        latency = self.limits.latency
        if latency is not None:
            self.best_rows = latency.best_rows(self.shape_class, self.limits.max_batch_size)

    def next_queue(self) -> TenantQueue | None:
        """Return the tenant's queue that supplies the next row; None if no request waits."""
        if len(self.queues) > 1:
            return self.by_service.first()
        queue = next(iter(self.queues.values()), None)
        return queue if queue is not None and queue.count else None

    @property
    def is_full(self) -> bool:
        """True if the waiting rows or bytes fill a batch."""
        return self.rows >= self.best_rows or self.size_bytes >= self.max_bytes


class HeapItem(Protocol):
    """An item of a `LazyHeap`."""

    @property
    def is_empty(self) -> bool:
        """True if no request waits in it; the item is then removed."""
        ...


R = TypeVar("R", bound=HeapItem)


class LazyHeap(Generic[R]):
    """Priority queue that returns the item with the smallest current key.

    Args:
        key: returns an item's current key; never called with an empty item.
        max_stale: outdated entries to keep before they are removed.
    """

    __slots__ = ("_heap", "_key", "_max_stale", "_order")

    def __init__(self, key: Callable[[R], float], max_stale: int) -> None:
        self._max_stale = max_stale
        self._key = key
        self._order = count()
        self._heap: list[tuple[float, int, R]] = []

    def add(self, one: R, members: int) -> None:
        """Add an item, or update one whose key has fallen; `members` counts all items with it."""
        if len(self._heap) > 2 * members + self._max_stale:
            kept = {id(entry[2]): entry[2] for entry in self._heap if not entry[2].is_empty}
            self._heap = [(self._key(each), next(self._order), each) for each in kept.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._key(one), next(self._order), one))

    def first(self) -> R | None:
        """Return the first item, None if there is none; equal keys keep their insertion order."""
        heap = self._heap
        while heap:
            key, order, one = heap[0]
            if one.is_empty:
                heapq.heappop(heap)
                continue
            now = self._key(one)
            if now <= key:
                return one
            heapq.heapreplace(heap, (now, order, one))
        return None
