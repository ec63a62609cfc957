"""Requests that wait, in groups that may share a batch, with the group at hand that is to go next.

A model's queue has a lane for each tenant and shape class with something in it (see
`headrace.services.batcher.lanes`). The tenant who has had least goes next, and of its lanes the
one whose deadline is earliest; the batch is then filled from all lanes of that shape class. With
one tenant and one shape class there is one lane, and nothing to choose.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from headrace.flow.channel import Ask
from headrace.messages import Request
from headrace.models.latency import Latency
from headrace.services.batcher.lanes import Lane, Shares, Tenant
from headrace.services.batcher.ranking import Ranking

_TOLERATED = 32
"""So many full groups that have gone may be kept, before they are cleared away."""


class BatchLimits(Protocol):
    """What a model allows; a `headrace.models.registry.ModelVersion` has these."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def max_queue_delay_ms(self) -> float: ...
    @property
    def latency(self) -> Latency | None: ...


class Group:
    """Waiting requests of one model, version and shape class.

    Attributes:
        best_rows: the batch size with the best throughput, as far as it is known.
    """

    __slots__ = (
        "best_rows",
        "by_share",
        "is_listed_full",
        "lanes",
        "limits",
        "rows",
        "shape_class",
        "size_bytes",
    )

    def __init__(self, shape_class: tuple[int, ...], limits: BatchLimits, shares: Shares) -> None:
        self.shape_class = shape_class
        self.limits = limits
        self.best_rows = limits.max_batch_size
        self.lanes: dict[str, Lane] = {}
        self.by_share: Ranking[Lane] = Ranking(lambda lane: shares.start(lane.tenant))
        self.rows = 0
        self.size_bytes = 0
        self.is_listed_full = False
        self.learn()

    def learn(self) -> None:
        """Look again which batch size is best."""
        latency = self.limits.latency
        if latency is not None:
            self.best_rows = latency.best_rows(self.shape_class, self.limits.max_batch_size)

    def first_lane(self) -> Lane | None:
        """The lane that the next row comes from; None when nothing waits."""
        if len(self.lanes) > 1:
            return self.by_share.first()
        return next(iter(self.lanes.values()), None)

    @property
    def is_full(self) -> bool:
        """More would not fit into one batch."""
        return self.rows >= self.best_rows or self.size_bytes >= self.limits.max_batch_bytes


