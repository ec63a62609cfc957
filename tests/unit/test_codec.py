"""Requests in, responses and errors out: what is a view of what, and what the protocol says."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    Answer,
    callers_id,
    check_value,
    decode_request,
    decode_response,
    encode_error,
    encode_request,
    encode_response,
)
from headrace.protocol.headers import JSON, MSGPACK, answer_headers
from headrace.protocol.messages import BatchSummary, Envelope, ErrorResponse, Failure, Request
from headrace.protocol.tensors import from_array

LIMITS = LimitSettings()
IN_JSON = Envelope(content_type=JSON)


def digits(**fields: Any) -> dict[str, Any]:
    """A request as plain values."""
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 2], "data": bytes(8)}
    return {"model_name": "digits", "inputs": [tensor]} | fields


def json_data(datatype: str, data: Any, shape: list[int], **fields: Any) -> bytes:
    """Return the tensor that the data of a JSON request becomes."""
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": data} | fields
    value = json.dumps({"model_name": "m", "inputs": [tensor]}).encode()
    return bytes(decode_request(value, IN_JSON, LIMITS).inputs[0].data)


def answered(content_type: str, **outputs: Any) -> Request:
    """A request that has run."""
    request = Request(NULL_ACK, 2, 7, 6, 0, None, b"", (), Envelope(content_type=content_type))
    request.id, request.model, request.version = "r-1", "digits", "3"
    request.ingested_us = 1_000
    request.batch = BatchSummary(1_400, compute_us=250, rows=8)
    request.outputs = tuple(from_array(name, np.asarray(array)) for name, array in outputs.items())
    return request


# --- requests ---------------------------------------------------------------------------------


def test_tensor_in_messagepack_is_view_of_value() -> None:
    """Its bytes are not copied."""
    value = msgpack.packb(digits())

    data = decode_request(value, Envelope(), LIMITS).inputs[0].data

    assert isinstance(data, memoryview)
    assert data.obj is value


def test_unknown_request_fields_are_ignored() -> None:
    """A caller may be newer than we are."""
    newer = digits(priority_class={"deep": [1, [2]]})
    newer["inputs"][0]["layout"] = "NHWC"

    request = decode_request(msgpack.packb(newer), Envelope(), LIMITS)

    assert (request.model_name, len(request.inputs)) == ("digits", 1)


@pytest.mark.parametrize(
    ("fields", "envelope", "expected"),
    [
        ({}, Envelope(), ("digits", None)),
        ({"model_version": "2"}, Envelope(), ("digits", "2")),
        ({"model_version": ""}, Envelope(), ("digits", None)),
        ({"model_name": ""}, Envelope(model="digits", version="2"), ("digits", "2")),
        ({}, Envelope(model="digits", version="2"), ("digits", "2")),
        ({"model_version": "2"}, Envelope(model="digits", version="2"), ("digits", "2")),
        ({"model_version": "2"}, Envelope(model="digits"), ("digits", "2")),
    ],
)
def test_model_name_is_read_from_body_or_header(
    fields: dict[str, Any], envelope: Envelope, expected: tuple[str, str | None]
) -> None:
    """Either may say it, and both when they agree."""
    request = decode_request(msgpack.packb(digits(**fields)), envelope, LIMITS)

    assert (request.model_name, request.model_version) == expected


@pytest.mark.parametrize("form", [Envelope(), IN_JSON])
def test_value_of_exact_size_limit_is_accepted(form: Envelope) -> None:
    """A value of exactly the limit is looked at; one byte more is not."""
    limits = LimitSettings(max_request_bytes=1024)

    assert check_value(bytes(1024), limits) == bytes(1024)
    with pytest.raises(Rejected) as refused:
        decode_request(bytes(1025), form, limits)

    assert refused.value.code is Code.TOO_LARGE
    assert refused.value.message == "value: expected at most 1024 bytes, got 1025"


def test_header_fault_becomes_error_answer() -> None:
    """The value is not looked at."""
    with pytest.raises(Rejected) as refused:
        decode_request(msgpack.packb(digits()), Envelope(fault="header x: wrong"), LIMITS)

    assert (refused.value.code, refused.value.message) == (Code.INVALID_REQUEST, "header x: wrong")


@pytest.mark.parametrize("data", [[1, 2.5, 3, 4], [[1, 2.5], [3, 4]]])
def test_json_data_is_flat_or_nested(data: Any) -> None:
    """Both are row-major."""
    assert json_data("FP32", data, [2, 2]) == np.array([1, 2.5, 3, 4], "<f4").tobytes()


def test_json_carries_nan_and_infinity_as_strings() -> None:
    """NaN and infinities are strings, since JSON has no such numbers."""
    content = json_data("FP64", ["NaN", "Infinity", "-Infinity", 0], [4])

    np.testing.assert_array_equal(np.frombuffer(content), [np.nan, np.inf, -np.inf, 0])


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("UINT64", [0, 2**64 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("INT8", [-128, 127]),
        ("FP16", [65504.0, -65504.0]),
        ("FP64", [1.7976931348623157e308, 5e-324]),
    ],
)
def test_json_carries_extremes_of_datatype(datatype: str, data: list[Any]) -> None:
    """None is refused or changed."""
    array = np.frombuffer(json_data(datatype, data, [2]), from_dtype(datatype))

    assert array.tolist() == data


def from_dtype(datatype: str) -> str:
    """NumPy's name for a datatype."""
    return datatype.lower().replace("fp", "float")


