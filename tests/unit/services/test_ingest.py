"""Ingest: what can run goes on, everything else goes to its answer, and each record is owed."""

from __future__ import annotations

import asyncio
import time
import weakref
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import LimitSettings
from headrace.consumer.ready_queue import PolledRecords
from headrace.crash_isolation.isolation import Isolated, Isolation
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import (
    HEADER_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    key_and_header_bytes,
)
from headrace.delivery.ordering import KeyChains
from headrace.errors import Code
from headrace.log.port import Record
from headrace.models.registry import Models
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.services.ingest.decode import Admission, IngestRules
from headrace.services.ingest.service import IngestService
from headrace.tuning import TUNING, IngestTuning
from tests.support.services import (
    RecordSource,
    StillClock,
    delivery,
    digits_models,
    digits_value,
    make_assignment,
    make_instruments,
)
from tests.support.work import NOW_US, Tray


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """With `digits`, ready."""
    return digits_models(tmp_path)


async def ingest(
    models: Models,
    *deliveries: PolledRecords,
    admission: Admission | None = None,
    tuning: IngestTuning = TUNING.ingest,
) -> tuple[list[Request], list[Request]]:
    """Those that can run, and those that have ended."""
    items, answers = Tray(), Tray()
    source = RecordSource(*deliveries)
    instruments = make_instruments(StillClock(NOW_US))
    await IngestService(
        source,  # type: ignore[arg-type]  # what is used of it
        items,
        answers,
        IngestRules(models.catalog, LimitSettings(), admission),
        instruments,
        replace(TUNING, ingest=tuning),
    ).run()
    assert items.closed
    assert answers.closed
    return items.requests, answers.requests


async def test_good_request_is_passed_on(models: Models) -> None:
    """With its origin, its inputs and its model's version."""
    able, ended = await ingest(models, delivery(digits_value(rows=3, id="mine"), first=7))

    assert ended == []
    (request,) = able
    assert (request.partition, request.offset, request.previous) == (0, 7, -1)
    assert (request.model, request.version, request.id) == ("digits", "1", "mine")
    assert (request.rows, request.size_bytes, request.ingested_us) == (3, 3 * 256, NOW_US)


async def test_bad_request_among_good_ones_fails_alone(models: Models) -> None:
    """The request is refused with its code and its value kept; its neighbours are passed on."""
    values = [digits_value(), b"junk", None, digits_value("unknown"), digits_value()]
    able, ended = await ingest(models, delivery(*values))

    assert [request.offset for request in able] == [0, 4]
    assert [request.failure.code for request in ended if request.failure] == [
        Code.INVALID_REQUEST,
        Code.INVALID_REQUEST,
        Code.UNKNOWN_MODEL,
    ]
    assert [request.value for request in ended] == values[1:4]


@pytest.mark.parametrize("value", [b'{"amount": 39.9}', b'[{"amount": 39.9}]', b'{"inputs": 1}'])
async def test_payload_in_json_for_absent_model_is_refused_for_the_model(
    models: Models, value: bytes
) -> None:
    """Only a model that is there says whether JSON is a payload: the value may be right."""
    headers = [("content-type", b"application/json"), ("x-model", b"fraud")]
    _, ended = await ingest(models, delivery(value, headers=headers))

    assert ended[0].failure is not None
    assert ended[0].failure.code == Code.UNKNOWN_MODEL


