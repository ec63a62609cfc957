"""Compressed values in ingest: small ones at once, others by a worker, each within its bounds."""

from __future__ import annotations

from pathlib import Path

import brotli
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.config import LimitSettings
from headrace.consumer.ready_queue import PolledRecords
from headrace.crash_isolation.isolation import Isolated, Isolation
from headrace.delivery.inflight import RECORD_OVERHEAD_BYTES, key_and_header_bytes
from headrace.errors import Code
from headrace.log.port import Record
from headrace.models.registry import Models
from headrace.protocol.compression import CODINGS, compress
from headrace.protocol.messages import Request
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.decompression import InlineDecompressor
from headrace.services.ingest.service import IngestService
from headrace.tuning import TUNING, IngestTuning
from tests.support.services import (
    REQUESTS,
    RecordSource,
    StillClock,
    digits_models,
    digits_value,
    make_assignment,
    make_instruments,
)
from tests.support.work import NOW_US, Tray

LIMITS = LimitSettings(max_request_bytes=65_536)
BY_WORKER = replace(TUNING.ingest, inline_decompressed_bytes=1)
TRANSFORM = """
import numpy as np

def transform(payload, content_type):
    return {"pixels": np.full((1, 64), len(payload), np.float32)}
"""


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """With `digits`, ready."""
    return digits_models(tmp_path)