@pytest.mark.parametrize(
    ("data", "fields", "content"),
    [
        (["a", "é"], {}, b"\x01\x00\x00\x00a\x02\x00\x00\x00\xc3\xa9"),
        (
            ["YQ==", "/w=="],
            {"parameters": {"encoding": "base64"}},
            b"\x01\x00\x00\x00a\x01\x00\x00\x00\xff",
        ),
    ],
)
def test_json_carries_bytes_as_text_or_base64(
    data: Any, fields: dict[str, Any], content: bytes
) -> None:
    """Base64 only where the tensor's parameters say so."""
    assert json_data("BYTES", data, [2], **fields) == content


@pytest.mark.parametrize("element", [b'"\xff"', b"1e999", b"1"])
@pytest.mark.parametrize("datatype", [b"BYTES", b"FP32"])
def test_large_json_is_refused_as_small(datatype: bytes, element: bytes) -> None:
    """An element without a value in Python, and one of another type, before others."""

    def refusal(others: int) -> str:
        data = b"[%b%b]" % (element, b', "a"' * others)
        fields = b'"name": "x", "datatype": "%b", "shape": [%d]' % (datatype, others + 1)
        value = b'{"inputs": [{%b, "data": %b}]}' % (fields, data)
        with pytest.raises(Rejected) as error:
            decode_request(value, Envelope(content_type=JSON, model="m"), LIMITS)
        return str(error.value)

    assert refusal(20_000) == refusal(1)


def test_half_of_surrogate_pair_near_end_is_not_taken_for_value_cut_short() -> None:
    """Programs that cut a text within an emoji write it; msgspec calls such a value truncated."""
    tensor = rb'{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a\ud83d"]}'
    with pytest.raises(Rejected) as refused:
        decode_request(b'{"inputs": [%b]}' % tensor, Envelope(content_type=JSON, model="m"), LIMITS)

    assert refused.value.message.endswith("malformed JSON: half of a surrogate pair")


def test_integer_beyond_floats_is_named_though_infinity_stands_before_it() -> None:
    """Infinity is a number that the datatype can hold."""
    with pytest.raises(Rejected) as refused:
        json_data("FP32", ["-Infinity", 10**400], [2])

    assert "data[1]: expected a number that FP32 can hold, got 1000" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (b'"parameters": [], "parameters": null', "parameters: expected object or null, got array"),
        (b'"name": [], "name": {"a": 1}', "name: expected string, got array"),
        (b'"name": "", "name": null', "name: expected at least 1 characters, got fewer"),
    ],
)
def test_wrong_value_of_repeated_key_is_refused(fields: bytes, told: str) -> None:
    """The first one is the wrong one, and the last one is found at its place."""
    tensor = b'{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], %b}' % fields
    value = b'{"inputs": [%b]}' % tensor
    with pytest.raises(Rejected) as error:
        decode_request(value, Envelope(content_type=JSON, model="m"), LIMITS)

    assert told in error.value.message


@pytest.mark.parametrize(
    ("value", "envelope", "found"),
    [
        (msgpack.packb({"id": "r-1", "inputs": 5}), Envelope(), "r-1"),
        (b'{"id": "r-1", "inputs": 5}', IN_JSON, "r-1"),
        (msgpack.packb({"id": 5}), Envelope(), None),
        (b"\xc1", Envelope(), None),
        (b'{"id": "r-1"', IN_JSON, None),
        (b"\xff\xd8", Envelope(content_type="image/jpeg"), None),
        (None, Envelope(), None),
    ],
)
def test_refused_request_keeps_id_of_caller(
    value: bytes | None, envelope: Envelope, found: str | None
) -> None:
    """The error can then say whose it is; what cannot be read has none."""
    assert callers_id(value, envelope) == found


# --- responses --------------------------------------------------------------------------------


def test_response_in_messagepack_is_read_by_another_library() -> None:
    """All fields have the protocol's names."""
    request = answered(MSGPACK, label=np.array([7], "<i8"))

    assert msgpack.unpackb(encode_response(request, 2_000)) == {
        "model_name": "digits",
        "model_version": "3",
        "id": "r-1",
        "outputs": [
            {"name": "label", "datatype": "INT64", "shape": [1], "data": b"\x07" + bytes(7)}
        ],
        "parameters": {"queue_us": 400, "batch_us": 350, "compute_us": 250, "batch_size": 8},
    }


