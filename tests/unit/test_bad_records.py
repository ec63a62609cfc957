"""Every bad record gets the code and the message that it must get."""

from __future__ import annotations

import pytest

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.models.inputs.binding import Binder
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.codec import decode_request, plain_value
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import InferenceRequest
from tests.support.bad_records import BAD_RECORDS, MAX_REQUEST_BYTES, BadRecord

LIMITS = LimitSettings(max_request_bytes=MAX_REQUEST_BYTES)
DIGITS = Binder(
    make_signature(
        [TensorSpec("pixels", "FP32", (-1, 64))],
        [TensorSpec("probabilities", "FP32", (-1, 10)), TensorSpec("label", "INT64", (-1,))],
    )
)


def serve(record: BadRecord) -> None:
    """Pass a record through ingest, up to the point where it would run."""
    envelope = parse_envelope(record.headers, 1_700_000_000_000, 0)
    if envelope.fault is not None:
        raise Rejected(Code.INVALID_REQUEST, envelope.fault)
    value = plain_value(record.value, envelope, MAX_REQUEST_BYTES)
    request = decode_request(value, envelope, LIMITS)
    look_up(request)
    DIGITS.bind(request.inputs, request.outputs)


def look_up(request: InferenceRequest) -> None:
    """A repository with version 1 of `digits`."""
    if request.model_name != "digits":
        raise Rejected(Code.UNKNOWN_MODEL, f"model_name: {request.model_name}")
    if request.model_version not in (None, "1"):
        raise Rejected(Code.UNKNOWN_MODEL, f"model_version: {request.model_version}")


@pytest.mark.parametrize("record", BAD_RECORDS, ids=lambda record: record.name)
def test_bad_record_is_refused_with_place_of_its_fault(record: BadRecord) -> None:
    """The code is the expected one, and the message names the place, in a few lines at most."""
    with pytest.raises(Rejected) as refused:
        serve(record)

    assert (refused.value.code, record.fragment in refused.value.message) == (record.code, True), (
        str(refused.value)
    )
    assert len(refused.value.message) <= 700


def test_bad_records_are_200_with_unique_names() -> None:
    """There are at least 200, and no two of one name."""
    names = {record.name for record in BAD_RECORDS}

    assert len(names) == len(BAD_RECORDS)
    assert len(names) >= 200
