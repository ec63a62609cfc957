"""Values that are read from their source records: together, again after a fault, or no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.claims.fetcher import ClaimFetcher
from headrace.config import ClaimSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.failures import REVOKED
from headrace.delivery.inflight import InFlightTracker, record_bytes
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record, TopicInfo, TopicPartition, Wanted
from headrace.protocol.codec import refer_to_source
from headrace.protocol.messages import Envelope, Request, Tensor
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.source_values import SourceValues
from headrace.tuning import TUNING, TransportTuning
from tests.support.claim_store import StandInStore
from tests.support.conditions import eventually
from tests.support.logs import write
from tests.support.work import TestReceipt, Tray, make_request, receipt_of, requests_alive

TOPIC = "requests"
SOURCE = TopicPartition(TOPIC, 0)
NOW_MS = 1_700_000_000_000
QUICK = replace(TUNING.transport, source_retry_first_s=0.001, source_retry_max_s=0.001)


class CountingLog(MemoryLog):
    """An embedded log that notes what is fetched, and fails as often as it is told. With `answers`,
    each fetch waits for one of them.
    """

    def __init__(self) -> None:
        super().__init__(auto_create_partitions=2)
        self.fetched: list[tuple[int, int, int]] = []
        self.failures = 0
        self.most_bytes = 0
        self.answers: asyncio.Semaphore | None = None

    async def fetch(
        self,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        wanted: Wanted | None = None,
    ) -> Sequence[Record]:
        self.fetched.append((partition.partition, first, last))
        if self.answers is not None:
            await self.answers.acquire()
        if self.failures:
            self.failures -= 1
            raise LogUnavailable("no answer")
        records = await super().fetch(partition, first, last, max_bytes, wanted)
        self.most_bytes = max(self.most_bytes, sum(len(each.value or b"") for each in records))
        return records


def value_of(number: int) -> bytes:
    """The value of a source record, with two bytes of a tensor at its end."""
    return b"value %3d" % number + bytes([number, 7])


async def write_source(log: MemoryLog, count: int, partition: int = 0) -> None:
    """Write source records, numbered from 0."""
    async with log.producer() as producer:
        for number in range(count):
            record = NewRecord(b"key", value_of(number), timestamp_ms=NOW_MS)
            await write(producer, TopicPartition(TOPIC, partition), record)


def referring(number: int, partition: int = 0) -> Request:
    """The request of a source record, as it arrives by reference."""
    value = value_of(number)
    origin = (partition, number, number - 1, NOW_MS)
    request = Request(TestReceipt(), *origin, b"key", value, [], Envelope())
    request.inputs = (Tensor("x", "UINT8", (1, 2), memoryview(value)[9:]),)
    refer_to_source(request, 1)
    return request


def values_from(log: MemoryLog, tuning: TransportTuning = QUICK) -> SourceValues:
    """Values of all requests of an executor."""
    metrics = Metrics(CollectorRegistry())
    return SourceValues(log, TOPIC, lambda _: True, Stage.EXECUTOR, lambda _: None, metrics, tuning)


def seen(requests: Sequence[Request]) -> list[tuple[bytes, bytes]]:
    """Values and tensors of requests."""
    return [(bytes(each.value or b""), bytes(each.inputs[0].data)) for each in requests]


def expected(*numbers: int) -> list[tuple[bytes, bytes]]:
    """Return the value and the tensor expected of these source records."""
    return [(value_of(number), bytes([number, 7])) for number in numbers]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "another"),
        ("version", "another"),
        ("envelope", Envelope(content_type="image/png")),
        ("inputs", (Tensor("x", "UINT8", (2, 1), memoryview(b"")),)),
        ("places", ((0, 2),)),
        ("failure", REVOKED),
    ],
)
def test_each_request_that_differs_is_asked_about(field: str, other: Any) -> None:
    """Whether a value is needed depends on all of these; equal requests have the same answer."""
    asked: list[Request] = []

    def is_needed(request: Request) -> bool:
        asked.append(request)
        return len(asked) == 2

    first, equal, differs = (referring(0) for _ in range(3))
    for request in (equal, differs):
        for name in ("model", "version", "envelope", "inputs", "places"):
            setattr(request, name, getattr(first, name))
    setattr(differs, field, other)
    metrics = Metrics(CollectorRegistry())
    values = SourceValues(CountingLog(), TOPIC, is_needed, Stage.EXECUTOR, lambda _: None, metrics)

    missing = values.missing([first, equal, differs])

    assert (asked, missing) == ([first, differs], [differs])


async def test_near_records_are_read_with_one_fetch() -> None:
    """Far ones, and those of other partitions, with one each."""
    log = CountingLog()
    await write_source(log, 40)
    await write_source(log, 3, partition=1)
    wanted = [referring(3), referring(1), referring(30), referring(2, partition=1)]

    await values_from(log).read(wanted)

    assert sorted(log.fetched) == [(0, 1, 3), (0, 30, 30), (1, 2, 2)]
    assert seen(wanted) == expected(3, 1, 30, 2)


async def test_request_that_came_twice_has_its_value_twice() -> None:
    """A stage sends again what it had sent before a rebalance."""
    log = CountingLog()
    await write_source(log, 1)
    wanted = [referring(0), referring(0)]

    await values_from(log).read(wanted)

    assert seen(wanted) == expected(0, 0)


async def test_fetch_is_bounded_in_bytes() -> None:
    """Records that are too large together are read one after the other."""
    log = CountingLog()
    await write_source(log, 3)
    wanted = [referring(number) for number in range(3)]

    await values_from(log, replace(QUICK, source_fetch_bytes=25)).read(wanted)

    assert log.fetched == [(0, 0, 1), (0, 2, 2)]
    assert seen(wanted) == expected(0, 1, 2)


async def test_values_between_those_that_are_read_together_are_bounded_in_bytes() -> None:
    """Those of another model may be a thousand times as large, and are charged to nothing here."""
    log = CountingLog()
    size = len(value_of(0))
    async with log.producer() as producer:
        for number in range(41):
            value = value_of(number) if number % 10 == 0 else b"x" * 1000
            await write(producer, SOURCE, NewRecord(b"key", value, timestamp_ms=NOW_MS))
    wanted = [referring(number) for number in range(0, 41, 10)]

    await values_from(log, replace(QUICK, source_fetch_bytes=5 * size)).read(wanted)

    assert seen(wanted) == expected(0, 10, 20, 30, 40)
    assert log.fetched == [(0, 0, 40)]
    assert log.most_bytes <= 2 * 5 * size


async def test_record_that_came_with_others_is_not_fetched_again() -> None:
    """The next batch of the model may hold the request of a record between two others."""
    log = CountingLog()
    await write_source(log, 3)
    values = values_from(log)
    await values.read([referring(0), referring(2)])

    between = [referring(1)]
    await values.read(between)

    assert log.fetched == [(0, 0, 2)]
    assert seen(between) == expected(1)


async def test_concurrent_reads_of_partition_share_what_one_of_them_fetches() -> None:
    """Batches that arrive together have requests of the same record batches of the log."""
    log = CountingLog()
    await write_source(log, 6)
    await write_source(log, 1, partition=1)
    first, second = [referring(0), referring(5)], [referring(1), referring(3)]
    other = [referring(0, partition=1)]
    values = values_from(log)

    await asyncio.gather(values.read(first), values.read(second), values.read(other))

    assert sorted(log.fetched) == [(0, 0, 5), (1, 0, 0)]
    assert seen(first + second + other) == expected(0, 5, 1, 3, 0)


async def test_reads_that_wait_for_partition_are_read_together_within_bound() -> None:
    """A fetch costs as much as dozens of small values."""
    log = CountingLog()
    await write_source(log, 8)
    batches = [[referring(number), referring(number + 1)] for number in (0, 2, 4, 6)]
    values = values_from(log, replace(QUICK, source_fetch_bytes=4 * len(value_of(0))))
    log.answers = asyncio.Semaphore(0)
    reading = [asyncio.create_task(values.read(batch)) for batch in batches]
    await eventually(lambda: bool(log.fetched))
    for _ in batches:
        log.answers.release()

    await asyncio.gather(*reading)

    assert log.fetched == [(0, 0, 1), (0, 2, 5), (0, 6, 7)]
    assert [seen(batch) for batch in batches] == [expected(n, n + 1) for n in (0, 2, 4, 6)]


async def test_read_that_waits_for_cancelled_one_has_its_values() -> None:
    """The cancelled one was about to read these as well."""
    log = CountingLog()
    await write_source(log, 3)
    log.answers = asyncio.Semaphore(0)
    values, requests = values_from(log), [referring(number) for number in range(3)]
    reading = [asyncio.create_task(values.read([request])) for request in requests]
    await eventually(lambda: len(log.fetched) == 1)
    log.answers.release()
    await eventually(lambda: len(log.fetched) == 2)
    reading[1].cancel()
    log.answers.release()

    await asyncio.gather(reading[0], reading[2])

    assert log.fetched == [(0, 0, 0), (0, 1, 2), (0, 2, 2)]
    assert seen([requests[0], requests[2]]) == expected(0, 2)


async def test_records_that_came_with_others_are_bounded() -> None:
    """Small ones count with all that they take. The one kept longest is dropped, and is read again
    if it is needed after all.
    """
    log = CountingLog()
    await write_source(log, 9)
    (record,) = await log.fetch(SOURCE, 1, 1, 1)
    values = values_from(log, replace(QUICK, source_surplus_bytes=2 * record_bytes(record)))
    log.fetched.clear()
    await values.read([referring(0), referring(4)])

    await values.read([referring(1), referring(3)])

    assert log.fetched == [(0, 0, 4), (0, 1, 1)]


async def test_kept_record_of_replaced_topic_is_read_again() -> None:
    """What was kept is of the topic that was deleted; the request is of the one made anew."""
    log = CountingLog()
    await write_source(log, 3)
    values = values_from(log)
    await values.read([referring(0), referring(2)])
    log.faults.topics.replace(TOPIC)
    later_ms = NOW_MS + 1
    async with log.producer() as producer:
        for number in range(2):
            record = NewRecord(b"key", value_of(number), timestamp_ms=later_ms)
            await write(producer, SOURCE, record)
    wanted = referring(1)
    wanted.timestamp_ms = later_ms

    await values.read([wanted])

    assert wanted.failure is None
    assert seen([wanted]) == expected(1)


async def test_unavailable_log_is_asked_again() -> None:
    """A broker comes back; no request fails meanwhile."""
    log = CountingLog()
    await write_source(log, 1)
    log.failures = 3
    wanted = [referring(0)]

    await values_from(log).read(wanted)

    assert len(log.fetched) == 4
    assert seen(wanted) == expected(0)


async def test_revoked_request_is_no_longer_read_and_not_run() -> None:
    """Its next owner reads it."""
    log = CountingLog()
    log.failures = 1_000_000
    wanted = [referring(0)]
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(values_from(log).read(wanted))
        await eventually(lambda: len(log.fetched) > 1)
        receipt_of(wanted[0]).revoked = True
    assert reading.done()
    assert (wanted[0].failure, wanted[0].inputs) == (REVOKED, ())


async def test_claim_of_revoked_request_is_no_longer_fetched() -> None:
    """A drain does not wait for the store of a revoked request."""
    tracker = InFlightTracker(Budget(1 << 20), lambda: None)
    place = TopicPartition("batches", 0)
    assignment = tracker.assign(place, AckedOffsets(0))
    async with StandInStore() as store:
        store.holds = True
        claim = store.put("/in/a", b"value")
        settings = ClaimSettings(allowed=[f"{store.url}/in"])
        async with ClaimFetcher(settings) as fetcher:
            metrics = Metrics(CollectorRegistry())
            values = SourceValues(
                CountingLog(),
                TOPIC,
                lambda _: True,
                Stage.EXECUTOR,
                lambda _: None,
                metrics,
                fetcher=fetcher,
            )
            wanted = make_request(envelope=Envelope(claim=claim))
            wanted.ack_handle, wanted.referenced = assignment.admit(0, 10), 5
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(values.read([wanted]))
                await eventually(lambda: store.reads == 1, what="the object is fetched")
                assert tracker.unfinished() == 1
                assignment.leaving = True
                values.drop_revoked()
                assert tracker.unfinished() == 0
                assert not reading.done()
                tracker.revoke(place)
                values.drop_revoked()

    assert wanted.failure == REVOKED


async def test_request_of_trimmed_record_fails() -> None:
    """The one beside it has its value."""
    log = CountingLog()
    await write_source(log, 2)
    log.faults.partitions.trim(SOURCE, 1)
    lost, kept = wanted = [referring(0), referring(1)]

    await values_from(log).read(wanted)

    assert lost.failure is not None
    assert (lost.failure.code, lost.failure.stage) == ("INTERNAL", "executor")
    assert "it is no longer in the log" in lost.failure.message
    assert seen([kept]) == expected(1)


async def test_other_record_at_offset_is_not_taken_for_request() -> None:
    """The topic was made anew, and its offsets began again."""
    log = CountingLog()
    await write_source(log, 1)
    log.faults.topics.replace(TOPIC)
    async with log.producer() as producer:
        await write(producer, SOURCE, NewRecord(b"key", value_of(5), timestamp_ms=NOW_MS + 1))
    wanted = [referring(0)]

    await values_from(log).read(wanted)

    assert wanted[0].failure is not None
    assert "another record has its offset" in wanted[0].failure.message


async def test_request_of_deleted_topic_fails() -> None:
    """Nobody will bring it back."""
    log = CountingLog()
    await log.create_topics([TopicInfo(TOPIC, 1, {})], replication_factor=1)
    wanted = [referring(0, partition=1)]

    await values_from(log).read(wanted)

    assert wanted[0].failure is not None


async def test_pump_keeps_order_of_partition_and_lets_others_pass() -> None:
    """A record that cancels a request must not overtake it; both streams end after all."""
    log = CountingLog()
    await write_source(log, 1)
    late, behind, other = referring(0), referring(0), referring(0, partition=1)
    behind.referenced = other.referenced = 0
    chunks: list[list[Request] | None] = [[late], [behind], [other], None]

    class Incoming:
        async def receive(self) -> list[Request] | None:
            return chunks.pop(0)

    stage, ended = Tray(), Tray()
    await values_from(log).pump(Incoming(), stage, ended)

    assert stage.requests == [other, late, behind]
    assert (stage.closed, ended.closed, ended.requests) == (True, True, [])


async def test_waiting_pump_does_not_keep_last_chunk() -> None:
    """A request that was answered is charged to no budget, with all of its value."""
    before = requests_alive()

    class Incoming:
        def __init__(self) -> None:
            self.left = [[make_request()]]
            self.kept = 0

        async def receive(self) -> list[Request] | None:
            if self.left:
                return self.left.pop()
            self.kept = requests_alive() - before
            return None

    class Outgoing(Tray):
        async def send(self, chunk: list[Request]) -> None:
            pass

    incoming = Incoming()
    await values_from(CountingLog()).pump(incoming, Outgoing(), Tray())

    assert incoming.kept == 0


async def test_pump_sends_failed_requests_elsewhere() -> None:
    """No model runs them."""
    log = CountingLog()
    await write_source(log, 2)
    log.faults.partitions.trim(SOURCE, 1)
    lost, kept = referring(0), referring(1)
    chunks: list[list[Request] | None] = [[lost, kept], None]

    class Incoming:
        async def receive(self) -> list[Request] | None:
            return chunks.pop(0)

    stage, ended = Tray(), Tray()
    await values_from(log).pump(Incoming(), stage, ended)

    assert (stage.requests, ended.requests) == ([kept], [lost])
