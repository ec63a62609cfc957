"""Payloads that wait for workers hold nothing else, and end when they must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.config import LimitSettings
from headrace.consumer.deferring import Deferral
from headrace.consumer.ready_queue import PolledRecords
from headrace.crash_isolation.run_gate import RunGate
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, BudgetShares, Share, Usage
from headrace.delivery.failures import REVOKED
from headrace.delivery.inflight import AssignedPartition, InFlightAck, InFlightTracker
from headrace.errors import Code
from headrace.log.port import Record
from headrace.models.registry import Models
from headrace.protocol.codec import encode_request
from headrace.protocol.compression import compress
from headrace.protocol.headers import JSON
from headrace.protocol.messages import Request
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.service import IngestService
from headrace.services.ingest.transform_waits import TransformWaits
from headrace.telemetry.instruments import Instruments
from headrace.transforms.workers import (
    PendingTransform,
    PendingValue,
    TransformPool,
    TransformThread,
)
from headrace.tuning import TUNING, IngestTuning
from tests.support.conditions import eventually
from tests.support.models import add_version, digits, settings_for
from tests.support.python_models import BEGUN, GATE, STEPS, shut_gate
from tests.support.services import (
    REQUESTS,
    StillClock,
    counted,
    digits_value,
    make_assignment,
    make_instruments,
)
from tests.support.work import NOW_US, Tray, make_request

TRANSFORM = """
import numpy as np
from tests.support.python_models import BEGUN, GATE, STEPS

def transform(payload, content_type):
    if payload == b"waits":
        BEGUN.set()
        GATE.wait()
    if payload == b"steps":
        BEGUN.set()
        STEPS.acquire()
    return {"pixels": np.full((len(payload), 64), 1, np.float32)}
