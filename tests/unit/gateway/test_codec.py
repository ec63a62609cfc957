"""Bodies of the protocol over HTTP: what is read, what is refused, and what is written."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.client import Response
from headrace.errors import Code, Rejected
from headrace.gateway.codec import decode_call, decode_raw, encode_answer
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.tensors import DATATYPES, from_array, to_array

ONE = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}
BINARY = {"name": "x", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}
IN_REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def values_of(datatype: str) -> np.ndarray[Any, Any]:
    """Four elements of a datatype; of BYTES one is empty and one is not UTF-8."""
    values: list[Any] = [0, 1, 1, 0]
    if datatype == "BYTES":
        values = [b"", b"\xff\x00", "é".encode(), b"a"]
    return np.array(values, DATATYPES[datatype].dtype).reshape(2, 2)


def encoded(*inputs: object, **fields: object) -> bytes:
    """A body in JSON."""
    return msgspec.json.encode({"inputs": list(inputs), **fields})


def answer_of(array: np.ndarray[Any, Any]) -> Response:
    """An answer with one output."""
    return Response("model", "1", None, {"y": array}, {}, ())


@pytest.mark.parametrize("datatype", DATATYPES)
def test_binary_tensor_survives_http_codec(datatype: str) -> None:
    """Tensors of every datatype follow the JSON as bytes."""
    array = values_of(datatype)
    content = bytes(from_array("x", array).data)
    tensor = {
        "name": "x",
        "datatype": datatype,
        "shape": [2, 2],
        "parameters": {"binary_data_size": len(content)},
    }
    head = encoded(tensor, parameters={"binary_data_output": True})
    call = decode_call(head + content, len(head))
    written = encode_answer(answer_of(to_array(call.inputs["x"])), call)

    np.testing.assert_array_equal(to_array(call.inputs["x"]), array)
    assert written.json_bytes is not None
    assert written.body[written.json_bytes :] == content


@pytest.mark.parametrize("datatype", DATATYPES)
def test_json_tensor_survives_http_codec(datatype: str) -> None:
    """An output in JSON, sent as an input, is the same array."""
    array = values_of(datatype)
    (output,) = msgspec.json.decode(encode_answer(answer_of(array)).body)["outputs"]

    assert (output["datatype"], output["shape"]) == (datatype, [2, 2])
    np.testing.assert_array_equal(to_array(decode_call(encoded(output)).inputs["y"]), array)


def test_output_has_requested_encoding() -> None:
    """`binary_data` of an output goes before `binary_data_output` of the request."""
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}]
    call = decode_call(encoded(ONE, outputs=outputs, parameters={"binary_data_output": True}))
    arrays = {"y": np.ones(1, np.float32), "z": np.ones(1, np.float32)}
    written = encode_answer(Response("model", "1", "id", arrays, {}, ()), call)
    y, z = msgspec.json.decode(written.body[: written.json_bytes])["outputs"]

    assert call.outputs == ["y", "z"]
    assert y["data"] == [1.0]
    assert z["parameters"] == {"binary_data_size": 4}


def test_unknown_parameters_are_passed_on_and_timeout_is_not() -> None:
    """The stages get what the gateway has no use for."""
    call = decode_call(encoded(ONE, id="a", parameters={"timeout": 1500, "mine": True}))

    assert (call.id, call.timeout_us, call.parameters) == ("a", 1500, {"mine": True})


BAD_BODIES = {
    "not JSON": (b"{", None, "value: expected a whole JSON"),
    "no inputs": (b"{}", None, "inputs"),
    "too many inputs": (encoded(*[ONE] * 65), None, "at most 64"),
    "the same input twice": (encoded(ONE, ONE), None, r"inputs\[1\].name: expected each name once"),
    "unknown datatype": (encoded({**ONE, "datatype": "INT4"}), None, "INT4"),
    "negative dimension": (encoded({**ONE, "shape": [-1]}), None, "no negative dimension"),
    "huge shape": (encoded({**ONE, "shape": [2**62, 8]}), None, "less than 2.63 bytes"),
    "number out of range": (encoded({**ONE, "data": [1, 2**31]}), None, r"data\[1\]"),
    "neither form": (encoded({**BINARY, "parameters": {}}), None, "got none"),
    "both forms": (encoded({**ONE, **BINARY}) + b"12345678", -8, "got several"),
    "too few bytes": (encoded(BINARY) + b"1234567", -7, "at most the 7 bytes"),
    "too many bytes": (encoded(BINARY) + b"123456789", -9, "got 1 more"),
    "wrong size": (
        encoded({**BINARY, "parameters": {"binary_data_size": 4}}) + b"1234",
        -4,
        "8 bytes for INT32",
    ),
    "negative size": (
        encoded({**BINARY, "parameters": {"binary_data_size": -1}}),
        0,
        "binary_data_size",
    ),
    "JSON longer than the body": (b"{}", 3, "Inference-Header-Content-Length"),
    "timeout": (encoded(ONE, parameters={"timeout": "1"}), None, "microseconds"),
    "large integer": (encoded(ONE, parameters={"mine": 2**64}), None, "integer of 64 bits"),
    "binary_data_output": (encoded(ONE, parameters={"binary_data_output": 1}), None, "true or"),
    "shared memory": (
        encoded({**BINARY, "parameters": IN_REGION}),
        None,
        "gateway.shared_memory",
    ),
    "shared memory without size": (
        encoded({**BINARY, "parameters": {"shared_memory_region": "r"}}),
        None,
        "shared_memory_byte_size",
    ),
    "shared memory and data": (encoded({**ONE, "parameters": IN_REGION}), None, "several"),
    "output in shared memory": (
        encoded(ONE, outputs=[{"name": "y", "parameters": IN_REGION}]),
        None,
        "gateway.shared_memory",
    ),
    "classification": (
        encoded(ONE, outputs=[{"name": "y", "parameters": {"classification": -3}}]),
        None,
        "from 0 to 1000",
    ),
}


@pytest.mark.parametrize(("body", "json_bytes", "told"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_http_body_is_refused_with_reason(
    body: bytes, json_bytes: int | None, told: str
) -> None:
    """The place, what was expected, and what was found; a size below 1 is counted from the end."""
    if json_bytes is not None and json_bytes <= 0:
        json_bytes += len(body)
    with pytest.raises(Rejected, match=told):
        decode_call(body, json_bytes)


@pytest.mark.parametrize(
    ("datatype", "shape", "body", "expected"),
    [
        ("FP32", (-1, 2), b"\0" * 8, [1, 2]),
        ("FP32", (-1, -1), b"\0" * 8, [1, 2]),
        ("UINT8", (-1, -1, 3), b"\0" * 6, [1, 2, 3]),
        ("BYTES", (-1, 1), b"text", [1, 1]),
    ],
)
def test_bare_tensor_takes_its_shape_from_model(
    datatype: str, shape: tuple[int, ...], body: bytes, expected: list[int]
) -> None:
    """One row; one other dimension follows from the size; a text is one element."""
    spec = TensorSpec("x", datatype, shape)
    call = decode_raw(body, make_signature([spec], [TensorSpec("y", datatype, shape)]))

    assert list(call.inputs["x"].shape) == expected
    found = to_array(call.inputs["x"])
    assert bytes(found.item(0) if datatype == "BYTES" else found) == body


@pytest.mark.parametrize(
    ("inputs", "body", "told"),
    [
        ([("FP32", (-1, 2)), ("FP32", (-1, 2))], b"", "several inputs"),
        ([("FP32", (-1, -1, -1))], b"", "is open"),
        ([("FP32", (-1, 2))], b"1234567", "8 bytes for FP32"),
        ([("FP32", (-1, -1))], b"1234567", "4 bytes for FP32"),
        ([("BYTES", (-1, 2))], b"text", "several elements"),
    ],
)
def test_bare_tensor_of_wrong_size_is_refused(
    inputs: list[tuple[str, tuple[int, ...]]], body: bytes, told: str
) -> None:
    """The model's inputs must leave no doubt, and the size must fit."""
    specs = [TensorSpec(f"x{number}", *each) for number, each in enumerate(inputs)]
    signature = make_signature(specs, [TensorSpec("y", "FP32", (-1, 2))])
    with pytest.raises(Rejected, match=told):
        decode_raw(body, signature)


