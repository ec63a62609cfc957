"""Messages of the protocol over gRPC: what is read, what is refused, and what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.client import Response
from headrace.errors import Rejected
from headrace.gateway.grpc_codec import (
    decode_call,
    encode_answer,
    find_places,
    is_decoded_by_element,
)
from headrace.gateway.open_inference_pb2 import ModelInferRequest
from headrace.protocol.messages import Parameter
from headrace.protocol.tensors import DATATYPES, from_array, to_array

FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
ONE = {"name": "x", "datatype": "INT8", "shape": [2], "contents": {"int_contents": [-128, 127]}}
RAW = {"name": "x", "datatype": "INT8", "shape": [2]}
MANY = {str(number): {"bool_param": True} for number in range(65)}
IN_REGION = {
    "shared_memory_region": {"string_param": "r"},
    "shared_memory_byte_size": {"int64_param": 8},
}


def values_of(datatype: str) -> np.ndarray[Any, Any]:
    """Four elements of a datatype; of BYTES one is empty and one is not UTF-8."""
    values: list[Any] = [0, 1, 1, 0]
    if datatype == "BYTES":
        values = [b"", b"\xff\x00", "é".encode(), b"a"]
    return np.array(values, DATATYPES[datatype].dtype).reshape(2, 2)


def request_of(*inputs: dict[str, Any], **fields: Any) -> ModelInferRequest:
    """A request for any model."""
    return ModelInferRequest(model_name="model", inputs=inputs, **fields)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_raw_tensor_is_read_and_written_unchanged(datatype: str) -> None:
    """Tensors of every datatype are carried as bytes beside their names."""
    array = values_of(datatype)
    content = bytes(from_array("x", array).data)
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 2]}
    call = decode_call(request_of(tensor, raw_input_contents=[content]))
    answer = encode_answer(Response("model", "1", None, {"y": to_array(call.inputs["x"])}, {}, ()))

    np.testing.assert_array_equal(to_array(call.inputs["x"]), array)
    assert list(answer.raw_output_contents) == [content]
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == (datatype, [2, 2])


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_contents_are_read_in_their_datatype(datatype: str) -> None:
    """Each datatype but FP16 and BF16 has its list of elements."""
    array = values_of(datatype)
    contents = {FIELDS[datatype]: array.ravel().tolist()}
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 2], "contents": contents}
    found = to_array(decode_call(request_of(tensor)).inputs["x"])

    np.testing.assert_array_equal(found, array)
    assert found.dtype == DATATYPES[datatype].dtype


@pytest.mark.parametrize("datatype", FIELDS)
@pytest.mark.parametrize("part_elements", [1, 3, 4])
def test_typed_contents_in_parts_are_those_of_whole(datatype: str, part_elements: int) -> None:
    """Of a large tensor, other threads run in between."""
    contents = {FIELDS[datatype]: values_of(datatype).ravel().tolist()}
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 2], "contents": contents}
    found = decode_call(request_of(tensor), part_elements=part_elements).inputs["x"]

    np.testing.assert_array_equal(to_array(found), values_of(datatype))


def test_element_out_of_range_in_later_part_is_told_with_its_place() -> None:
    """It is counted from the first element."""
    request = request_of({**ONE, "contents": {"int_contents": [1, 128]}})
    with pytest.raises(Rejected, match=r"int_contents\[1\]: expected INT8, got 128"):
        decode_call(request, part_elements=1)


def test_extremes_of_small_integers_are_read() -> None:
    """INT8 comes in 32 bits, and keeps its sign."""
    assert to_array(decode_call(request_of(ONE)).inputs["x"]).tolist() == [-128, 127]


def test_scalar_and_empty_tensor_need_no_more_elements_than_they_have() -> None:
    """A tensor without elements has no contents, and one of rank 0 has one."""
    empty = {"name": "x", "datatype": "FP32", "shape": [0, 3]}
    scalar = {"name": "y", "datatype": "FP32", "contents": {"fp32_contents": [2.5]}}
    inputs = decode_call(request_of(empty, scalar)).inputs

    assert inputs["x"].shape == (0, 3)
    assert to_array(inputs["y"]).item() == 2.5


def test_parameters_of_others_are_passed_on_and_timeout_is_not() -> None:
    """The stages get what the gateway has no use for, of each type."""
    values = {
        "timeout": {"uint64_param": 1500},
        "a": {"bool_param": True},
        "b": {"string_param": "é"},
        "c": {"double_param": 0.5},
        "d": {"int64_param": -1},
    }
    call = decode_call(request_of(ONE, id="a", outputs=[{"name": "y"}], parameters=values))

    assert (call.id, call.outputs, call.timeout_us) == ("a", ["y"], 1500)
    assert call.parameters == {"a": True, "b": "é", "c": 0.5, "d": -1}


def test_parameters_of_answer_keep_their_types() -> None:
    """Booleans are no integers, and large integers are unsigned."""
    parameters: dict[str, Parameter] = {"a": True, "b": 7, "c": 2**63, "d": 0.5, "e": "é"}
    message = encode_answer(Response("model", "1", "id", {}, parameters, ()))
    choices = {
        name: each.WhichOneof("parameter_choice") for name, each in message.parameters.items()
    }

    assert choices == {
        "a": "bool_param",
        "b": "int64_param",
        "c": "uint64_param",
        "d": "double_param",
        "e": "string_param",
    }
    assert message.id == "id"


def test_most_parameters_are_read() -> None:
    """As many as over HTTP."""
    parameters = dict(list(MANY.items())[:64])

    assert len(decode_call(request_of(ONE, parameters=parameters)).parameters) == 64


def test_inputs_beyond_limit_are_not_looked_at() -> None:
    """A message of 16 MiB may have eight million of them."""
    request = request_of(*[RAW] * 64, {**RAW, "datatype": "BYTES"}, raw_input_contents=[b"12"])

    assert not is_decoded_by_element(request)
    assert len(find_places(request_of(*[{**RAW, "parameters": IN_REGION}] * 65)).inputs) == 64


BAD_REQUESTS = {
    "both forms": (request_of(ONE, raw_input_contents=[b"12"]), "got several"),
    "fewer raw contents": (request_of(RAW, {**RAW, "name": "y"}, raw_input_contents=[b"12"]), "2"),
    "more raw contents": (request_of(RAW, raw_input_contents=[b"12", b"34"]), "one for each of 1"),
    "raw contents alone": (request_of(raw_input_contents=[b"12"]), "one for each of 0"),
    "too few elements": (request_of({**ONE, "shape": [3]}), "3 elements for INT8"),
    "no elements": (request_of(RAW), "2 elements for INT8"),
    "too few bytes": (request_of(RAW, raw_input_contents=[b"1"]), "2 bytes for INT8"),
    "other field": (request_of({**ONE, "datatype": "FP32"}), "fp32_contents for FP32"),
    "two fields": (
        request_of({**ONE, "contents": {"int_contents": [1, 2], "fp32_contents": [1, 2]}}),
        "int_contents, fp32_contents",
    ),
    "FP16 not raw": (
        request_of({**RAW, "datatype": "FP16", "contents": {"fp32_contents": [1, 2]}}),
        "raw_input_contents for FP16",
    ),
    "element out of range": (
        request_of({**ONE, "contents": {"int_contents": [1, 128]}}),
        r"int_contents\[1\]: expected INT8, got 128",
    ),
    "unknown datatype": (request_of({**ONE, "datatype": "INT4"}), "INT4"),
    "negative dimension": (request_of({**ONE, "shape": [-2]}), "no negative dimension"),
    "huge shape": (request_of({**RAW, "shape": [2**62, 8]}), "less than 2.63 bytes"),
    "too many dimensions": (request_of({**ONE, "shape": [1] * 100}), "dimensions"),
    "too many inputs": (request_of(*[RAW] * 10_000), "at most 64"),
    "too many outputs": (request_of(ONE, outputs=[{"name": "y"}] * 257), "at most 256"),
    "too many parameters": (request_of(ONE, parameters=MANY), "parameters: expected at most 64"),
    "too many parameters of input": (
        request_of({**ONE, "parameters": MANY}),
        r"inputs\[0\].parameters: expected at most 64, got 65",
    ),
    "too many parameters of output": (
        request_of(ONE, outputs=[{"name": "y", "parameters": MANY}]),
        r"outputs\[0\].parameters: expected at most 64, got 65",
    ),
    "the same input twice": (request_of(ONE, ONE), "each name once"),
    "broken lengths": (
        request_of({**RAW, "datatype": "BYTES"}, raw_input_contents=[b"\xff\xff\xff\xff1234"]),
        "elements for BYTES",
    ),
    "BOOL of 2": (request_of({**RAW, "datatype": "BOOL"}, raw_input_contents=[b"\1\2"]), "0 or 1"),
    "timeout": (request_of(ONE, parameters={"timeout": {"double_param": 1}}), "microseconds"),
    "negative timeout": (request_of(ONE, parameters={"timeout": {"int64_param": -1}}), "0 or more"),
    "parameter without value": (request_of(ONE, parameters={"a": {}}), "a value"),
    "shared memory": (
        request_of({**RAW, "parameters": IN_REGION}),
        "gateway.shared_memory",
    ),
    "shared memory and contents": (request_of({**ONE, "parameters": IN_REGION}), "several"),
    "output in shared memory": (
        request_of(ONE, outputs=[{"name": "y", "parameters": IN_REGION}]),
        "gateway.shared_memory",
    ),
    "classification": (
        request_of(
            ONE, outputs=[{"name": "y", "parameters": {"classification": {"int64_param": -3}}}]
        ),
        "from 0 to 1000",
    ),
}


@pytest.mark.parametrize(("request_", "told"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_request_is_refused_with_sentence(request_: ModelInferRequest, told: str) -> None:
    """The place, what was expected, and what was found."""
    with pytest.raises(Rejected, match=told):
        decode_call(request_)
