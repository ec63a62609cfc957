"""A model's queue: waiting requests in groups that may share a batch, and which group goes next.

The queue has a lane for each tenant and shape class with waiting requests (see
`headrace.services.batcher.fair_queue`). The tenant served least goes next, and of its lanes the one
with the earliest deadline; the batch is then filled from all lanes of that shape class. With one
tenant and one shape class there is one lane, and nothing to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.protocol.messages import Request
from headrace.services.batcher.admission import Pace
from headrace.services.batcher.fair_queue import (
    BatchLimits,
    FairQueue,
    Fifo,
    Group,
    Lane,
    Ranking,
    Tenant,
)
from headrace.transport.channels import Ask
from headrace.tuning import TUNING, BatcherTuning


class ModelQueue:
    """Requests that wait for one version of a model.

    An empty lane stays until another one is opened: the next request is mostly of the same kind.

    Attributes:
        count: number of waiting requests.
        rows: their rows together.
        pace: how fast the queue shrinks.
        shares: the rows that each tenant has been served.
    """

    def __init__(self, limits: BatchLimits, tuning: BatcherTuning = TUNING.batcher) -> None:
        self._tuning = tuning
        self.limits = limits
        self.count = 0
        self.rows = 0
        self.pace = Pace(tuning)
        self.shares = FairQueue(tuning.max_remembered_tenants)
        self._delay_us = int(limits.max_queue_delay_ms * 1000)
        self._begin_by_us = 0
        self._groups: dict[tuple[int, ...], Group] = {}
        self._tenants: dict[str, Tenant] = {}
        self._lanes = 0
        self._by_share: Ranking[Tenant] = Ranking(self.shares.start, tuning.max_stale_entries)
        self._by_age: Ranking[Lane] = Ranking(Lane.came_us, tuning.max_stale_entries)
        self._full: deque[Group] = deque()

    @property
    def is_contested(self) -> bool:
        """True if several tenants wait."""
        return len(self._tenants) > 1

    def add(self, request: Request) -> None:
        """Queue a request."""
        envelope = request.envelope
        priority = envelope.priority
        group = self._groups.get(request.shape_class)
        lane = None if group is None else group.lanes.get(envelope.tenant)
        if group is None or lane is None:
            group, lane = self._open_lane(request)
        fifo = lane.fifos[0]
        if fifo.priority != priority:
            fifo = lane.fifo_of(priority)
        fifo.requests.append(request)
        if request.due_us:
            fifo.note_deadlines((request,))
            if self._delay_us:
                self._shorten_delay(group, request)
        rows = request.rows
        lane.count += 1
        fifo.share[0] += rows
        self.count += 1
        self.rows += rows
        group.rows += rows
        group.size_bytes += request.size_bytes
        if self._lanes > 1:
            if lane.count == 1:
                self._rank(lane)
            elif len(lane.tenant.lanes) > 1 and (request.due_us or priority):
                lane.tenant.by_urgency.add(lane, len(lane.tenant.lanes))  # it may be more urgent
        if group.rows >= group.best_rows or group.size_bytes >= group.max_bytes:
            self._list_full(group)

    def add_alike(
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
        lane = group.lanes[envelope.tenant]
        fifo = lane.fifo_of(envelope.priority)
        fifo.requests.extend(requests)
        fifo.note_deadlines(with_deadline)
        for request in with_deadline if self._delay_us else ():
            self._shorten_delay(group, request)
        lane.count += len(requests)
        fifo.share[0] += rows
        self.count += len(requests)
        self.rows += rows
        group.rows += rows
        group.size_bytes += sum([request.size_bytes for request in requests])
        if len(lane.tenant.lanes) > 1 and (with_deadline or envelope.priority):
            lane.tenant.by_urgency.add(lane, len(lane.tenant.lanes))  # it may be more urgent
        if group.rows >= group.best_rows or group.size_bytes >= group.max_bytes:
            self._list_full(group)

    def end(self, request: Request) -> None:
        """Remove a request that failed while it waited."""
        lane = self._groups[request.shape_class].lanes[request.envelope.tenant]
        fifo = lane.fifo_of(request.envelope.priority)
        fifo.end_one()
        self.left(lane, fifo, 1, request.rows, request.size_bytes)
        if not self.count:
            self.pace.idle()

    def left(self, lane: Lane, fifo: Fifo, count: int, rows: int, size_bytes: int) -> None:
        """Count requests of a lane that no longer wait: they were taken out, or have ended."""
        group = lane.group
        lane.count -= count
        fifo.share[0] -= rows
        group.rows -= rows
        group.size_bytes -= size_bytes
        self.count -= count
        self.rows -= rows
        if not self.count:
            self._begin_by_us = 0
        if not lane.count and self._lanes > 1:
            self._close_lane(lane)

    def ripest(self, now_us: int, ask: Ask) -> Group | None:
        """Return the next group that may close; None if there is none.

        Args:
            now_us: full groups and groups whose delay is over at this time may close.
            ask: for a busy instance only full groups may close yet; at the last pull all may.
        """
        if not self.count:
            return None
        group = self._next_group()
        busy = ask.close_at_us > now_us
        if ask.at_once or not (busy or self._delay_us) or group.is_full:
            return group
        if not busy:
            if 0 < self._begin_by_us <= now_us:
                return group
            oldest = self._oldest()
            if oldest.came_us() + self._delay_us <= now_us:
                return oldest.group
        return self._full_group()

    def due_us(self) -> int | None:
        """Return when the oldest group's delay ends, or the earliest deadline leaves no more time
        for it; None if no request is delayed.
        """
        if not (self._delay_us and self.count):
            return None
        due_us = self._oldest().came_us() + self._delay_us
        return min(due_us, self._begin_by_us) if self._begin_by_us else due_us

    def urgency_us(self) -> int:
        """Return when the most urgent request of the next tenant should be done."""
        return self._next_lane().urgency_us()

    def rows_ahead(self, tenant: str, priority: int) -> int:
        """Return about how many rows go before a request that arrives now.

        These are its own tenant's rows of its priority or above, and as many of each other
        waiting tenant, because tenants get equal shares.
        """
        mine = self._tenants.get(tenant)
        if mine is None:
            return 0
        own = sum([share[0] for each, share in mine.rows.items() if each >= priority])
        less_urgent = sum([share[0] for share in mine.rows.values()]) - own
        return min(self.rows - less_urgent, own * len(self._tenants))

    def waiting(self) -> list[Request]:
        """Return all waiting requests."""
        lanes = [lane for group in self._groups.values() for lane in group.lanes.values()]
        return [request for lane in lanes for request in lane.waiting()]

    # --- inside -------------------------------------------------------------------------------

    def _shorten_delay(self, group: Group, request: Request) -> None:
        """Cap the queue delay so that the earliest deadline can still be met. The cap is reset
        when the queue is empty.
        """
        latency, run_us = self.limits.latency, None
        if latency is not None:
            run_us = latency.predict_us(group.shape_class, group.best_rows)
        begin_by_us = request.due_us - (run_us or 0) - self._tuning.timer_step_us
        self._begin_by_us = max(1, min(begin_by_us, self._begin_by_us or begin_by_us))

    def _next_tenant(self) -> Tenant:
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values()))
        tenant = self._by_share.first()
        assert tenant is not None
        return tenant

    def _next_group(self) -> Group:
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        return self._next_lane().group

    def _next_lane(self) -> Lane:
        tenant = self._next_tenant()
        if len(tenant.lanes) == 1:
            return next(iter(tenant.lanes.values()))
        lane = tenant.by_urgency.first()
        assert lane is not None
        return lane

    def _oldest(self) -> Lane:
        if self._lanes == 1:
            return self._only_lane()
        lane = self._by_age.first()
        assert lane is not None
        return lane

    def _only_lane(self) -> Lane:
        (group,) = self._groups.values()
        (lane,) = group.lanes.values()
        return lane

    def _list_full(self, group: Group) -> None:
        if group.is_listed_full:
            return
        if len(self._full) > 2 * len(self._groups) + self._tuning.max_stale_entries:
            self._full = deque(one for one in self._full if one.lanes)
        group.is_listed_full = True
        self._full.append(group)

    def _full_group(self) -> Group | None:
        full = self._full
        while full:
            group = full[0]
            if group.is_full and group.lanes:
                return group
            group.is_listed_full = False
            full.popleft()
        return None

    def _open_lane(self, request: Request) -> tuple[Group, Lane]:
        if self._lanes == 1:
            only = self._only_lane()
            if only.count:
                self._rank(only)  # from now on there is something to choose
            else:
                self._close_lane(only)
        shape_class, name = request.shape_class, request.envelope.tenant
        group = self._groups.get(shape_class)
        if group is None:
            group = Group(shape_class, self.limits, self.shares, self._tuning)
            self._groups[shape_class] = group
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._tuning)
        for other in tenant.lanes.values() if len(tenant.lanes) == 1 else ():
            tenant.by_urgency.add(other, 1)
        lane = Lane(group, tenant, request.envelope.priority, self._tuning)
        group.lanes[name] = tenant.lanes[shape_class] = lane
        self._lanes += 1
        return group, lane

    def _rank(self, lane: Lane) -> None:
        lane.group.by_share.add(lane, len(lane.group.lanes))
        lane.tenant.by_urgency.add(lane, len(lane.tenant.lanes))
        self._by_share.add(lane.tenant, len(self._tenants))
        if self._delay_us:
            self._by_age.add(lane, self._lanes)

    def _close_lane(self, lane: Lane) -> None:
        group, tenant = lane.group, lane.tenant
        self._lanes -= 1
        del group.lanes[tenant.name]
        del tenant.lanes[group.shape_class]
        if not group.lanes:
            del self._groups[group.shape_class]
        if not tenant.lanes:
            del self._tenants[tenant.name]
            if len(self._tenants) <= 1:
                self.shares.forget()
