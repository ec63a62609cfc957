"""The header `accept`: what it chooses, and what answers are then made of."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest

from headrace.errors import Code, Rejected
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import encode_error, encode_response, encode_responses
from headrace.protocol.headers import (
    answer_headers,
    parse_envelope,
    tensor_types,
    tensors_content_type,
)
from headrace.protocol.messages import (
    RECORD_ANSWER,
    Envelope,
    Failure,
    Request,
    is_whole_answer,
    whole_answer,
)
from headrace.protocol.negotiation import choose_content_type, read_accept, require_content_type
from headrace.protocol.tensors import from_array

OFFERS = ("image/png", "application/json", "application/msgpack")
MSGPACK, JSON = "application/msgpack", "application/json"


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", "image/png"),
        ("*/*", "image/png"),
        ("application/json", "application/json"),
        ("Application/JSON; charset=utf-8", "application/json"),
        ("application/*", "application/json"),
        ("application/*, application/json;q=0", "application/msgpack"),
        ("image/*;q=0.5, application/msgpack", "application/msgpack"),
        ("image/*;q=0.5, */*;q=0.4", "image/png"),
        ("image/png;q=0, */*;q=0.1", "application/json"),
        ("text/html, application/xml;q=0.9, */*;q=0.8", "image/png"),
        ("image/jpeg", ""),
        ("image/png;q=0", ""),
        ("*/*;q=0", ""),
        ("application/json;q=0.000", ""),
        ("json", ""),
    ],
)
def test_content_type_of_highest_quality_is_chosen(accepted: str, chosen: str) -> None:
    """The most specific range of the header counts, and the first offer among equals."""
    assert choose_content_type(read_accept(accepted), OFFERS) == chosen


@pytest.mark.parametrize("text", ["", "*/*", " */* ;q=0.3", " , "])
def test_header_that_accepts_all_alike_is_as_if_absent(text: str) -> None:
    """Requests with such a header take the same path as those without."""
    assert read_accept(text) == ""


def test_refusal_names_offers_and_begin_of_header() -> None:
    """A header may have 512 bytes."""
    with pytest.raises(Rejected) as raised:
        require_content_type("image/gif, " * 20, ("application/json", "application/json"))

    assert raised.value.code == Code.INVALID_REQUEST
    expected = "header accept: expected at least one of application/json, got image/gif, image/gif"
    assert raised.value.message.startswith(expected)
    assert raised.value.message.endswith("...")
    assert len(raised.value.message) < 160


def test_accept_is_read_and_not_copied_to_answer() -> None:
    """It concerns the request alone."""
    headers = [("accept", b"Application/JSON;q=0.5"), ("x-own", b"1")]
    envelope = parse_envelope(headers, 0, 0)
    request = answered(envelope, headers)

    assert envelope == Envelope(accept="application/json;q=0.5")
    assert parse_envelope([("accept", b"*/*")], 0, 0) == Envelope()
    names = [name for name, _ in answer_headers(request, "ok", "requests")]
    assert "accept" not in names
    assert "x-own" in names


def answered(envelope: Envelope, headers: list[tuple[str, bytes]] | None = None) -> Request:
    """A request that has run."""
    request = Request(NULL_ACK, 0, 1, 0, 0, None, b"", headers or [], envelope)
    request.model, request.version = "m", "1"
    request.outputs = (from_array("y", np.array([[1.5]], np.float32)),)
    return request


@pytest.mark.parametrize(
    ("own", "accept", "expected"),
    [
        ("", "", MSGPACK),
        ("", JSON, JSON),
        ("", "application/x-msgpack", "application/x-msgpack"),
        ("application/x-msgpack", "application/*", "application/x-msgpack"),
        (JSON, MSGPACK, MSGPACK),
        (JSON, f"{MSGPACK};q=0.5, {JSON};q=0.4", MSGPACK),
        ("image/png", MSGPACK, MSGPACK),
        ("image/png", "image/png", JSON),
    ],
)
def test_tensors_are_encoded_as_accepted(own: str, accept: str, expected: str) -> None:
    """Value and header agree, in an answer alone and in one of several."""
    envelope = Envelope(content_type=own, accept=accept)
    request, other = answered(envelope), answered(Envelope())
    value = encode_response(request, 0)
    failed = answered(envelope)
    failed.fail(Failure(Code.MODEL_FAILED, "no", "executor"))
    read = json.loads if expected == JSON else msgpack.unpackb

    assert tensors_content_type(envelope) == expected
    assert dict(answer_headers(request, "ok", "t"))["content-type"] == expected.encode()
    assert read(value)["outputs"][0]["name"] == "y"
    assert encode_responses([other, request, other], 0)[1] == value
    error_type = dict(answer_headers(failed, "MODEL_FAILED", "t"))["content-type"]
    assert error_type == expected.encode()
    assert read(encode_error(failed, Failure(Code.MODEL_FAILED, "no", "executor")))["error"] == "no"


def test_error_of_json_without_content_type_is_in_json_unless_caller_accepts_another() -> None:
    """The value begins with a brace, and its caller may read nothing else."""
    request = answered(Envelope(accept="image/png"))
    request.value = b"{}"
    request.fail(Failure(Code.INVALID_REQUEST, "no", "ingest"))
    accepting = answered(Envelope(accept=MSGPACK))
    accepting.value = b"{}"
    accepting.fail(Failure(Code.INVALID_REQUEST, "no", "ingest"))

    headers = [dict(answer_headers(each, "no", "t")) for each in (request, accepting)]
    assert [each["content-type"].decode() for each in headers] == [JSON, MSGPACK]


def test_every_encoding_of_tensors_is_offered_once() -> None:
    """The usual one first."""
    for own in ("", MSGPACK, "application/vnd.msgpack", JSON, "image/png"):
        types = tensor_types(own)
        assert sorted(types) == sorted(set(tensor_types("")))
        assert types[0] == tensors_content_type(Envelope(content_type=own))


def test_metadata_says_whether_answer_is_whole() -> None:
    """No output of a model has such a name."""
    assert is_whole_answer(RECORD_ANSWER)
    assert is_whole_answer(whole_answer("image/jpeg"))
    assert not is_whole_answer((("y", "BYTES", (1,)),))
    assert not is_whole_answer(())