@pytest.mark.parametrize("content_type", [JSON, "image/jpeg"])
def test_response_in_json_is_read_by_another_library(content_type: str) -> None:
    """Raw payloads are answered in JSON as well; data is flat."""
    request = answered(
        content_type,
        p=np.array([[0.5, np.nan], [np.inf, -np.inf]], np.float32),
        t=np.array([b"a", b"\xff"], object),
        u=np.array(["é"], object),
    )

    assert json.loads(encode_response(request, 2_000))["outputs"] == [
        {
            "name": "p",
            "datatype": "FP32",
            "shape": [2, 2],
            "data": [0.5, "NaN", "Infinity", "-Infinity"],
        },
        {
            "name": "t",
            "datatype": "BYTES",
            "shape": [2],
            "data": ["YQ==", "/w=="],
            "parameters": {"encoding": "base64"},
        },
        {"name": "u", "datatype": "BYTES", "shape": [1], "data": ["é"]},
    ]


def test_timings_across_skewed_clocks_are_not_negative() -> None:
    """Stages of different machines stamp the same request."""
    request = answered(MSGPACK)
    request.batch = BatchSummary(request.ingested_us - 5, compute_us=250, rows=8)

    times = msgpack.unpackb(encode_response(request, 0))["parameters"]

    assert times == {"queue_us": 0, "batch_us": 0, "compute_us": 250, "batch_size": 8}


@pytest.mark.parametrize(
    ("content_type", "read"),
    [(MSGPACK, msgpack.unpackb), (JSON, json.loads), ("", msgpack.unpackb)],
)
def test_error_has_message_and_details(content_type: str, read: Any) -> None:
    """`error` is a string, as the protocol says."""
    failure = Failure(Code.OVERLOADED, "too much", "ingest", 250)

    assert read(encode_error(answered(content_type), failure)) == {
        "id": "r-1",
        "error": "too much",
        "error_details": {
            "code": "OVERLOADED",
            "stage": "ingest",
            "retriable": True,
            "retry_after_ms": 250,
        },
    }


# --- the caller's side ------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_client_codec_returns_arrays_for_arrays(content_type: str) -> None:
    """The value of `encode_request` is read as a request, and an answer as its arrays."""
    value = encode_request(
        content_type, "digits", {"x": np.eye(2, dtype=np.float16)}, id="r-1", outputs=["y"]
    )
    read = decode_request(value, Envelope(content_type=content_type), LIMITS)
    request = answered(content_type, y=np.eye(2, dtype=np.float16))
    answer = decode_response(answer_headers(request, "ok", "t"), encode_response(request, 2_000))

    assert (read.model_name, read.id, read.inputs[0].datatype) == ("digits", "r-1", "FP16")
    assert read.outputs is not None
    assert [output.name for output in read.outputs] == ["y"]
    assert isinstance(answer, Answer)
    np.testing.assert_array_equal(answer.outputs["y"], np.eye(2), strict=False)


def test_client_codec_refuses_other_content_types() -> None:
    """A payload needs no encoding."""
    with pytest.raises(ValueError, match="image/jpeg"):
        encode_request("image/jpeg", "m", {})


@pytest.mark.parametrize("content_type", ["", MSGPACK])
def test_error_of_json_declared_as_messagepack_is_in_json(content_type: str) -> None:
    """Its caller reads nothing else; the header says the same, and the `id` is echoed."""
    request = answered(content_type)
    request.value = b' {"model_name": "digits", "id": "mine", "inputs": []}'
    request.id = callers_id(request.value, request.envelope)

    value = encode_error(request, Failure(Code.INVALID_REQUEST, "no content type", "ingest"))
    headers = dict(answer_headers(request, "INVALID_REQUEST", "t"))

    assert headers["content-type"] == b"application/json"
    assert json.loads(value)["id"] == "mine"
    assert json.loads(value)["error"] == "no content type"


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_client_codec_returns_error(content_type: str) -> None:
    """The error has its code."""
    request = answered(content_type)
    value = encode_error(request, Failure(Code.UNKNOWN_MODEL, "no such model", "ingest"))

    answer = decode_response(answer_headers(request, "UNKNOWN_MODEL", "t"), value)

    assert isinstance(answer, ErrorResponse)
    assert (answer.error, answer.error_details.code) == ("no such model", "UNKNOWN_MODEL")


@pytest.mark.parametrize(
    ("content_type", "value"),
    [
        (MSGPACK, None),
        (MSGPACK, b"\xc1"),
        (JSON, b"{"),
        ("text/plain", b"hello"),
        (JSON, b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": ["a"]}]}'),
    ],
)
def test_client_codec_refuses_foreign_record(content_type: str, value: bytes | None) -> None:
    """A reply topic may hold records of others."""
    with pytest.raises(Rejected):
        decode_response([("content-type", content_type.encode())], value)
