"""Reading many records at once gives what reading them one by one gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import LimitSettings
from headrace.delivery.inflight import AssignedPartition, InFlightAck
from headrace.errors import Code, Rejected
from headrace.log.port import Record
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Failure, Request
from headrace.services.ingest.decode import IngestRules, decode_record, decode_records
from tests.support.services import REQUESTS, digits_models, digits_value, make_assignment
from tests.support.work import NOW_US

DEADLINE = ("x-deadline-ms", str(NOW_US // 1000 + 1_000).encode())
LATE = ("x-deadline-ms", str(NOW_US // 1000).encode())
CORRELATION = ("kafka_correlationId", b"mine")
UNLIKE: list[tuple[bytes | None, list[tuple[str, bytes | None]]]] = [
    (digits_value(), []),
    (digits_value(), [DEADLINE, CORRELATION, ("x-priority", b"3"), ("x-user", None)]),
    (digits_value(), [LATE]),
    (digits_value(), [("x-priority", b"much")]),
    (digits_value(), [("x-model", b"digits/1")]),
    (digits_value(), [("content-type", b"application/json")]),
    (digits_value(), [("x-cancel", b"headrace.requests/0/0")]),
    (digits_value(), [("x-cancel", b"")]),
    (digits_value(), [("accept", b"application/json")]),
    (digits_value(), [("accept", b"image/png")]),
    (digits_value(rows=3), []),
    (digits_value(id="mine"), []),
    (digits_value(version="1"), []),
    (digits_value("digitz"), []),
    (digits_value()[:-1], []),
    (b"junk", []),
    (None, []),
]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """With `digits`, ready."""
    return digits_models(tmp_path)


def records(turns: int) -> list[Record]:
    """Each of them so many times, half of them without a key."""
    return [
        Record(*REQUESTS, offset, NOW_US // 1000, b"key" if offset % 2 else None, *each)
        for offset, each in enumerate(UNLIKE * turns)
    ]


def records_of_one_layout() -> list[Record]:
    """Return three records that follow each other and differ in nothing else."""
    (first,) = records(1)[:1]
    return [first._replace(offset=offset) for offset in range(3)]


def told(request: Request) -> dict[str, Any]:
    """All that a request says, its ack handle as well."""
    said = {name: getattr(request, name) for name in request.__struct_fields__}
    ack_handle = said.pop("ack_handle")
    if isinstance(ack_handle, InFlightAck):
        said["owed"] = (
            ack_handle.previous,
            ack_handle.offset,
            ack_handle.size_bytes,
            ack_handle.parts,
        )
    return said


def tracker(assignment: AssignedPartition) -> tuple[object, ...]:
    """Return the figures of an assignment that decoding changes."""
    budget = assignment.budget
    return (
        assignment.in_flight,
        assignment.last_delivered,
        budget.used_bytes,
        repr(assignment.progress),
    )


def test_requests_decoded_together_equal_requests_decoded_alone(models: Models) -> None:
    """Whether their layout is known by then or not, with all kinds of headers among them."""
    rules = IngestRules(models.catalog, LimitSettings())
    together, alone = make_assignment(), make_assignment()
    some = records(3)

    read = decode_records(some, together, rules, NOW_US)
    expected = [decode_record(each, alone, rules, NOW_US) for each in some]

    assert [told(each) for each in read] == [told(each) for each in expected]
    assert tracker(together) == tracker(alone)


def test_requests_decoded_together_have_default_timeout(models: Models) -> None:
    """A record without headers has a deadline as well."""
    rules = IngestRules(models.catalog, LimitSettings(default_timeout_ms=500))
    read = decode_records(records(2), make_assignment(), rules, NOW_US)

    assert read[len(UNLIKE)].envelope.deadline_ms == NOW_US // 1000 + 500


def test_large_value_of_known_layout_is_left_in_its_record(models: Models) -> None:
    """No step of a process without a batcher looks at its tensors."""
    some = records_of_one_layout()
    size_bytes = len(some[0].value or b"")
    rules = IngestRules(models.catalog, LimitSettings(inline_payload_bytes=size_bytes))
    decode_records(some, make_assignment(), rules, NOW_US)  # learns the layout

    read = decode_records(some, make_assignment(), rules, NOW_US)

    assert [bytes(each.inputs[0].data) for each in read] == [b""] * 3
    assert [(each.value, each.referenced) for each in read] == [
        (each.value, size_bytes) for each in some
    ]


def test_large_value_keeps_its_tensors_for_batcher_in_the_process(models: Models) -> None:
    """There is no record between the two that could refer to the source."""
    some = records_of_one_layout()
    rules = IngestRules(
        models.catalog, LimitSettings(inline_payload_bytes=0), admission=lambda _: None
    )
    decode_records(some, make_assignment(), rules, NOW_US)

    read = decode_records(some, make_assignment(), rules, NOW_US)

    assert [each.referenced for each in read] == [0] * 3
    assert all(each.inputs[0].data for each in read)


def test_failed_request_keeps_value_that_was_not_written_yet(models: Models) -> None:
    """Its dead letter needs it, and its record is not read again."""
    some = records_of_one_layout()
    rules = IngestRules(models.catalog, LimitSettings(inline_payload_bytes=1))
    decode_records(some, make_assignment(), rules, NOW_US)
    request = decode_records(some, make_assignment(), rules, NOW_US)[0]

    request.fail(Failure(Code.INTERNAL, "no", "ingest"))

    assert (request.value, request.referenced) == (some[0].value, 0)


def test_oversized_value_of_known_layout_is_refused(models: Models) -> None:
    """The limit of another process, or of another time, may be lower."""
    value = digits_value(rows=7)
    some = [Record(*REQUESTS, each, NOW_US // 1000, None, value, []) for each in range(3)]
    rules = IngestRules(models.catalog, LimitSettings())
    decode_records(some, make_assignment(), rules, NOW_US)
    low = replace(rules, limits=LimitSettings(max_request_bytes=1024))

    read = decode_records(some, make_assignment(), low, NOW_US)

    assert [each.failure and each.failure.code for each in read] == [Code.TOO_LARGE] * 3


class Gone:
    """Models of which none is there any more."""

    def lookup(self, name: str, version: str | None) -> ModelVersion:
        raise Rejected(Code.UNKNOWN_MODEL, f"no {name}/{version}")


def test_value_of_known_layout_is_refused_after_model_is_removed(models: Models) -> None:
    """Each by the reason that holds now."""
    some = records_of_one_layout()
    rules = IngestRules(models.catalog, LimitSettings())
    decode_records(some, make_assignment(), rules, NOW_US)

    read = decode_records(some, make_assignment(), replace(rules, models=Gone()), NOW_US)

    assert [each.failure and each.failure.code for each in read] == [Code.UNKNOWN_MODEL] * 3


def test_reloaded_version_does_not_use_old_layouts(models: Models, tmp_path: Path) -> None:
    """A layout learned with one set of files does not hold for another."""
    some = records_of_one_layout()
    rules = IngestRules(models.catalog, LimitSettings())
    decode_records(some, make_assignment(), rules, NOW_US)
    (tmp_path / "other").mkdir()
    other = digits_models(tmp_path / "other", "max_batch_size = 2\n[range]\npixels = [5, 6]\n")

    read = decode_records(some, make_assignment(), replace(rules, models=other.catalog), NOW_US)

    assert [each.failure and each.failure.code for each in read] == [Code.INVALID_TENSOR] * 3
