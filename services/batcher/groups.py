"""Requests that wait, in groups that may share a batch, with the group at hand that is to go next.

A model's queue has a lane for each tenant and shape class with something in it (see
`headrace.services.batcher.lanes`). The tenant who has had least goes next, and of its lanes the
one whose deadline is earliest; the batch is then filled from all lanes of that shape class. With
one tenant and one shape class there is one lane, and nothing to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.protocol.messages import Request
from headrace.services.batcher.admission import Pace
from headrace.services.batcher.lanes import BatchLimits, FairQueue, Fifo, Group, Lane, Tenant
from headrace.services.batcher.ranking import Ranking
from headrace.transport.channels import Ask

TIMER_US = 1000
"""What the timers of the event loop may be late by."""

_TOLERATED = 32
"""So many full groups that have gone may be kept, before they are cleared away."""


class ModelQueue:
    """All that waits for one version of a model.

    A lane that has run empty stays until another one is opened: the next request is mostly of
    the same kind.

    Attributes:
        count: how many requests wait.
        rows: of them together.
        pace: how fast they go.
        shares: what each tenant has had.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.count = 0
        self.rows = 0
        self.pace = Pace()
        self.shares = FairQueue()
        self._delay_us = int(limits.max_queue_delay_ms * 1000)
        self._begin_by_us = 0
        self._groups: dict[tuple[int, ...], Group] = {}
        self._tenants: dict[str, Tenant] = {}
        self._lanes = 0
        self._by_share: Ranking[Tenant] = Ranking(self.shares.start)
        self._by_age: Ranking[Lane] = Ranking(Lane.came_us)
        self._full: deque[Group] = deque()

    @property
    def is_contested(self) -> bool:
        """Several tenants wait."""
        return len(self._tenants) > 1

    def add(self, request: Request) -> None:
        """The request begins to wait."""
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
        """Requests begin to wait behind one of their kind, which was added just before.

        Args:
            requests: of one shape class, tenant and priority.
            rows: of them together.
            with_deadline: those that have one.
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
        """The request has failed while it waited."""
        lane = self._groups[request.shape_class].lanes[request.envelope.tenant]
        fifo = lane.fifo_of(request.envelope.priority)
        fifo.end_one()
        self.left(lane, fifo, 1, request.rows, request.size_bytes)
        if not self.count:
            self.pace.idle()

    def left(self, lane: Lane, fifo: Fifo, count: int, rows: int, size_bytes: int) -> None:
        """So many requests of a lane wait no longer; they were taken out of it, or have ended."""
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
        """The group that goes next, of those that may close.

        Args:
            now_us: groups whose delay is over may close, and full ones.
            ask: of an instance that is busy, for which only full ones may close yet; or of one
                that asks for the last time, for which all may.
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
        """When the oldest group's delay is over, or the earliest deadline leaves no time for it;
        None where nothing waits for that.
        """
        if not (self._delay_us and self.count):
            return None
        due_us = self._oldest().came_us() + self._delay_us
        return min(due_us, self._begin_by_us) if self._begin_by_us else due_us

    def urgency_us(self) -> int:
        """The moment by which the most urgent request of the next tenant should be done."""
        return self._next_lane().urgency_us()

    def rows_ahead(self, tenant: str, priority: int) -> int:
        """Rows that go before a request that comes now, about.

        Those of its own tenant with its priority or a higher one, and as many of each other
        tenant that waits: that is how the rows are shared out.
        """
        mine = self._tenants.get(tenant)
        if mine is None:
            return 0
        own = sum([share[0] for each, share in mine.rows.items() if each >= priority])
        less_urgent = sum([share[0] for share in mine.rows.values()]) - own
        return min(self.rows - less_urgent, own * len(self._tenants))

    def waiting(self) -> list[Request]:
        """All requests that wait."""
        lanes = [lane for group in self._groups.values() for lane in group.lanes.values()]
        return [request for lane in lanes for request in lane.waiting()]

    # --- inside -------------------------------------------------------------------------------

    def _shorten_delay(self, group: Group, request: Request) -> None:
        """Nobody waits for a batch to fill beyond the moment that leaves time for its run. It
        holds until all that waits has gone, which is soon.
        """
        latency, run_us = self.limits.latency, None
        if latency is not None:
            run_us = latency.predict_us(group.shape_class, group.best_rows)
        begin_by_us = request.due_us - (run_us or 0) - TIMER_US
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
        if len(self._full) > 2 * len(self._groups) + _TOLERATED:
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
            group = Group(shape_class, self.limits, self.shares)
            self._groups[shape_class] = group
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        for other in tenant.lanes.values() if len(tenant.lanes) == 1 else ():
            tenant.by_urgency.add(other, 1)
        lane = Lane(group, tenant, request.envelope.priority)
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