"""
CONFIG = 'transform = "python"\nmax_execution_s = 3600\n'
INPUT_BYTES = 64 * 4


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """With `slow` and `other`, whose transforms wait for the gate if their payload says so."""
    for name in ("slow", "other", "digits"):
        config = "" if name == "digits" else CONFIG
        add_version(tmp_path, name, 1, digits(), config)
        (tmp_path / name / "transform.py").write_text(TRANSFORM)
    models = Models(settings_for(tmp_path))
    models.open()
    return models


class Feed:
    """A source that delivers what the test puts into it."""

    deferral: Deferral | None = None

    def __init__(self, assignment: AssignedPartition | None = None) -> None:
        self.assignment = assignment or make_assignment()
        self.gate = RunGate()
        self._deliveries: asyncio.Queue[PolledRecords | None] = asyncio.Queue()
        self._next = 0

    @property
    def quarantine(self) -> Feed:
        return self

    def put(self, *records: tuple[bytes | None, dict[str, bytes]]) -> None:
        """Deliver values with headers, as one chunk."""
        made = [
            Record(
                *REQUESTS, self._next + place, NOW_US // 1000, None, value, list(headers.items())
            )
            for place, (value, headers) in enumerate(records)
        ]
        self._next += len(records)
        self._deliveries.put_nowait(PolledRecords(self.assignment, made))

    def end(self) -> None:
        self._deliveries.put_nowait(None)

    @property
    def is_read(self) -> bool:
        """True once all that was put has been received."""
        return self._deliveries.empty()

    async def receive(self) -> PolledRecords | None:
        return await self._deliveries.get()


class Running:
    """An ingest that runs, and what it has sent."""

    def __init__(
        self,
        models: Models,
        feed: Feed,
        instruments: Instruments,
        tuning: IngestTuning,
        items: Tray | None = None,
    ):
        self.items, self.answers = items or Tray(), Tray()
        self.instruments = instruments
        self.service = IngestService(
            feed,  # type: ignore[arg-type]  # what is used of it
            self.items,
            self.answers,
            IngestRules(models.catalog, LimitSettings()),
            instruments,
            replace(TUNING, ingest=tuning),
        )

    @property
    def sent(self) -> list[int]:
        """Offsets of the requests that can run."""
        return [request.offset for request in self.items.requests]

    @property
    def ended(self) -> list[tuple[int, str]]:
        """Offsets of the requests that have ended, and their codes."""
        return [
            (request.offset, request.failure.code)
            for request in self.answers.requests
            if request.failure is not None
        ]


@asynccontextmanager
async def running(
    models: Models,
    feed: Feed,
    tuning: IngestTuning = TUNING.ingest,
    clock: StillClock | None = None,
    items: Tray | None = None,
) -> AsyncIterator[Running]:
    """An ingest of one worker that ends with the context, when the gate has been opened."""
    ingest = Running(models, feed, make_instruments(clock), tuning, items)
    async with asyncio.TaskGroup() as tasks:
        with shut_gate():
            tasks.create_task(ingest.service.run())
            yield ingest
            GATE.set()
            feed.end()
            await eventually(lambda: ingest.items.closed, what="ingest has ended")


def payload(
    content: bytes = b"x", model: str = "slow", headers: dict[str, bytes] | None = None
) -> tuple[bytes, dict[str, bytes]]:
    """A payload for a model."""
    return content, {"content-type": b"text/plain", "x-model": model.encode(), **(headers or {})}


PLAIN = (digits_value(), dict[str, bytes]())


async def test_slow_payload_holds_neither_what_is_read_with_it_nor_after_it(models: Models) -> None:
    """Requests with tensors pass it while it is with its worker."""
    feed = Feed()
    async with running(models, feed) as ingest:
        feed.put(payload(b"waits"), PLAIN)
        await eventually(BEGUN.is_set)
        feed.put(PLAIN)
        await eventually(lambda: ingest.sent == [1, 2], what="the others are sent")
        assert counted(ingest.instruments, "transforms_waiting") == 1
        waiting_bytes = counted(ingest.instruments, "transforms_waiting_bytes")
        assert waiting_bytes == len(b"waits") + TUNING.ingest.unknown_input_bytes

    assert ingest.sent == [1, 2, 0]
    assert counted(ingest.instruments, "transforms_waiting_bytes") == 0


async def test_large_compressed_value_delays_no_request_read_with_or_after_it(
    models: Models,
) -> None:
    """It waits for its turn with a worker as other slow payloads do, and ends when its time has
    passed.
    """
    value = compress(digits_value(), "gzip"), {"content-encoding": b"gzip"}
    late = value[0], {**value[1], "x-deadline-ms": str(NOW_US // 1000 + 1000).encode()}
    tuning = replace(TUNING.ingest, inline_decompressed_bytes=1)
    clock, feed = StillClock(), Feed()
    async with running(models, feed, tuning, clock) as ingest:
        feed.put(payload(b"waits"))
        await eventually(BEGUN.is_set)
        feed.put(value, late, PLAIN)
        feed.put(PLAIN)
        await eventually(lambda: ingest.sent == [3, 4], what="the others are sent")
        clock.now_us += 1_000_000
        await eventually(lambda: ingest.ended == [(2, Code.DEADLINE_EXCEEDED)])

    assert sorted(ingest.sent) == [0, 1, 3, 4]


async def test_compressed_payload_waits_for_transform_after_it_was_decompressed(
    models: Models,
) -> None:
    """Its transform is run like that of a payload that was not compressed."""
    content, headers = payload(b"waits", headers={"content-encoding": b"zstd"})
    feed = Feed()
    tuning = replace(TUNING.ingest, inline_decompressed_bytes=1)
    async with running(models, feed, tuning) as ingest:
        feed.put((compress(content, "zstd"), headers))
        await eventually(BEGUN.is_set, what="its transform has begun")
        feed.put(PLAIN)
        await eventually(lambda: ingest.sent == [1], what="the other is sent")

    assert [request.rows for request in ingest.items.requests] == [1, len(b"waits")]


async def test_models_take_turns_for_worker(models: Models) -> None:
    """A backlog of one model delays another by a payload."""
    feed = Feed()
    async with running(models, feed) as ingest:
        feed.put(payload(b"waits"))
        await eventually(BEGUN.is_set)
        feed.put(*[payload()] * 10, payload(model="other"), PLAIN)
        await eventually(lambda: ingest.sent == [12], what="the chunk has been read")
        GATE.set()
        await eventually(lambda: len(ingest.sent) == 13, what="all are sent")

    assert ingest.sent.index(11) < ingest.sent.index(3)


@pytest.mark.parametrize("where", ["same chunk", "later"])
@pytest.mark.parametrize("by", ["place", "correlation"])
async def test_cancelled_payload_is_answered_while_worker_is_busy(
    models: Models, where: str, by: str
) -> None:
    """The worker may be at this payload or at another; a later request may repeat its id."""
    feed = Feed()
    mine = {"kafka_correlationId": b"mine"}
    cancel = {"x-cancel": f"{REQUESTS.topic}/0/1".encode()}
    cancels = (None, cancel if by == "place" else {"x-cancel": b"", **mine})
    async with running(models, feed) as ingest:
        feed.put(payload(b"waits"))
        await eventually(BEGUN.is_set)
        first, again = payload(b"x", headers=mine), payload(b"y", headers=mine)
        if where == "later":
            feed.put(first, PLAIN)
            await eventually(lambda: ingest.sent == [2], what="the payload waits")
            feed.put(cancels, again)
        else:
            feed.put(first, PLAIN, cancels, again)
        await eventually(lambda: ingest.ended == [(1, Code.CANCELLED)], what="it is answered")
        feed.put((None, {"x-cancel": f"{REQUESTS.topic}/0/0".encode()}))
        await eventually(
            lambda: ingest.ended == [(1, Code.CANCELLED), (0, Code.CANCELLED)],
            what="the one with the worker is answered as well",
        )

    assert ingest.sent == [2, 4]
    assert counted(ingest.instruments, "cancellations_total", outcome="ended") == 2
    assert counted(ingest.instruments, "cancellations_total", outcome="none") == 0
    assert feed.assignment.in_flight == 4


async def test_cancelling_record_follows_request_that_does_not_wait(models: Models) -> None:
    """Wherever it stands in the chunk, what it may cancel in the batcher is sent before it."""
    feed = Feed()
    async with running(models, feed) as ingest:
        feed.put(PLAIN, (None, {"x-cancel": f"{REQUESTS.topic}/0/0".encode()}), PLAIN)
        await eventually(lambda: len(ingest.sent) == 3, what="all are sent")

    assert ingest.sent == [0, 2, 1]


class SlowTray(Tray):
    """A stream that has no room for the first request until `room` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = False
        self.room = asyncio.Event()

    async def send(self, chunk: list[Request]) -> None:
        if any(request.offset == 0 for request in chunk):
            self.is_waiting = True
            await self.room.wait()
        await super().send(chunk)


