"""Batches are formed of what may go together, and nothing is lost or doubled on the way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.errors import Code, Rejected
from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Batch, Envelope, Request
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.transport.channels import Demand
from tests.support.work import NOW_US, Limits, make_request, receipt_of, requests_alive


def learned(us_of: dict[int, int]) -> Latency:
    """Return the run times of the shapes below, by rows."""
    latency = Latency()
    for shape_class in ((), (1,), (2, 3)):
        for rows, us in us_of.items():
            latency.observe(shape_class, rows, us)
    return latency


MODELS = {
    ("digits", "1"): Limits(max_batch_size=4, max_batch_bytes=1000),
    ("magika", "1"): Limits(8, 1000, latency=learned({1: 1000, 2: 1500, 4: 4000, 8: 16_000})),
    ("digits", "2"): Limits(max_batch_size=1, max_batch_bytes=1000),
    ("slow", "1"): Limits(max_batch_size=8, max_batch_bytes=100, max_queue_delay_ms=5),
}


class Kind(NamedTuple):
    """The attributes of a generated request."""

    key: tuple[str, str]
    shape_class: tuple[int, ...]
    rows: int
    size_bytes: int
    timeout_ms: int | None
    tenant: str
    priority: int


ENDED_HERE = (
    Code.DEADLINE_EXCEEDED,
    Code.UNKNOWN_MODEL,
    Code.MODEL_NOT_READY,
    Code.OVERLOADED,
    Code.CANCELLED,
)
TIMEOUTS = st.one_of(st.none(), st.integers(1, 20))
KINDS = st.builds(
    Kind,
    st.sampled_from([*MODELS, ("gone", "1")]),
    st.sampled_from([(), (1,), (2, 3)]),
    st.integers(1, 6),
    st.integers(0, 130),
    TIMEOUTS,
    st.sampled_from(["", "", "a", "b"]),
    st.sampled_from([0, 0, 5, -100]),
)
CHUNKS = st.lists(st.tuples(KINDS, st.lists(TIMEOUTS, min_size=1, max_size=4)), max_size=5).map(
    lambda drawn: [kind._replace(timeout_ms=each) for kind, timeouts in drawn for each in timeouts]
)
"""Several of a kind follow each other, each with a deadline of its own, or none."""
ASKS = st.builds(Demand, st.booleans(), st.sampled_from([0, 0, NOW_US + 20_000, NOW_US + 100_000]))


def made(kind: Kind, now_us: int) -> Request:
    """A request of this kind that comes now."""
    return make_request(
        kind.key[0],
        version=kind.key[1],
        rows=kind.rows,
        size_bytes=kind.size_bytes,
        shape_class=kind.shape_class,
        ingested_us=now_us,
        envelope=Envelope(
            deadline_ms=0 if kind.timeout_ms is None else now_us // 1000 + kind.timeout_ms,
            tenant=kind.tenant,
            priority=kind.priority,
        ),
    )


def limits_of(name: str, version: str) -> Limits:
    """Return the limits, as the registry does."""
    limits = MODELS.get((name, version))
    if limits is None:
        raise Rejected(Code.UNKNOWN_MODEL, f"{name}/{version}: there is none")
    return limits


class FormingMachine(RuleBasedStateMachine):
    """Requests come, expire and become revoked while executors pull, in any order."""

    @initialize()
    def begin(self) -> None:
        self.now_us = NOW_US
        self.forming = DynamicBatcher(limits_of, "test")
        self.waiting: dict[int, Request] = {}
        self.batch_ids: set[str] = set()

    @rule(kind=KINDS)
    def add(self, kind: Kind) -> None:
        request = self._made(kind)
        self.forming.add(request, self.now_us)
        self.waiting[request.offset] = request
        self._take_ended()

    @rule(chunk=CHUNKS)
    def add_all(self, chunk: list[Kind]) -> None:
        requests = [self._made(kind) for kind in chunk]
        self.forming.add_all(requests, self.now_us)
        self.waiting |= {request.offset: request for request in requests}
        self._take_ended()

    def _made(self, kind: Kind) -> Request:
        return made(kind, self.now_us)

    @rule(by_us=st.integers(0, 10_000))
    def time_passes(self, by_us: int) -> None:
        self.now_us += by_us

    @rule()
    def expire(self) -> None:
        self.forming.expire(self.now_us)
        self._take_ended()

    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        if self.waiting:
            receipt_of(self.waiting[self._drawn(data)]).revoked = True

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waits = bool(self.waiting) and data.draw(st.booleans())
        offset = self._drawn(data) if waits else -1
        record = make_request("", envelope=Envelope(cancels=("t", 0, offset)))
        before = len(self.forming)
        self.forming.add(record)
        assert self.forming.cancel()[0] == [record]
        assert before - len(self.forming) == waits
        self._take_ended()

    def _drawn(self, data: st.DataObject) -> int:
        """Return the offset of one that waits, drawn by its place: offsets differ in a replay."""
        return sorted(self.waiting)[data.draw(st.integers(0, len(self.waiting) - 1))]

    @rule(key=st.one_of(st.none(), st.sampled_from(sorted(MODELS))), demand=ASKS)
    def pull(self, key: tuple[str, str] | None, demand: Demand) -> None:
        batch = self.forming.next(key, self.now_us, demand)
        self._take_ended()
        if batch is not None:
            assert key in (None, (batch.model, batch.version))
            self._check(batch)

    def _check(self, batch: Batch) -> None:
        requests = batch.requests
        limits = limits_of(batch.model, batch.version)
        assert len({(one.model, one.version, one.shape_class) for one in requests}) == 1
        assert batch.rows == sum(one.rows for one in requests)
        if len(requests) > 1:
            assert batch.rows <= limits.max_batch_size
            assert sum(one.size_bytes for one in requests) <= limits.max_batch_bytes
        assert batch.batch_id not in self.batch_ids
        self.batch_ids.add(batch.batch_id)
        for request in requests:
            assert self.waiting.pop(request.offset) is request
            assert not request.ack_handle.revoked
            assert request.failure is None
            assert request.batch.formed_us == self.now_us
            deadline_us = request.envelope.deadline_ms * 1000
            assert not deadline_us or deadline_us > self.now_us

    def _take_ended(self) -> None:
        ended, self.forming.ended = self.forming.ended, []
        for request in ended:
            assert self.waiting.pop(request.offset) is request
            assert request.failure is not None
            assert request.ack_handle.revoked or request.failure.code in ENDED_HERE

    @invariant()
    def it_knows_how_many_wait(self) -> None:
        assert len(self.forming) == len(self.waiting)

    @invariant()
    def an_overdue_deadline_is_noticed(self) -> None:
        times = [one.envelope.deadline_ms * 1000 for one in self.waiting.values()]
        next_us = self.forming.next_event_us(self.now_us)
        assert next_us is not None or not any(times)
        if next_us is not None and any(times):
            assert next_us <= min(filter(None, times))
        self._take_ended()

    @invariant()
    def the_next_event_is_to_come(self) -> None:
        self.forming.expire(self.now_us)
        next_us = self.forming.next_event_us(self.now_us)
        assert next_us is None or next_us > self.now_us
        self._take_ended()

    def teardown(self) -> None:
        """Draining, everything comes out."""
        self.forming.is_draining = True
        while (batch := self.forming.next(None, self.now_us)) is not None:
            self._check(batch)
        self._take_ended()
        assert not self.waiting
        assert len(self.forming) == 0


TestForming = FormingMachine.TestCase
TestForming.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def formed(requests: Iterable[Request], limits: Limits, now_us: int = NOW_US) -> list[Batch]:
    """All batches that may close now."""
    forming = DynamicBatcher(lambda _name, _version: limits, "test")
    for request in requests:
        forming.add(request)
    batches = []
    while (batch := forming.next(("digits", "1"), now_us)) is not None:
        batches.append(batch)
    return batches


@given(st.lists(st.integers(1, 9), max_size=30))
def test_batch_keeps_row_limit_and_whole_requests(rows: list[int]) -> None:
    """Requests leave in order of arrival; a batch closes before one that would pass its limit."""
    batches = formed([make_request(rows=number) for number in rows], Limits(max_batch_size=4))

    assert [one.rows for batch in batches for one in batch.requests] == rows
    for batch, following in pairwise(batches):
        assert batch.rows + following.requests[0].rows > 4


def test_request_over_limit_runs_alone() -> None:
    """More rows, or more bytes, than a batch may have: it is not split and has no company."""
    requests = [make_request(), make_request(rows=9), make_request(size_bytes=5000), make_request()]

    batches = formed(requests, Limits(max_batch_size=4, max_batch_bytes=1000))

    assert [batch.requests for batch in batches] == [[request] for request in requests]


@pytest.mark.parametrize(
    ("limits", "count", "reason"),
    [
        (Limits(max_batch_size=4), 3, "idle"),
        (Limits(max_batch_size=4), 4, "full"),
        (Limits(max_batch_size=4), 5, "full"),
        (Limits(max_batch_size=9, max_batch_bytes=25), 3, "bytes"),
        (Limits(max_batch_size=4, max_queue_delay_ms=5), 4, "full"),
    ],
)
def test_batch_reports_why_it_closed(limits: Limits, count: int, reason: str) -> None:
    """Full, out of bytes, or nothing more was there."""
    assert formed([make_request() for _ in range(count)], limits)[0].reason == reason


def test_batch_waits_for_its_queue_delay_and_no_longer() -> None:
    """With `max_queue_delay_ms` a batch that is not full closes when its first request is due."""
    forming = DynamicBatcher(lambda _name, _version: Limits(max_queue_delay_ms=5), "test")
    forming.add(make_request(ingested_us=NOW_US))
    forming.add(make_request(ingested_us=NOW_US + 3000))
    key = ("digits", "1")

    assert forming.next(key, NOW_US + 4999) is None
    assert forming.next_event_us(NOW_US + 4999) == NOW_US + 5000
    batch = forming.next(key, NOW_US + 5000)
    assert batch is not None
    assert (batch.reason, len(batch.requests)) == ("delay", 2)


def test_released_model_hands_out_waiting_requests() -> None:
    """An instance that serves no longer takes the rest without the delay: nobody else would."""
    forming = DynamicBatcher(lambda _name, _version: Limits(max_queue_delay_ms=1000), "test")
    forming.add(make_request())

    assert forming.next(("digits", "1"), NOW_US) is None
    assert forming.next(("digits", "1"), NOW_US, Demand(is_last=True)) is not None


def test_oldest_request_goes_first_across_shapes() -> None:
    """Groups take turns by their first request's age, so that no shape starves."""
    forming = DynamicBatcher(lambda _name, _version: Limits(max_batch_size=1), "test")
    requests = [
        make_request(shape_class=(number % 3,), ingested_us=NOW_US + number) for number in range(9)
    ]
    for request in requests:
        forming.add(request)

    order = []
    while (batch := forming.next(None, NOW_US + 100)) is not None:
        order += batch.requests
    assert order == requests


