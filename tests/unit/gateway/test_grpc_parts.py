"""Messages of many parts, which are refused before they are parsed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.errors import Rejected
from headrace.gateway.grpc_calls import parse_message
from headrace.gateway.grpc_parts import INFER_PARTS, check_parts
from headrace.gateway.open_inference_pb2 import (
    InferTensorContents,
    ModelInferRequest,
    ModelMetadataRequest,
    RepositoryModelLoadRequest,
)
from headrace.tuning import TUNING

INPUT = ModelInferRequest.InferInputTensor.DESCRIPTOR.fields_by_name
INFER = ModelInferRequest.DESCRIPTOR.fields_by_name


def field(number: int, content: bytes) -> bytes:
    """A field of bytes; its size is written in two bytes."""
    size = len(content)
    return bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7]) + content


def infer(name: str, content: bytes = b"") -> bytes:
    """A field of a request."""
    return field(INFER[name].number, content)


DAMAGED = b"\xff"
MANY = {
    "inputs": (infer("inputs") * 65, "inputs: expected at most 64"),
    "outputs": (infer("outputs") * 257, "outputs: expected at most 256"),
    "parameters": (infer("parameters") * 65, "parameters: expected at most 64"),
    "raw contents": (infer("raw_input_contents") * 65, "raw_input_contents: expected at most 64"),
    "names": (infer("model_name") * 17, "message: expected at most 16 other fields"),
    "unknown fields": (b"".join(map(bytes, ([n << 3, 1] for n in range(9, 16)))) * 3, "at most 16"),
    "groups": (b"\x7b\x7c" * 9, "at most 16 other fields"),
    "fields of group": (
        b"\x7b" + infer("inputs") * 16,
        "message: expected at most 16 other fields",
    ),
    "inputs after group with damage": (
        b"\x7b" + infer("inputs", b"\x80") + b"\x7c" + infer("inputs") * 65,
        "inputs: expected at most 64",
    ),
    "inputs after input with damage": (
        infer("inputs", b"\x80") + infer("inputs") * 64,
        "inputs: expected at most 64",
    ),
    "fixed numbers": ((b"\x79" + bytes(8) + b"\x7d" + bytes(4)) * 9, "at most 16 other fields"),
    "parameters of input": (
        infer("inputs") + infer("inputs", field(INPUT["parameters"].number, b"") * 65),
        r"inputs\[1\]\.parameters: expected at most 64",
    ),
    "names of input": (
        infer("inputs", field(INPUT["name"].number, b"") * 17),
        r"inputs\[0\]: expected at most 16 other fields",
    ),
    "dimensions": (
        infer("inputs", field(INPUT["shape"].number, b"\1" * 161)),
        r"inputs\[0\]\.shape: expected at most 16",
    ),
    "dimensions one by one": (
        infer("inputs", bytes([INPUT["shape"].number << 3, 1]) * 17),
        r"inputs\[0\]\.shape: expected at most 16",
    ),
    "parameters of output": (
        infer("outputs", field(2, b"") * 65),
        r"outputs\[0\]\.parameters: expected at most 64",
    ),
}


@pytest.mark.parametrize(("message", "told"), MANY.values(), ids=MANY.keys())
def test_large_message_of_many_parts_is_refused_before_it_is_parsed(
    message: bytes, told: str
) -> None:
    """The damage behind the parts is not found."""
    with pytest.raises(Rejected, match=f"{told}.*, got more"):
        parse_message(ModelInferRequest, message + DAMAGED, unchecked_bytes=0)


PACKED = {
    "bool_contents": 1,
    "int_contents": -1,
    "int64_contents": 2**60,
    "uint_contents": 1,
    "uint64_contents": 300,
}
LISTS = InferTensorContents.DESCRIPTOR.fields_by_name
CONTENTS = {
    "strings": ([{"bytes_contents": [b"a", b""]}] * 2, "at most 3 strings"),
    **{name: ([{name: [each] * 5}] * 2, "at most 9 integers") for name, each in PACKED.items()},
}


@pytest.mark.parametrize(("contents", "told"), CONTENTS.values(), ids=CONTENTS.keys())
def test_large_message_of_many_elements_is_refused(contents: list[Any], told: str) -> None:
    """They are counted in all inputs together; one fewer is accepted."""
    limits = replace(TUNING.gateway, max_contents_values=3, max_contents_integers=9)
    request = ModelInferRequest(inputs=[{"contents": each} for each in contents])
    with pytest.raises(Rejected, match=rf"inputs\[1\]\.contents: expected {told}.*, got more"):
        check_parts(request.SerializeToString(), INFER_PARTS, limits)
    (field,) = contents[0]
    getattr(request.inputs[0].contents, field).pop()
    check_parts(request.SerializeToString(), INFER_PARTS, limits)


def test_packed_floats_and_raw_contents_are_not_counted() -> None:
    """They are only copied."""
    limits = replace(TUNING.gateway, max_contents_values=2, max_contents_integers=0)
    contents = {"fp32_contents": [1.0] * 100, "fp64_contents": [1.0] * 100}
    request = ModelInferRequest(inputs=[{"contents": contents}], raw_input_contents=[b"a" * 100])

    check_parts(request.SerializeToString(), INFER_PARTS, limits)


def test_unpacked_numbers_of_contents_are_counted_one_by_one() -> None:
    """Each is a field, as a string is."""
    limits = replace(TUNING.gateway, max_contents_values=3)
    number = bytes([LISTS["int_contents"].number << 3, 1])
    message = infer("inputs", field(INPUT["contents"].number, number * 4))
    with pytest.raises(Rejected, match="at most 3 strings and unpacked numbers"):
        check_parts(message, INFER_PARTS, limits)


@pytest.mark.parametrize("kind", [ModelMetadataRequest, RepositoryModelLoadRequest])
def test_other_large_message_of_many_parts_is_refused(kind: Any) -> None:
    """No request needs more than a few names, and parameters of a load."""
    with pytest.raises(Rejected, match="message: expected at most 16 other fields, got more"):
        parse_message(kind, field(1, b"a") * 17, unchecked_bytes=0)
    with pytest.raises(Rejected, match="parameters: expected at most 64, got more"):
        parse_message(kind, field(3, b"") * 65, unchecked_bytes=0)


@pytest.mark.parametrize("message", [DAMAGED, b"\xff" * 11, infer("inputs", b"\x08"), b"\x0f"])
def test_damaged_large_message_is_refused_by_parser(message: bytes) -> None:
    """Wherever it ends."""
    with pytest.raises(Rejected, match=r"inference\.ModelInferRequest, got other bytes"):
        parse_message(ModelInferRequest, message, unchecked_bytes=0)


def test_large_message_within_limits_is_parsed() -> None:
    """As many parts as a request can have, and fields that only a newer client knows."""
    parameters: dict[str, Any] = {str(n): {"int64_param": -n} for n in range(64)}
    tensor = {"datatype": "INT8", "shape": [-1] * 16, "parameters": parameters}
    request = ModelInferRequest(
        model_name="é" * 200,
        id="id",
        parameters=parameters,
        inputs=[{"name": str(number), **tensor} for number in range(64)],
        outputs=[{"name": str(number), "parameters": parameters} for number in range(256)],
        raw_input_contents=[b"a" * 1000] * 64,
    )
    message = request.SerializeToString() + b"\x7b\x78\x01\x7c"

    assert parse_message(
        ModelInferRequest, message, unchecked_bytes=0
    ) == ModelInferRequest.FromString(message)