async def test_cancelling_record_follows_request_whose_transform_has_ended(models: Models) -> None:
    """The batcher finds the request, though it had to wait for room there."""
    feed, items = Feed(), SlowTray()
    async with running(models, feed, items=items) as ingest:
        feed.put(payload())
        await eventually(lambda: items.is_waiting)
        feed.put((None, {"x-cancel": f"{REQUESTS.topic}/0/0".encode()}))
        await eventually(lambda: feed.is_read)
        for _ in range(20):
            await asyncio.sleep(0)
        items.room.set()
        await eventually(lambda: len(ingest.sent) == 2, what="both are sent")

    assert ingest.sent == [0, 1]


async def test_payload_whose_deadline_passes_is_answered_while_worker_is_busy(
    models: Models,
) -> None:
    """Its transform is never begun."""
    feed, clock = Feed(), StillClock(NOW_US)
    async with running(models, feed, clock=clock) as ingest:
        feed.put(payload(b"waits"))
        await eventually(BEGUN.is_set)
        soon = {"x-deadline-ms": b"%d" % (NOW_US // 1000 + 1)}
        feed.put(payload(b"late", headers=soon), PLAIN)
        await eventually(lambda: ingest.sent == [2], what="the payload waits")
        clock.now_us += 10_000_000
        await eventually(lambda: ingest.ended == [(1, Code.DEADLINE_EXCEEDED)])

    assert ingest.sent == [2, 0]


async def test_payloads_of_revoked_partition_end_while_worker_is_busy(models: Models) -> None:
    """The next owner of the partition has them; their bytes are free at once."""
    tracker = InFlightTracker(Budget(1_000_000_000), lambda: None)
    feed = Feed(tracker.assign(REQUESTS, AckedOffsets(0)))
    async with running(models, feed) as ingest:
        feed.put(payload(b"waits"), payload(), PLAIN)
        await eventually(BEGUN.is_set)
        await eventually(lambda: ingest.sent == [2], what="the chunk has been read")
        tracker.revoke(REQUESTS)
        ingest.service.drop_revoked()
        await eventually(lambda: len(ingest.answers.requests) == 2, what="both have ended")

    assert {request.failure for request in ingest.answers.requests} == {REVOKED}
    assert ingest.sent == [2]
    ack_all_of(ingest.answers.requests + ingest.items.requests)
    assert tracker.budget.used_bytes == 0


def ack_all_of(requests: Sequence[Request]) -> None:
    """Acknowledge requests, as a responder does that has answered or dropped them."""
    for request in requests:
        request.ack_handle.ack()


async def test_inputs_stay_within_budget_until_their_requests_are_answered(models: Models) -> None:
    """Small payloads become large inputs; more are made as answers make room."""
    rows, count = 100, 40
    limit_bytes = 10 * rows * INPUT_BYTES
    tracker = InFlightTracker(Budget(limit_bytes), lambda: None)
    feed = Feed(tracker.assign(REQUESTS, AckedOffsets(0)))
    tuning = replace(
        TUNING.ingest, unknown_input_bytes=0, transformed_bytes=1, room_interval_s=0.001
    )
    async with running(models, feed, tuning) as ingest:
        feed.put(*[payload(b"r" * rows)] * count)
        most_bytes = 0
        for answered in range(count):
            await eventually(partial(has_sent, ingest, answered + 1), what="one more is sent")
            most_bytes = max(most_bytes, tracker.budget.used_bytes)
            ingest.items.requests[answered].ack_handle.ack()

    assert ingest.sent == list(range(count))
    assert most_bytes <= limit_bytes + 3 * rows * INPUT_BYTES
    assert tracker.budget.used_bytes == 0


def has_sent(ingest: Running, count: int) -> bool:
    """Return whether so many requests were sent."""
    return len(ingest.sent) >= count


async def test_oldest_payload_of_partition_needs_no_room(models: Models) -> None:
    """Answers in order that have filled the budget may wait for it."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    feed = Feed(tracker.assign(REQUESTS, AckedOffsets(0)))
    tuning = replace(TUNING.ingest, room_interval_s=0.001)
    async with running(models, feed, tuning) as ingest:
        feed.put(payload(), payload())
        await eventually(lambda: ingest.sent == [0], what="the first is made: nothing else is")
        ingest.items.requests[0].ack_handle.ack()
        await eventually(lambda: ingest.sent == [0, 1], what="the second is the oldest now")


@pytest.mark.parametrize("coding", ["", "zstd"])
async def test_payload_is_made_while_nothing_that_was_made_is_unanswered(
    models: Models, coding: str
) -> None:
    """Others have filled the budget, such as values whose store hangs. A payload that was
    decompressed for its transform waits for no answer of its own.
    """
    tracker = InFlightTracker(Budget(100), lambda: None)
    feed = Feed(tracker.assign(REQUESTS, AckedOffsets(0)))
    tuning = replace(TUNING.ingest, room_interval_s=0.001, inline_decompressed_bytes=1)
    content, headers = payload(headers={"content-encoding": coding.encode()} if coding else None)
    async with running(models, feed, tuning) as ingest:
        feed.put(PLAIN, (compress(content, coding) if coding else content, headers))
        await eventually(lambda: ingest.sent == [0, 1], what="it is sent")


async def test_request_that_is_deferred_after_its_transform_makes_room(models: Models) -> None:
    """Its model, known only then, may be over its share. Nothing that was made is unanswered then,
    so that no answer will make room for another payload.
    """
    tracker = InFlightTracker(Budget(1000), lambda: None)
    assignment = tracker.assign(REQUESTS, AckedOffsets(0))
    made: list[int] = []

    async def finish(payloads: Sequence[PendingValue]) -> None:
        for each in payloads:
            made.append(each.request.offset)
            acks[each.request.offset].defer(Share(Usage(), None), 1, each.request.envelope)

    acks = [assignment.admit(0, 10), assignment.admit(1, 1000)]
    first, second = (transform_of(models, ack) for ack in acks)
    tuning = replace(TUNING.ingest, unknown_input_bytes=0, room_interval_s=0.001)
    pool = TransformPool([TransformThread()])
    instruments = make_instruments()
    waits = TransformWaits(pool, finish, RunGate(), instruments.metrics, instruments.clock, tuning)
    with closing(pool):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits.run())
            waits.add(first)
            await eventually(lambda: made == [0], what="the first is made, and deferred")
            waits.add(second)
            await eventually(lambda: made == [0, 1], what="the second is made")
            waits.close()


def transform_of(models: Models, ack_handle: InFlightAck) -> PendingTransform:
    """A payload that waits for its transform."""
    request = make_request("slow")
    request.offset, request.ack_handle = ack_handle.offset, ack_handle
    return PendingTransform(request, models.catalog.lookup("slow"), b"x", "text/plain")


class AnsweringTray(Tray):
    """A stream whose requests are answered at once, while `is_open` is set.

    Attributes:
        closes_after: offset of the request after which it is full again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.closes_after = -1

    async def send(self, chunk: list[Request]) -> None:
        await self.is_open.wait()
        await super().send(chunk)
        ack_all_of(chunk)
        if self.closes_after in [request.offset for request in chunk]:
            self.closes_after = -1
            self.is_open.clear()


async def test_request_is_sent_once_though_its_share_is_forgotten_meanwhile(
    models: Models,
) -> None:
    """It was answered while another one, whose model is known only now, was charged again."""
    tracker = InFlightTracker(Budget(1_000_000_000), lambda: None)
    feed, items = Feed(tracker.assign(REQUESTS, AckedOffsets(0))), AnsweringTray()
    feed.deferral = Deferral(BudgetShares(tracker.budget, 0.5, 0.5, max_idle_shares=1))
    unnamed = encode_request(JSON, "digits", {"pixels": np.zeros((500, 64), np.float32)})
    as_json = {"content-type": JSON.encode()}
    async with running(models, feed, items=items) as ingest:
        feed.put((unnamed, as_json), payload(model="other"))
        await eventually(lambda: len(ingest.sent) == 2, what="the times of both are known")
        feed.put(payload(b"steps"))
        await eventually(BEGUN.is_set)
        BEGUN.clear()
        items.is_open.clear()
        feed.put((unnamed, as_json), payload(model="other"), payload(b"steps"))
        await eventually(lambda: counted(ingest.instruments, "transforms_waiting") == 4)
        STEPS.release()
        await eventually(BEGUN.is_set, what="those before the last are made")
        items.closes_after = 4
        items.is_open.set()
        await eventually(lambda: 4 in ingest.sent and not items.is_open.is_set())
        tenants = [{"x-tenant": b"%d" % number} for number in range(10)]
        feed.put(*[(digits_value(), each) for each in tenants])
        await eventually(lambda: feed.assignment.in_flight == 12, what="the others are read")
        items.is_open.set()
        await eventually(lambda: {*ingest.sent} >= {*range(5), 6}, what="they are sent")
        STEPS.release()

    assert sorted(ingest.sent) == [*range(16)]
    assert tracker.budget.used_bytes == 0


async def test_worker_marks_payloads_before_it_takes_them(models: Models) -> None:
    """After an unclean end, a payload that crashes the process is found like a run that does."""
    feed = Feed()
    marked: list[list[int]] = []

    async def keep() -> None:
        marked.append(feed.gate.running(REQUESTS))
        assert not BEGUN.is_set()

    feed.gate = RunGate(keep)
    feed.gate.is_marking = True
    async with running(models, feed) as ingest:
        feed.put(payload(b"waits"))
        await eventually(BEGUN.is_set)
        assert feed.gate.running(REQUESTS) == [0]
        GATE.set()
        await eventually(lambda: ingest.sent == [0], what="it is sent")
        await eventually(lambda: not feed.gate.running(REQUESTS), what="it has left the gate")

    assert marked == [[0]]
