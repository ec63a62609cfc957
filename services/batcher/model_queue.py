"""A model's queue: waiting requests in groups that may share a batch, and which group goes next.

The queue has a `TenantQueue` for each tenant and shape class with waiting requests. The tenant
served least goes next, and of its queues the one with the earliest deadline; the batch is then
filled from all queues of that shape class. With one tenant and one shape class there is one queue,
and nothing to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from headrace.protocol.messages import Envelope, IngestedRequest, Request
from headrace.services.batcher.admission import ServiceRate
from headrace.services.batcher.fair_queue import (
    BatchLimits,
    FairQueue,
    Fifo,
    LazyHeap,
    ShapeGroup,
    Tenant,
    TenantQueue,
)
from headrace.transport.channels import Demand
from headrace.tuning import TUNING, BatcherTuning


class QueueDelay:
    """The time for which a model's batches wait to fill (`max_queue_delay_ms`).

    Attributes:
        is_set: whether batches wait at all.
    """

    __slots__ = ("_begin_by_us", "_delay_us", "_timer_step_us", "is_set")

    def __init__(self, delay_us: int, timer_step_us: int) -> None:
        self.is_set = delay_us > 0
        self._delay_us = delay_us
        self._timer_step_us = timer_step_us
        self._begin_by_us = 0

    def shorten(self, due_us: int, run_us: int) -> None:
        """Cap the delay so that a request due at `due_us` is in time after a run of `run_us`."""
        # The cap stays when this request has left, until nothing waits, which is soon. A batch that
        # closes a little early costs less than keeping all deadlines in order.
        begin_by_us = due_us - run_us - self._timer_step_us
        self._begin_by_us = max(1, min(begin_by_us, self._begin_by_us or begin_by_us))

    def reset(self) -> None:
        """Remove the cap: no request waits."""
        self._begin_by_us = 0

    def is_capped(self, now_us: int) -> bool:
        """True if a deadline leaves no more time to wait."""
        return 0 < self._begin_by_us <= now_us

    def end_us(self, arrival_us: int) -> int:
        """Return when the delay of a request that arrived at `arrival_us` ends, without the cap."""
        return arrival_us + self._delay_us

    def due_us(self, arrival_us: int) -> int:
        """Return when the delay of the oldest request ends, with the cap."""
        due_us = self.end_us(arrival_us)
        return min(due_us, self._begin_by_us) if self._begin_by_us else due_us


class FullGroups:
    """Groups that fill a batch, in the order in which they became full.

    A group that has become less full stays until it is first, so that filling and taking out need
    no search.
    """

    __slots__ = ("_groups", "_max_stale")

    def __init__(self, max_stale: int) -> None:
        self._groups: deque[ShapeGroup] = deque()
        self._max_stale = max_stale

    def add(self, group: ShapeGroup, group_count: int) -> None:
        """Add a group that has become full; `group_count` is the number of all groups."""
        if group.is_listed_full:
            return
        if len(self._groups) > 2 * group_count + self._max_stale:
            self._groups = deque(one for one in self._groups if one.queues)
        group.is_listed_full = True
        self._groups.append(group)

    def first(self) -> ShapeGroup | None:
        """Return the group that has been full for the longest time; None if there is none."""
        groups = self._groups
        while groups:
            group = groups[0]
            if group.is_full and group.queues:
                return group
            group.is_listed_full = False
            groups.popleft()
        return None


class ModelQueue:
    """Requests that wait for one version of a model.

    Attributes:
        count: number of waiting requests.
        rows: their rows together.
        rate: how fast the queue shrinks.
        fair_queue: the rows that each tenant has been served.
        has_overtaken: whether the last batch went, at a busy instance, before the group whose turn
            it was.
    """

    def __init__(self, limits: BatchLimits, tuning: BatcherTuning = TUNING.batcher) -> None:
        self._tuning = tuning
        self.limits = limits
        self.count = 0
        self.rows = 0
        self.has_overtaken = False
        self.rate = ServiceRate(tuning)
        self.fair_queue = FairQueue(tuning.max_remembered_tenants)
        self._delay = QueueDelay(int(limits.max_queue_delay_ms * 1000), tuning.timer_step_us)
        self._groups: dict[tuple[int, ...], ShapeGroup] = {}
        self._tenants: dict[str, Tenant] = {}
        self._queue_count = 0
        self._by_service: LazyHeap[Tenant] = LazyHeap(
            self.fair_queue.start, tuning.max_stale_entries
        )
        self._by_age: LazyHeap[TenantQueue] = LazyHeap(
            TenantQueue.oldest_arrival_us, tuning.max_stale_entries
        )
        self._full = FullGroups(tuning.max_stale_entries)

    @property
    def has_several_tenants(self) -> bool:
        """True if several tenants wait."""
        return len(self._tenants) > 1

    def add(self, request: Request) -> None:
        """Queue a request."""
        envelope = request.envelope
        priority = envelope.priority
        group = self._groups.get(request.shape_class)
        queue = None if group is None else group.queues.get(envelope.tenant)
        if group is None or queue is None:
            group, queue = self._open_queue(request)
        fifo = queue.fifos[0]
        if fifo.priority != priority:
            fifo = queue.fifo_for(priority)
        fifo.requests.append(request)
        if request.due_us:
            fifo.add_deadlines((request,))
            if self._delay.is_set:
                self._delay.shorten(request.due_us, self._run_us(group))
        rows = request.rows
        queue.count += 1
        fifo.row_count[0] += rows
        self.count += 1
        self.rows += rows
        group.rows += rows
        group.size_bytes += request.size_bytes
        if self._queue_count > 1:
            if queue.count == 1:
                self._add_to_heaps(queue)
            elif len(queue.tenant.queues) > 1 and (request.due_us or priority):
                # It may be more urgent now: a key that falls needs a new entry in the heap.
                queue.tenant.by_urgency.add(queue, len(queue.tenant.queues))
        if group.rows >= group.best_rows or group.size_bytes >= group.max_bytes:
            self._full.add(group, len(self._groups))

    def add_similar(
        self, requests: Sequence[Request], rows: int, with_deadline: Sequence[Request]
    ) -> None:
        """Queue requests behind a similar one, which was added just before.

        Args:
            requests: requests of one shape class, tenant and priority.
            rows: their rows together.
            with_deadline: those that have a deadline.
        """
        first = requests[0]
        envelope = first.envelope
        group = self._groups[first.shape_class]
        queue = group.queues[envelope.tenant]
        fifo = queue.fifo_for(envelope.priority)
        fifo.requests.extend(requests)
        fifo.add_deadlines(with_deadline)
        for request in with_deadline if self._delay.is_set else ():
            self._delay.shorten(request.due_us, self._run_us(group))
        queue.count += len(requests)
        fifo.row_count[0] += rows
        self.count += len(requests)
        self.rows += rows
        group.rows += rows
        group.size_bytes += sum([request.size_bytes for request in requests])
        if len(queue.tenant.queues) > 1 and (with_deadline or envelope.priority):
            queue.tenant.by_urgency.add(queue, len(queue.tenant.queues))
        if group.rows >= group.best_rows or group.size_bytes >= group.max_bytes:
            self._full.add(group, len(self._groups))

    def end(self, request: Request) -> None:
        """Remove a request that failed while it waited."""
        queue = self._groups[request.shape_class].queues[request.envelope.tenant]
        fifo = queue.fifo_for(request.envelope.priority)
        fifo.count_ended(request.size_bytes)
        self.count_removed(queue, fifo, 1, request.rows, request.size_bytes)
        if not self.count:
            self.rate.stop_measuring()

    def count_removed(
        self, queue: TenantQueue, fifo: Fifo, count: int, rows: int, size_bytes: int
    ) -> None:
        """Count requests that no longer wait in `queue`: they were taken out, or have ended."""
        group = queue.group
        queue.count -= count
        fifo.row_count[0] -= rows
        group.rows -= rows
        group.size_bytes -= size_bytes
        self.count -= count
        self.rows -= rows
        if not self.count:
            self._delay.reset()
        # An only queue stays although it is empty: the next request is mostly of the same kind.
        if not queue.count and self._queue_count > 1:
            self._remove_queue(queue)

    def next_ready(self, now_us: int, demand: Demand) -> ShapeGroup | None:
        """Return the next group that may close; None if there is none.

        Args:
            now_us: full groups and groups whose delay is over at this time may close.
            demand: for a busy instance only full groups may close yet; at the last pull all may.
        """
        if not self.count:
            return None
        group = self._next_group()
        is_busy = demand.close_at_us > now_us
        if demand.is_last or not (is_busy or self._delay.is_set) or group.is_full:
            return group
        # A busy instance gains nothing from a batch that could still grow until it is idle. A full
        # group may go before it, but not twice in a row: a flood always has one.
        if is_busy:
            return None if self.has_overtaken else self._full.first()
        if self._delay.is_capped(now_us):
            return group
        # Fairness chose `group`, but a delay is promised to every request: the oldest one's group
        # goes first when its delay is over, or a busy tenant could keep it waiting.
        oldest = self._oldest()
        if self._delay.end_us(oldest.oldest_arrival_us()) <= now_us:
            return oldest.group
        return self._full.first()

    def overtakes(self, group: ShapeGroup) -> bool:
        """Return whether it is another group's turn."""
        return group is not self._next_group()

    def due_us(self) -> int | None:
        """Return when the oldest group's delay ends, or the earliest deadline leaves no more time
        for it; None if no request is delayed.
        """
        if not (self._delay.is_set and self.count):
            return None
        return self._delay.due_us(self._oldest().oldest_arrival_us())

    def urgency_us(self) -> int:
        """Return when the most urgent request of the next tenant should be done."""
        return self._next_queue().urgency_us()

    def rows_ahead(self, tenant: str, priority: int) -> int:
        """Return about how many rows go before a request that arrives now.

        These are its own tenant's rows of its priority or above, and at most as many of each other
        waiting tenant, because tenants get equal shares.
        """
        mine = self._tenants.get(tenant)
        if mine is None:
            return 0
        own = sum([row_count[0] for each, row_count in mine.rows.items() if each >= priority])
        # Those that always have rows waiting are among the first, and the others have few.
        left = self.rows - mine.count_rows()
        ahead, compared = own, 1
        if left:
            for other in islice(self._tenants.values(), self._tuning.max_compared_tenants):
                if other is not mine:
                    rows = other.count_rows()
                    ahead += min(own, rows)
                    left -= rows
                    compared += 1
        return ahead + min(own * (len(self._tenants) - compared), left)

    def predict_end_us(
        self, envelope: Envelope, request: IngestedRequest | None, now_us: int, more_rows: int = 0
    ) -> int:
        """Return when a request that arrives now would be done; `now_us` if no rows are ahead of
        it, since nothing is refused then.

        Args:
            envelope: headers of the request.
            request: the request; None if only its headers are known, so that its own run is left
                out.
            now_us: microseconds of the steady clock.
            more_rows: rows ahead of it besides those that wait here.
        """
        ahead = self.rows_ahead(envelope.tenant, envelope.priority) + more_rows
        if not ahead:
            return now_us
        end_us = now_us + self.rate.predict_wait_us(ahead, now_us)
        latency, full = self.limits.latency, self.limits.max_batch_size
        if latency is None:
            return end_us
        if request is not None:
            end_us += latency.predict_us(request.shape_class, request.rows) or 0
            full = latency.best_rows(request.shape_class, full)
        # With fewer than two full batches ahead the learned margin would leave batches half empty
        # and make everything later, since an instance takes one of the two ahead.
        return end_us + latency.margin_us if ahead >= 2 * full else end_us

    def is_in_time(self, more_rows: int, left_us: int) -> bool:
        """Return True if `left_us` suffices for all waiting rows, `more_rows`, and two full
        batches; then `predict_end_us` need not be called. After False it decides.
        """
        limits = self.limits
        behind_all_us = (self.rows + more_rows + 2 * limits.max_batch_size) * self.rate.row_us
        if limits.latency is not None:
            behind_all_us += limits.latency.margin_us
        return behind_all_us < left_us

    def waiting(self) -> list[Request]:
        """Return all waiting requests."""
        queues = [queue for group in self._groups.values() for queue in group.queues.values()]
        return [request for queue in queues for request in queue.waiting()]

    # --- inside -------------------------------------------------------------------------------

    def _run_us(self, group: ShapeGroup) -> int:
        """Return the predicted run time of a batch of the best size; 0 if it is unknown."""
        latency = self.limits.latency
        if latency is None:
            return 0
        return latency.predict_us(group.shape_class, group.best_rows) or 0

    def _next_tenant(self) -> Tenant:
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values()))
        tenant = self._by_service.first()
        assert tenant is not None
        return tenant

    def _next_group(self) -> ShapeGroup:
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        return self._next_queue().group

    def _next_queue(self) -> TenantQueue:
        tenant = self._next_tenant()
        if len(tenant.queues) == 1:
            return next(iter(tenant.queues.values()))
        queue = tenant.by_urgency.first()
        assert queue is not None
        return queue

    def _oldest(self) -> TenantQueue:
        if self._queue_count == 1:
            return self._only_queue()
        queue = self._by_age.first()
        assert queue is not None
        return queue

    def _only_queue(self) -> TenantQueue:
        (group,) = self._groups.values()
        (queue,) = group.queues.values()
        return queue

    def _open_queue(self, request: Request) -> tuple[ShapeGroup, TenantQueue]:
        if self._queue_count == 1:
            only = self._only_queue()
            if only.count:
                self._add_to_heaps(only)  # from now on there is something to choose
            else:
                self._remove_queue(only)
        shape_class, name = request.shape_class, request.envelope.tenant
        group = self._groups.get(shape_class)
        if group is None:
            group = ShapeGroup(shape_class, self.limits, self.fair_queue, self._tuning)
            self._groups[shape_class] = group
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._tuning)
        for other in tenant.queues.values() if len(tenant.queues) == 1 else ():
            tenant.by_urgency.add(other, 1)
        queue = TenantQueue(group, tenant, request.envelope.priority, self._tuning)
        group.queues[name] = tenant.queues[shape_class] = queue
        self._queue_count += 1
        return group, queue

    def _add_to_heaps(self, queue: TenantQueue) -> None:
        queue.group.by_service.add(queue, len(queue.group.queues))
        queue.tenant.by_urgency.add(queue, len(queue.tenant.queues))
        self._by_service.add(queue.tenant, len(self._tenants))
        if self._delay.is_set:
            self._by_age.add(queue, self._queue_count)

    def _remove_queue(self, queue: TenantQueue) -> None:
        group, tenant = queue.group, queue.tenant
        self._queue_count -= 1
        del group.queues[tenant.name]
        del tenant.queues[group.shape_class]
        if not group.queues:
            del self._groups[group.shape_class]
        if not tenant.queues:
            del self._tenants[tenant.name]
            if len(self._tenants) <= 1:
                self.fair_queue.reset()
