"""Discrete-event simulation of a pipeline's batcher and executors.

The batching policy is the real one, passed in: batches are requested from it as executor instances
request them, with a clock that jumps from event to event. No model is run; a batch of b rows
occupies its instance for S(b) microseconds. Reading, decoding, encoding and the log take no time,
and instances do not share a processor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.models.profiling.latency import Latency
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import Batch, Envelope, Request
from headrace.transport.channels import IDLE, Demand, ModelKey

NO_TIMEOUT = -1
EXPIRED = -1
"""Latency of a request that ended while it waited, expired or refused."""
NEVER = 1 << 62
"""A time later than any other."""


class SimulatedLimits(NamedTuple):
    """Batch limits of a model, by the names of `model.toml`."""

    max_batch_size: int
    max_batch_bytes: int
    max_queue_delay_ms: float
    latency: Latency | None = None


class Policy(Protocol):
    """The batcher's interface; `headrace.services.batcher.batcher.DynamicBatcher` implements it."""

    ended: list[Request]

    def __len__(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def next(self, key: ModelKey | None, now_us: int, demand: Demand = IDLE) -> Batch | None: ...
    def next_event_us(self, now_us: int) -> int | None: ...


class Kind(NamedTuple):
    """Properties that determine which requests may share a batch, and their priority."""

    model: str
    version: str
    shape_class: tuple[int, ...]
    tenant: str = ""
    priority: int = 0

    @property
    def key(self) -> ModelKey:
        return self.model, self.version


class Arrivals(NamedTuple):
    """Arriving requests: one element per request in each array.

    Attributes:
        at_us: epoch microseconds, ascending.
        rows: of each request.
        size_bytes: of its inputs.
        timeout_us: from its arrival to its deadline; `NO_TIMEOUT` for none.
        kind: its index in `kinds`.
    """

    at_us: NDArray[np.int64]
    rows: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    timeout_us: NDArray[np.int64]
    kind: NDArray[np.int64]
    kinds: tuple[Kind, ...]

    def chosen(self, places: NDArray[np.bool_] | slice) -> Arrivals:
        """Return some of the arrivals."""
        at_us, rows, size_bytes, timeout_us, kind = (column[places] for column in self[:5])
        return Arrivals(at_us, rows, size_bytes, timeout_us, kind, self.kinds)

    def faster(self, factor: float) -> Arrivals:
        """Return the arrivals at `factor` times the rate: gaps shrink, timeouts do not."""
        if not len(self.at_us):
            return self
        start_us = int(self.at_us[0])
        gaps_us = (self.at_us - start_us) / factor
        return self._replace(at_us=start_us + np.rint(gaps_us).astype(np.int64))


def ignore_batch(batch: Batch, service_us: int, end_us: int) -> None:
    """Ignore the end of a batch."""


class ExecutorPool(NamedTuple):
    """The simulated executors.

    Attributes:
        instances: number of instances of each arriving model version.
        service_us: duration of a model's batch by its rows.
        prepare_us: duration of gathering and copying its rows before that.
        leads_us: for versions whose instances prepare the next batch during a run: how long before
            the end of the run that batch closes.
        lead_from_us: duration of the shortest run during which they do.
        around_us: by model, delay between the end of the run and the answer.
        on_batch_done: called with each finished batch, its duration, and its end.
    """

    instances: Mapping[ModelKey, int]
    service_us: Callable[[str, int], int]
    prepare_us: int = 0
    leads_us: Mapping[ModelKey, int] = {}
    lead_from_us: int = 0
    around_us: Mapping[str, int] = {}
    on_batch_done: Callable[[Batch, int, int], None] = ignore_batch


@dataclass(slots=True)
class Observed:
    """Results of a simulation.

    Attributes:
        latency_us: of each arrival, until its batch was done; `EXPIRED` for some.
        late: number of requests that were done after their deadlines.
        reasons: number of batches by closing reason.
        batch_rows: number of batches by rows.
        busy_us: of all instances of a model version together.
        end_us: time when all work was done.
    """

    latency_us: NDArray[np.int64]
    late: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    batch_rows: Counter[int] = field(default_factory=Counter)
    busy_us: Counter[ModelKey] = field(default_factory=Counter)
    end_us: int = 0


class _Instance:
    """An instance that is idle, or is computing and may have prepared its next batch.

    Attributes:
        asks_us: time from which it asks for a batch; `NEVER` while it has a next one.
        free_us: end of its current run.
    """

    __slots__ = ("asks_us", "free_us", "key", "next_batch", "next_us", "service_us")

    def __init__(self, key: ModelKey) -> None:
        self.key = key
        self.asks_us = 0
        self.free_us = 0
        self.next_batch: Batch | None = None
        self.next_us = 0
        self.service_us = 0


class _Done(NamedTuple):
    """End of a batch on an instance; `order` breaks ties."""

    at_us: int
    order: int
    batch: Batch
    instance: _Instance


class Simulation:
    """One simulation; call `run` once.

    Args:
        arrivals: the arriving requests.
        policy: a new one.
        executors: has instances for every kind of arrival.
    """

    def __init__(self, arrivals: Arrivals, policy: Policy, executors: ExecutorPool) -> None:
        self._arrivals = arrivals
        self._policy = policy
        self._executors = executors
        self._instances = [
            _Instance(key) for key, number in executors.instances.items() for _ in range(number)
        ]
        self._running: list[_Done] = []
        self._order = count()
        self._envelopes = [
            Envelope(model=one.model, version=one.version, tenant=one.tenant, priority=one.priority)
            for one in arrivals.kinds
        ]
        # Plain integers: accessing an array's elements costs more each time than one conversion.
        self._columns = list(zip(*(column.tolist() for column in arrivals[:5]), strict=True))
        self._next = 0
        self._seen = Observed(np.full(len(self._columns), EXPIRED, np.int64))

    def run(self) -> Observed:
        """Simulate from the first arrival until the last batch is done."""
        now_us = 0
        while (event_us := self._next_event_us(now_us)) is not None:
            now_us = event_us
            self._complete(now_us)
            self._arrive(now_us)
            self._pull(now_us)
            self._policy.ended.clear()  # their latency stays `EXPIRED`
        return self._seen

    def _next_event_us(self, now_us: int) -> int | None:
        times = [self._running[0].at_us] if self._running else []
        coming_us = self._columns[self._next][0] if self._next < len(self._columns) else NEVER
        asking_us = min([each.asks_us for each in self._instances], default=NEVER)
        if asking_us <= now_us:
            if coming_us < NEVER:
                times.append(coming_us)
            if self._policy and (due_us := self._policy.next_event_us(now_us)) is not None:
                times.append(due_us)
        elif asking_us < NEVER:
            times.append(asking_us)
        # While no instance asks, an arrival changes nothing, so it is added afterwards.
        return min(times, default=None)

    def _complete(self, now_us: int) -> None:
        while self._running and self._running[0].at_us <= now_us:
            done = heapq.heappop(self._running)
            self._seen.end_us = max(self._seen.end_us, done.at_us)
            answered_us = done.at_us + self._executors.around_us.get(done.batch.model, 0)
            for request in done.batch.requests:
                arrived_us = self._columns[request.offset][0]
                self._seen.latency_us[request.offset] = answered_us - arrived_us
                deadline_ms = request.envelope.deadline_ms
                if deadline_ms and answered_us >= deadline_ms * 1000:
                    self._seen.late += 1
            instance = done.instance
            self._executors.on_batch_done(done.batch, instance.service_us, done.at_us)
            batch, instance.next_batch = instance.next_batch, None
            if batch is None:
                instance.asks_us = instance.free_us = 0
            else:
                self._start(instance, batch, max(done.at_us, instance.next_us))

    def _arrive(self, now_us: int) -> None:
        columns, first = self._columns, self._next
        while self._next < len(columns) and columns[self._next][0] <= now_us:
            self._next += 1
        for place in range(first, self._next):
            self._policy.add(self._request(place))

    def _request(self, place: int) -> Request:
        at_us, rows, size_bytes, timeout_us, number = self._columns[place]
        kind, envelope = self._arrivals.kinds[number], self._envelopes[number]
        if timeout_us != NO_TIMEOUT:
            envelope = envelope._replace(deadline_ms=max((at_us + timeout_us) // 1000, 1))
        request = Request(NULL_ACK, 0, place, place - 1, at_us // 1000, None, None, (), envelope)
        request.ingested_us = at_us
        request.model, request.version = envelope.model, envelope.version
        request.rows, request.size_bytes = rows, size_bytes
        request.shape_class = kind.shape_class
        return request

    def _pull(self, now_us: int) -> None:
        """Give a batch to each instance that asks for one, as far as there are batches."""
        for instance in self._instances:
            if instance.asks_us > now_us or not self._policy:
                continue
            busy = instance.free_us > now_us
            demand = Demand(close_at_us=instance.asks_us) if busy else IDLE
            batch = self._policy.next(instance.key, now_us, demand)
            if batch is None:
                continue
            ready_us = now_us + self._executors.prepare_us
            if busy:
                instance.next_batch, instance.next_us = batch, ready_us
                instance.asks_us = NEVER
            else:
                self._start(instance, batch, ready_us)

    def _start(self, instance: _Instance, batch: Batch, at_us: int) -> None:
        executors, seen = self._executors, self._seen
        service_us = executors.service_us(batch.model, batch.rows)
        instance.service_us = service_us
        instance.free_us = at_us + service_us
        lead_us = executors.leads_us.get(instance.key)
        if lead_us is None or service_us < executors.lead_from_us:
            instance.asks_us = NEVER
        else:
            instance.asks_us = instance.free_us - lead_us
        heapq.heappush(self._running, _Done(instance.free_us, next(self._order), batch, instance))
        seen.reasons[batch.reason] += 1
        seen.batch_rows[batch.rows] += 1
        seen.busy_us[instance.key] += service_us