def polled(*values: tuple[bytes | None, str]) -> PolledRecords:
    """Records of these values and their codings, one after the other."""
    records = [
        Record(*REQUESTS, offset, NOW_US // 1000, None, value, _headers(coding))
        for offset, (value, coding) in enumerate(values)
    ]
    return PolledRecords(make_assignment(), records)


def _headers(coding: str) -> list[tuple[str, bytes | None]]:
    return [("content-encoding", coding.encode())] if coding else []


def isolate(read: PolledRecords) -> Isolation:
    """Park the one record, so that it is read as one that runs alone."""
    parked: list[Isolated] = []
    isolation = Isolation(frozenset(), frozenset({0}), parked.append, runs=True)
    isolation.park_record(read.assignment, read.records[0])
    return isolation._replace(isolated=parked[0])


async def ingest(
    models: Models, delivery: PolledRecords, tuning: IngestTuning = TUNING.ingest
) -> tuple[list[Request], list[Request]]:
    """Those that can run, and those that have ended."""
    items, answers = Tray(), Tray()
    service = IngestService(
        RecordSource(delivery),  # type: ignore[arg-type]  # what is used of it
        items,
        answers,
        IngestRules(models.catalog, LIMITS),
        make_instruments(StillClock(NOW_US)),
        replace(TUNING, ingest=tuning),
    )
    await service.run()
    return items.requests, answers.requests


@pytest.mark.parametrize("tuning", [TUNING.ingest, BY_WORKER], ids=["inline", "worker"])
@pytest.mark.parametrize("coding", CODINGS)
async def test_compressed_request_has_inputs_of_plain_one(
    models: Models, coding: str, tuning: IngestTuning
) -> None:
    """Wherever it is decompressed, and its value stays as it came, for a dead letter."""
    value = digits_value(rows=3, id="mine")
    (request,), ended = await ingest(
        models, polled((compressed := compress(value, coding), coding)), tuning
    )

    assert ended == []
    assert (request.id, request.rows, request.value) == ("mine", 3, compressed)
    assert np.array_equal(np.frombuffer(request.inputs[0].data, np.float32), np.ones(3 * 64))


@pytest.mark.parametrize("tuning", [TUNING.ingest, BY_WORKER], ids=["inline", "worker"])
@pytest.mark.parametrize("coding", CODINGS)
async def test_bomb_among_requests_fails_alone(
    models: Models, coding: str, tuning: IngestTuning
) -> None:
    """Its neighbours are passed on, compressed or not."""
    value = digits_value()
    bomb = compress(value + bytes(4 << 20), coding)
    able, ended = await ingest(
        models,
        polled((value, ""), (bomb, coding), (compress(value, coding), coding), (value, "")),
        tuning,
    )

    assert sorted(request.offset for request in able) == [0, 2, 3]
    assert [(one.offset, one.failure and one.failure.code) for one in ended] == [
        (1, Code.TOO_LARGE)
    ]
    assert ended[0].value == bomb


@pytest.mark.parametrize("tuning", [TUNING.ingest, BY_WORKER], ids=["inline", "worker"])
@pytest.mark.parametrize("coding", CODINGS)
async def test_truncated_value_is_invalid(
    models: Models, coding: str, tuning: IngestTuning
) -> None:
    """The error says that the value is at fault."""
    value = compress(digits_value(), coding)[:-1]
    able, (ended,) = await ingest(models, polled((value, coding)), tuning)

    assert able == []
    assert ended.failure is not None
    assert ended.failure.code == Code.INVALID_REQUEST
    assert ended.failure.message.startswith("value: expected ")


async def test_refused_request_keeps_the_id_of_its_compressed_value(models: Models) -> None:
    """The caller finds its answer by it."""
    value = compress(digits_value("unknown", id="mine"), "gzip")
    _, (ended,) = await ingest(models, polled((value, "gzip")))

    assert ended.failure is not None
    assert (ended.failure.code, ended.id) == (Code.UNKNOWN_MODEL, "mine")


async def test_request_is_charged_for_what_was_decompressed(models: Models) -> None:
    """Its inputs are views of that, besides the value."""
    value = digits_value(rows=100)
    compressed = compress(value, "zstd")
    delivery = polled((compressed, "zstd"))
    await ingest(models, delivery)

    beside = key_and_header_bytes(None, _headers("zstd"))
    expected = RECORD_OVERHEAD_BYTES + beside + len(compressed) + len(value)
    assert delivery.assignment.budget.used_bytes == expected


async def test_failed_request_is_not_charged_for_what_was_decompressed(models: Models) -> None:
    """It is not kept."""
    compressed = compress(digits_value("unknown", rows=100), "zstd")
    delivery = polled((compressed, "zstd"))
    await ingest(models, delivery)

    beside = key_and_header_bytes(None, _headers("zstd"))
    expected = RECORD_OVERHEAD_BYTES + beside + len(compressed)
    assert delivery.assignment.budget.used_bytes == expected


def test_br_of_several_blocks_is_left_to_worker() -> None:
    """A few bytes of it may fill a window of 16 MiB, which would hold the event loop."""
    stream = brotli.Compressor()
    several = stream.process(b"{}") + stream.flush() + stream.process(bytes(9)) + stream.finish()
    decompressor = InlineDecompressor(LIMITS)

    assert decompressor.decompress(several, "br") is None
    assert decompressor.decompress(compress(bytes(9), "br"), "br") == bytes(9)


async def test_many_compressed_requests_exceed_one_reading(models: Models) -> None:
    """Later reads decompress the values that exceed the limit of one: all are passed on."""
    value = digits_value(rows=20)
    tuning = replace(TUNING.ingest, inline_decompressed_bytes=3 * len(value))
    able, ended = await ingest(models, polled(*[(compress(value, "gzip"), "gzip")] * 100), tuning)

    assert ended == []
    assert sorted(request.offset for request in able) == list(range(100))


@pytest.mark.parametrize("alone", [False, True], ids=["beside-others", "alone"])
@pytest.mark.parametrize("tuning", [TUNING.ingest, BY_WORKER], ids=["inline", "worker"])
async def test_compressed_payload_reaches_transform_decompressed(
    tmp_path: Path, tuning: IngestTuning, *, alone: bool
) -> None:
    """The transform knows nothing of codings, also where the request runs alone after a crash."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "transform.py").write_text(TRANSFORM)
    models = digits_models(tmp_path, 'transform = "python"\n')
    headers = [("content-type", b"text/plain"), ("x-model", b"digits"), *_headers("gzip")]
    value = compress(b"x" * 1000, "gzip")
    record = Record(*REQUESTS, 0, NOW_US // 1000, None, value, headers)
    read = PolledRecords(make_assignment(), [record])
    if alone:
        read = read._replace(isolation=isolate(read))
    (request,), _ = await ingest(models, read, tuning)

    assert np.frombuffer(request.inputs[0].data, np.float32)[0] == 1000