TEXTS: dict[str, Any] = {
    **{each: [1, 2.5, -3e2, 0] for each in ("FP16", "FP32", "FP64")},
    "INT8": [1, -128, 127, 0],
    "UINT64": [0, 2**64 - 1, 1, 2],
    "BOOL": [True, False, False, True],
    "BYTES": ["a", "", '"],[\\', "é\n"],
}
WRONG: dict[str, Any] = {
    "null": None,
    "object": {"a": [1]},
    "no array": 1,
    "too few": [1],
    "too many": [1, 2, 3, 4, 5],
    "empty arrays": [[], [], [], []],
    "objects": [{}, {}, {}, {}],
    "half nested": [[1, 2], 3, 4],
    "ragged": [[1, 2, 3], [4]],
    "too deep": [[[1], [2]], [[3], [4]]],
    "other types": [1, "a", True, 2.5],
    "range before type": [300, 1, "a", 1],
    "not finite": ["NaN", "Infinity", "-Infinity", 1e39],
    "too large": [1, 1e300, 1, 1e300],
    "no base64": ["!", "YQ==", "", "a"],
}


def outcome(body: bytes, part_bytes: int) -> object:
    """Decode a body in parts of so many bytes; return the call, or the error."""
    try:
        return decode_call(body, part_bytes=part_bytes)
    except Rejected as error:
        return error.code, error.message