async def test_late_request_is_not_charged_for_its_value(models: Models) -> None:
    """A request late by its headers is answered, and its value is dropped unread."""
    assignment = make_assignment()
    late = delivery(
        b"x" * 100_000,
        assignment=assignment,
        headers=(headers := [("x-deadline-ms", str(NOW_US // 1000).encode())]),
    )
    able, ended = await ingest(models, late)

    assert able == []
    assert ended[0].failure is not None
    assert ended[0].failure.code == Code.DEADLINE_EXCEEDED
    assert ended[0].value is None
    beside = key_and_header_bytes(b"key", headers)
    assert assignment.budget.used_bytes == RECORD_OVERHEAD_BYTES + beside


async def test_request_is_charged_for_all_bytes_it_holds(models: Models) -> None:
    """Key and headers count: a small value may come with a large header."""
    assignment = make_assignment()
    value = digits_value()
    await ingest(models, delivery(value, assignment=assignment, headers=[("long", b"x" * 50_000)]))

    header_bytes = HEADER_OVERHEAD_BYTES + len("long") + 50_000
    expected = RECORD_OVERHEAD_BYTES + len(value) + len(b"key") + header_bytes
    assert assignment.budget.used_bytes == expected


async def test_ingest_skips_answered_records_above_base(models: Models) -> None:
    """A successor runs only what is left; the next record's origin knows of what was skipped."""
    assignment = make_assignment(AckedOffsets(0, [(1, 3)]))
    able, _ = await ingest(models, delivery(*[digits_value()] * 4, assignment=assignment))

    assert [(request.previous, request.offset) for request in able] == [(-1, 0), (2, 3)]
    assert assignment.in_flight == 2


async def test_missing_versions_are_not_cached(models: Models) -> None:
    """A caller's made-up version would become a label of its own in every metric."""
    _, ended = await ingest(
        models, delivery(digits_value(), headers=[("x-model", b"digits/123456789")])
    )

    assert ended[0].failure is not None
    assert ended[0].version == ""


async def test_slow_records_do_not_block_event_loop(models: Models) -> None:
    """Between records that take long, others run: a delivery may hold hundreds."""
    tuning = replace(TUNING.ingest, hold_loop_s=0.0)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    able, _ = await ingest(models, delivery(*[digits_value()] * 50), tuning=tuning)
    counting.cancel()

    assert len(able) == 50
    assert turns >= 50


class Chunk(list[Record]):
    """Records whose end in memory can be seen."""


class ForgettingSource(RecordSource):
    """A source of one chunk, which it does not keep.

    Attributes:
        is_chunk_alive: whether the chunk was in memory when the next one was awaited.
    """

    is_chunk_alive = False

    def __init__(self) -> None:
        super().__init__()
        self._chunk: weakref.ref[Chunk] | None = None

    async def receive(self) -> PolledRecords | None:
        if self._chunk is None:
            polled = delivery(digits_value())
            chunk = Chunk(polled.records)
            self._chunk = weakref.ref(chunk)
            return polled._replace(records=chunk)
        self.is_chunk_alive = self._chunk() is not None
        return None


async def test_waiting_ingest_does_not_keep_last_chunk(models: Models) -> None:
    """An answered value is charged to no budget, and may be as large as a record can be."""
    source = ForgettingSource()

    await IngestService(
        source,  # type: ignore[arg-type]  # what is used of it
        Tray(),
        Tray(),
        IngestRules(models.catalog, LimitSettings()),
        make_instruments(StillClock(NOW_US)),
    ).run()

    assert not source.is_chunk_alive


async def test_ingest_stops_reading_revoked_partition(models: Models) -> None:
    """Records of an assignment that is over are another process's."""
    assignment = make_assignment()
    assignment.revoked = True

    assert await ingest(models, delivery(digits_value(), assignment=assignment)) == ([], [])


async def test_cancelling_record_is_passed_on_without_answer(models: Models) -> None:
    """It is passed over as if it were not there: only the requests around it are in flight."""
    assignment = make_assignment()
    cancel = [("x-cancel", b"headrace.requests/0/0")]

    able, ended = await ingest(
        models,
        delivery(digits_value(), assignment=assignment),
        delivery(None, assignment=assignment, headers=cancel, first=1),
        delivery(digits_value(), assignment=assignment, first=2),
    )

    assert ended == []
    assert [one.envelope.cancels for one in able] == [None, ("headrace.requests", 0, 0), None]
    assert assignment.in_flight == 2
    for request in able:
        request.ack_handle.ack()
    assert assignment.progress == AckedOffsets(3)


async def test_cancelling_record_has_no_model(models: Models) -> None:
    """Its headers may name a model, but it must not wait with the requests of that model."""
    headers = [("x-cancel", b"headrace.requests/0/0"), ("x-model", b"digits/1")]

    (record,), _ = await ingest(models, delivery(None, headers=headers, first=1))

    assert (record.model, record.version) == ("", "")


async def test_cancelling_record_delays_no_request_of_its_key(models: Models) -> None:
    """It has no answer that could go before; who answers elsewhere knows nothing of it."""
    assignment = make_assignment()
    assignment.chains = KeyChains(lambda _: False)
    cancel = [("x-cancel", b"headrace.requests/0/0")]

    able, _ = await ingest(
        models,
        delivery(digits_value(), assignment=assignment),
        delivery(None, assignment=assignment, headers=cancel, first=1),
        delivery(digits_value(), assignment=assignment, first=2),
    )

    assert [one.after for one in able if one.envelope.cancels is None] == [-1, 0]


async def test_parked_suspect_keeps_its_place_in_order_of_its_key(models: Models) -> None:
    """It follows the request read before it, and the next one follows it, also if all three are
    read at once.
    """
    assignment = make_assignment()
    assignment.chains = KeyChains(lambda _: False)
    parked: list[Isolated] = []
    isolation = Isolation(frozenset(), frozenset({1}), parked.append)
    read = delivery(*[digits_value()] * 3, assignment=assignment)

    able, _ = await ingest(models, read._replace(isolation=isolation))

    (suspect,) = parked
    assert {suspect.record.offset: suspect.after} | {one.offset: one.after for one in able} == {
        0: -1,
        1: 0,
        2: 1,
    }


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"mine", "expected topic/partition/offset, as in x-request, got 'mine'"),
        (b"headrace.requests/0/-1", "expected topic/partition/offset"),
        (b"headrace.requests/1/0", "expected a request before this record in headrace.requests/0"),
        (b"headrace.requests/0/9", "got headrace.requests/0/9"),
        (b"", "or a kafka_correlationId beside it"),
    ],
)
async def test_cancelling_record_without_target_is_refused(
    models: Models, value: bytes, told: str
) -> None:
    """It is answered like an invalid request, so that its sender learns of the mistake."""
    able, (ended,) = await ingest(models, delivery(None, headers=[("x-cancel", value)], first=9))

    assert able == []
    assert ended.failure is not None
    assert ended.failure.code == Code.INVALID_REQUEST
    assert told in ended.failure.message


async def test_request_predicted_late_is_refused_by_headers(models: Models) -> None:
    """The batcher beside is asked before the value is read or charged."""
    asked: list[str] = []

    def full(envelope: Envelope) -> Failure:
        asked.append(envelope.model)
        return Failure(Code.OVERLOADED, "full", "ingest", 7)

    deadline = ("x-deadline-ms", b"%d" % (NOW_US // 1000 + 50))
    assignment = make_assignment()
    named = [deadline, ("x-model", b"digits")]
    able, ended = await ingest(
        models,
        delivery(b"no request", assignment=assignment, headers=named),
        delivery(digits_value(), assignment=assignment, headers=[deadline], first=1),
        delivery(digits_value(), assignment=assignment, headers=named[1:], first=2),
        admission=full,
    )

    assert [one.failure and one.failure.code for one in ended] == [Code.OVERLOADED]
    assert ended[0].value is None
    assert len(able) == 2
    assert asked == ["digits"]


async def test_ingest_far_ahead_pauses_between_chunks(models: Models) -> None:
    """With many requests of the partition in flight, a pause follows in proportion to a chunk."""
    assignment = make_assignment()
    values = [digits_value()] * 500
    ahead = delivery(*values, assignment=assignment)
    assignment.in_flight = TUNING.ingest.far_ahead_requests
    began_s = time.monotonic()
    able, _ = await ingest(models, ahead)

    assert len(able) == 500
    assert time.monotonic() - began_s >= 500 * TUNING.ingest.far_ahead_pause_s


async def test_ingest_behind_many_ended_requests_does_not_pause(models: Models) -> None:
    """They wait for their transaction, and the next stages have nothing to do meanwhile."""
    assignment = make_assignment()
    ahead = delivery(digits_value(), assignment=assignment)
    assignment.in_flight = assignment.answering = TUNING.ingest.far_ahead_requests
    endless = replace(TUNING.ingest, far_ahead_pause_s=3600.0)
    async with asyncio.timeout(30.0):
        able, _ = await ingest(models, ahead, tuning=endless)

    assert len(able) == 1