def test_departed_request_is_freed_before_its_deadline() -> None:
    """Deadlines may be hours off; only what waits takes memory."""
    forming = DynamicBatcher(lambda _name, _version: Limits(), "test")
    before = requests_alive()

    for _ in range(1000):
        forming.add(make_request(deadline_ms=NOW_US // 1000 + 3_600_000))
        assert forming.next(None, NOW_US) is not None

    assert requests_alive() - before < 100


def test_departed_request_is_freed_behind_earlier_deadlines_of_others() -> None:
    """Many requests wait for a slow model, with earlier deadlines than those of a quick one."""
    forming = DynamicBatcher(lambda _name, _version: Limits(), "test")
    for _ in range(500):
        forming.add(make_request(model="slow", deadline_ms=NOW_US // 1000 + 1_800_000))
    before = requests_alive()

    for _ in range(1000):
        forming.add(make_request(deadline_ms=NOW_US // 1000 + 3_600_000))
        assert forming.next(("digits", "1"), NOW_US) is not None

    assert requests_alive() - before < 10


def test_requests_that_expire_in_order_are_freed_at_once() -> None:
    """The version may be idle from then on, and nobody pulls."""
    forming = DynamicBatcher(lambda _name, _version: Limits(), "test")
    before = requests_alive()

    for number in range(20):
        forming.add(make_request(deadline_ms=NOW_US // 1000 + number + 1))
    forming.expire(NOW_US + 1_000_000)
    forming.ended.clear()

    assert requests_alive() == before


def test_large_requests_that_expire_behind_patient_one_are_freed() -> None:
    """Their bytes are charged to no budget once they are answered."""
    forming = DynamicBatcher(lambda _name, _version: Limits(), "test")
    forming.add(make_request())
    before = requests_alive()

    for number in range(20):
        deadline_ms = NOW_US // 1000 + number + 1
        forming.add(make_request(deadline_ms=deadline_ms, size_bytes=1_000_000))
    forming.expire(NOW_US + 1_000_000)
    forming.ended.clear()

    assert requests_alive() - before <= 1


def test_expired_request_is_freed_behind_waiting_one() -> None:
    """While nobody pulls, requests that end behind a patient one leave all the same."""
    forming = DynamicBatcher(lambda _name, _version: Limits(), "test")
    forming.add(make_request())
    before = requests_alive()

    for number in range(1000):
        forming.add(make_request(deadline_ms=NOW_US // 1000 + number + 1))
        forming.expire(NOW_US + number * 1000 + 1000)
        forming.ended.clear()

    assert requests_alive() - before < 100


@pytest.mark.timeout(20)
def test_thousands_of_shapes_do_not_slow_batching() -> None:
    """20,000 requests of 20,000 shapes are formed in seconds: a pull does not look at them all."""
    requests = [
        make_request(shape_class=(number,), ingested_us=NOW_US + number) for number in range(20_000)
    ]

    batches = formed(requests, Limits(), NOW_US + 20_000)

    assert len(batches) == len(requests)


def told(forming: DynamicBatcher, places: dict[int, int]) -> list[object]:
    """All that is pulled, and all that has ended, by the places of the requests."""
    pulled = []
    for number in range(200):
        key = sorted(MODELS)[number % len(MODELS)]
        batch = forming.next(key, NOW_US + 100 * number, Demand(is_last=number > 100))
        if batch is not None:
            pulled.append([places[one.offset] for one in batch.requests])
    ended = [(places[one.offset], one.failure and one.failure.code) for one in forming.ended]
    return [pulled, ended, len(forming)]


@given(st.lists(CHUNKS, min_size=1, max_size=4), st.booleans())
def test_chunk_and_single_arrivals_form_equal_batches(
    chunks: list[list[Kind]], paced: bool
) -> None:
    """The same batches are formed, and the same requests end, either way."""
    found = []
    for together in (True, False):
        forming = DynamicBatcher(limits_of, "test")
        places: dict[int, int] = {}
        if paced:
            learn_pace(forming)
        for chunk in chunks:
            requests = [made(kind, NOW_US) for kind in chunk]
            places |= {one.offset: len(places) + n for n, one in enumerate(requests)}
            if together:
                forming.add_all(requests, NOW_US)
            else:
                for one in requests:
                    forming.add(one, NOW_US)
        found.append(told(forming, places))

    assert found[0] == found[1]


def learn_pace(forming: DynamicBatcher) -> None:
    """Let a backlog of `digits` be pulled, at a millisecond a row, until it is gone."""
    for _ in range(16):
        forming.add(made(Kind(("digits", "1"), (), 1, 1, None, "", 0), NOW_US), NOW_US)
    for number in range(4):
        forming.next(("digits", "1"), NOW_US - 4_000 * (4 - number))