class ModelQueue:
    """All that waits for one version of a model.

    Attributes:
        rows: of all requests that wait.
        shares: what each tenant has had.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.rows = 0
        self.shares = Shares()
        self._delay_us = int(limits.max_queue_delay_ms * 1000)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._tenants: dict[str, Tenant] = {}
        self._lanes = 0
        self._by_share: Ranking[Tenant] = Ranking(self.shares.start)
        self._by_age: Ranking[Lane] = Ranking(Lane.came_us)
        self._full: deque[Group] = deque()

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._groups

    @property
    def is_contested(self) -> bool:
        """Several tenants wait."""
        return len(self._tenants) > 1

    def add(self, request: Request) -> None:
        """The request begins to wait."""
        group = self._groups.get(request.shape_class)
        if group is None:
            group = Group(request.shape_class, self.limits, self.shares)
            self._groups[request.shape_class] = group
        lane = group.lanes.get(request.envelope.tenant)
        if lane is None:
            self._open_lane(group, request)
        else:
            lane.add(request)
            if self._lanes > 1 and (request.envelope.deadline_ms or request.envelope.priority):
                # It may have become the most urgent one.
                lane.tenant.by_urgency.add(lane, len(lane.tenant.lanes))
            lane.tenant.rows += request.rows
        rows = request.rows
        self.rows += rows
        group.rows += rows
        group.size_bytes += request.size_bytes
        if not group.is_listed_full and group.is_full:
            self._list_full(group)

    def end(self, request: Request) -> None:
        """The request has failed while it waited."""
        lane = self._groups[request.shape_class].lanes[request.envelope.tenant]
        lane.end(request)
        self._left(lane, request.rows, request.size_bytes)

    def take_first(self, lane: Lane) -> Request:
        """Take out what the lane's `first` has given."""
        request = lane.take_first()
        self._left(lane, request.rows, request.size_bytes)
        return request

    def ripest(self, now_us: int, ask: Ask) -> Group | None:
        """The group that goes next, of those that may close.

        Args:
            now_us: groups whose delay is over may close, and full ones.
            ask: of an instance that is busy, for which only full ones may close yet; or of one
                that asks for the last time, for which all may.
        """
        group = self._next_group()
        if group is None or ask.at_once:
            return group
        busy = ask.close_at_us > now_us
        if not (busy or self._delay_us) or group.is_full:
            return group
        if not busy:
            oldest = self._by_age.first()
            assert oldest is not None
            if oldest.came_us() + self._delay_us <= now_us:
                return oldest.group
        return self._full_group()

    def due_us(self) -> int | None:
        """When the oldest group's delay is over; None where nothing waits for that."""
        if not self._delay_us:
            return None
        oldest = self._by_age.first()
        return None if oldest is None else oldest.came_us() + self._delay_us

    def urgency_us(self) -> int:
        """The moment by which the most urgent request of the next tenant should be done."""
        tenant = self._next_tenant()
        lane = None if tenant is None else tenant.by_urgency.first()
        assert lane is not None
        return lane.urgency_us()

    def rows_ahead(self, tenant: str, priority: int) -> int:
        """Rows that go before a request that comes now, about.

        Those of its own tenant with its priority or a higher one, and as many of each other
        tenant that waits: that is how the rows are shared out.
        """
        mine = self._tenants.get(tenant)
        if mine is None:
            return 0
        own = sum(lane.rows_before(priority) for lane in mine.lanes.values())
        return min(self.rows - mine.rows + own, own * len(self._tenants))

    def waiting(self) -> list[Request]:
        """All requests that wait."""
        lanes = [lane for group in self._groups.values() for lane in group.lanes.values()]
        return [request for lane in lanes for request in lane.waiting()]

    def _next_tenant(self) -> Tenant | None:
        if len(self._tenants) > 1:
            return self._by_share.first()
        return next(iter(self._tenants.values()), None)

    def _next_group(self) -> Group | None:
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        tenant = self._next_tenant()
        if tenant is None:
            return None
        lane = tenant.by_urgency.first()
        assert lane is not None
        return lane.group

    def _list_full(self, group: Group) -> None:
        if len(self._full) > 2 * len(self._groups) + _TOLERATED:
            kept = [one for one in self._full if one.lanes]
            self._full = deque(kept)
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

    def _open_lane(self, group: Group, request: Request) -> None:
        name = request.envelope.tenant
        tenant = self._tenants.get(name)
        is_new = tenant is None
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        lane = Lane(group, tenant)
        lane.add(request)
        tenant.rows += request.rows
        self._lanes += 1
        group.lanes[name] = tenant.lanes[group.shape_class] = lane
        group.by_share.add(lane, len(group.lanes))
        tenant.by_urgency.add(lane, len(tenant.lanes))
        if is_new:
            self._by_share.add(tenant, len(self._tenants))
        if self._delay_us:
            self._by_age.add(lane, self._lanes)

    def _left(self, lane: Lane, rows: int, size_bytes: int) -> None:
        group, tenant = lane.group, lane.tenant
        group.rows -= rows
        group.size_bytes -= size_bytes
        tenant.rows -= rows
        self.rows -= rows
        if lane.count:
            return
        self._lanes -= 1
        del group.lanes[tenant.name]
        del tenant.lanes[group.shape_class]
        if not group.lanes:
            del self._groups[group.shape_class]
        if not tenant.lanes:
            del self._tenants[tenant.name]
            if len(self._tenants) <= 1:
                self.shares.forget()