@pytest.mark.parametrize("part_bytes", [1, 4, 9, 30])
@pytest.mark.parametrize("datatype", TEXTS)
@pytest.mark.parametrize("parameters", [{}, {"encoding": "base64"}, {"encoding": "hex"}])
def test_json_in_parts_is_decoded_or_refused_as_whole(
    datatype: str, part_bytes: int, parameters: dict[str, str]
) -> None:
    """Flat and nested data, right and wrong, with the same sentence."""
    flat = TEXTS[datatype]
    right = {"flat": flat, "nested": [flat[:2], flat[2:]], "empty": []}
    for case, data in {**right, **WRONG}.items():
        for shape in ([2, 2], [4], [0], [2**40, 2**40], [1] * 17, []):
            tensor = {"datatype": datatype, "shape": shape, "parameters": parameters}
            texts = [msgspec.json.encode(data), msgspec.json.format(msgspec.json.encode(data))]
            if len(shape) < 3 and max(shape, default=0) < 5:  # otherwise there are two faults
                texts += [texts[0].replace(b"[1,", b"[1e400,"), texts[0] + b"e400"]
            for text in texts:
                body = encoded({"name": "y", **tensor, "data": msgspec.Raw(text)}, id="i")

                assert outcome(body, part_bytes) == outcome(body, len(body)), (case, shape, text)


@pytest.mark.parametrize("part_bytes", [1, 10, 1000])
@pytest.mark.parametrize("text", [rb'["a", "\ud800"]', b'["a", "\xff"]', b'["a", 1e999]'])
def test_large_json_without_value_in_python_is_refused(text: bytes, part_bytes: int) -> None:
    """The parser of the whole and that of a part tell it in other words."""
    tensor = {"name": "y", "datatype": "BYTES", "shape": [2], "data": msgspec.Raw(text)}
    with pytest.raises(Rejected) as refused:
        decode_call(encoded(tensor), part_bytes=part_bytes)

    assert refused.value.code in (Code.INVALID_REQUEST, Code.INVALID_TENSOR)


def test_large_text_is_never_made_objects_for_a_fault_of_another() -> None:
    """The first of two `data` is skipped, though its bytes are those of no string."""
    text = b'["\xff"],"data":[1e999]'
    tensor = {"name": "y", "datatype": "FP32", "shape": [1], "data": msgspec.Raw(text)}
    with pytest.raises(Rejected, match=r"^INVALID_TENSOR: inputs\[0\]\.data\[0\]: .* in range"):
        decode_call(encoded(tensor), part_bytes=1)
