"""Bodies of the Open Inference Protocol over HTTP: JSON, with tensors in it or after it.

Sources: the Open Inference Protocol, REST (https://github.com/kserve/open-inference-protocol), and
Triton's binary tensor data extension
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md).
With the extension the JSON is followed by the raw bytes of those tensors whose parameters have
`binary_data_size`, in the order of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.client import Response
from headrace.errors import Code, Rejected
from headrace.gateway.classification import take_class_count
from headrace.gateway.shared_memory import (
    NO_PLACES,
    NO_REGIONS,
    REGION,
    Place,
    Places,
    RegionAccess,
    parameters_of,
    take_place,
)
from headrace.models.signature import Signature
from headrace.protocol.codec import faults
from headrace.protocol.codec.faults import DECODE_ERRORS, shown
from headrace.protocol.codec.json_data import ENCODING, bytes_to_data, data_to_bytes, text_to_bytes
from headrace.protocol.messages import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    Name,
    Parameter,
    Parameters,
    RequestedOutput,
    Shape,
    Tensor,
    Text,
)
from headrace.protocol.tensors import DATATYPES, check_tensor, from_array, join_elements
from headrace.tuning import TUNING

BINARY_SIZE = "binary_data_size"
BINARY = "binary_data"
BINARY_OUTPUT = "binary_data_output"
TIMEOUT = "timeout"


class InferCall(NamedTuple):
    """An inference request as a caller sent it.

    Attributes:
        inputs: checked tensors by name.
        outputs: names of the requested outputs; None for all.
        parameters: those that the gateway has no use for.
        timeout_us: time that the caller gives in the parameter `timeout`; 0 if it gives none.
        binary: by output, whether its tensor is to follow the JSON.
        binary_by_default: the same for outputs that `binary` does not name.
        classes: by output, how many of its top classes are to be the answer; others are not named.
        places: by output, where in shared memory it is to be written; others are not named.
    """

    id: str | None
    inputs: dict[str, Tensor]
    outputs: list[str] | None
    parameters: dict[str, Parameter]
    timeout_us: int
    binary: dict[str, bool]
    binary_by_default: bool
    classes: Mapping[str, int] = MappingProxyType({})
    places: Mapping[str, Place] = MappingProxyType({})


class EncodedAnswer(NamedTuple):
    """The body of an answer; `json_bytes` is the size of its JSON if tensors follow it."""

    body: bytes
    json_bytes: int | None


class InferInput(Struct, kw_only=True):
    """One input: its elements are in `data`, or follow the JSON (`binary_data_size`)."""

    name: Name
    datatype: Text
    shape: Shape
    data: Any = UNSET
    parameters: Parameters | None = None


class _InferInputText(InferInput):
    """One input whose `data` is still JSON text."""

    data: msgspec.Raw | UnsetType = UNSET


class InferRequest(Struct, kw_only=True):
    """The JSON of an inference request."""

    id: Text | None = None
    parameters: Parameters | None = None
    inputs: Annotated[list[InferInput], Meta(max_length=MAX_INPUTS)]
    outputs: Annotated[list[RequestedOutput], Meta(max_length=MAX_OUTPUTS)] | None = None


class _LargeInferRequest(InferRequest):
    """A large request, whose inputs are converted in parts."""

    inputs: Annotated[  # type: ignore[assignment]  # nothing is ever appended
        list[_InferInputText], Meta(max_length=MAX_INPUTS)
    ]


class _Named(Struct):
    """The part of an input or output that says where it is."""

    parameters: Parameters | None = None


class _NamedPlaces(Struct):
    """The part of an inference request that says where its tensors are."""

    inputs: Annotated[list[_Named], Meta(max_length=MAX_INPUTS)]
    outputs: Annotated[list[_Named], Meta(max_length=MAX_OUTPUTS)] | None = None


class InferOutput(Struct, kw_only=True, omit_defaults=True):
    """One output: its elements are in `data`, or follow the JSON (`binary_data_size`)."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | UnsetType = UNSET
    parameters: Mapping[str, Parameter] | None = None


class InferResponse(Struct, kw_only=True, omit_defaults=True):
    """The JSON of an answer; `parameters` has timings in microseconds and the batch size."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Parameter] = {}
    outputs: list[InferOutput]


_decode = msgspec.json.Decoder(InferRequest).decode
_decode_large = msgspec.json.Decoder(_LargeInferRequest).decode
_decode_places = msgspec.json.Decoder(_NamedPlaces).decode
_encode = msgspec.json.Encoder().encode


# --- requests ---------------------------------------------------------------------------------


def decode_call(
    body: bytes,
    json_bytes: int | None = None,
    regions: RegionAccess = NO_REGIONS,
    part_bytes: int = TUNING.protocol.payload_part_bytes,
) -> InferCall:
    """Decode the body of an inference request.

    Args:
        body: JSON, and the tensors after it.
        json_bytes: the size of the JSON (`Inference-Header-Content-Length`); None if it is all of
            the body.
        regions: of shared memory, in which tensors may be.
        part_bytes: larger JSON is converted so many bytes at a time.

    Raises:
        Rejected: `INVALID_REQUEST` or `INVALID_TENSOR`, with the place in the body.
    """
    if json_bytes is not None and json_bytes > len(body):
        _refuse("Inference-Header-Content-Length", f"at most the body's {len(body)}", json_bytes)
    head = body if json_bytes is None else memoryview(body)[:json_bytes]
    request: InferRequest
    try:
        request = _decode_large(head) if len(head) > part_bytes else _decode(head)
    except DECODE_ERRORS as error:
        raise faults.refusal(error, bytes(head), faults.JSON) from error
    return _call_of(request, memoryview(body)[len(head) :], regions, part_bytes)


def _call_of(
    request: InferRequest, tail: memoryview, regions: RegionAccess, part_bytes: int
) -> InferCall:
    """Return the call of a request, whose binary tensors are in the tail."""
    inputs: dict[str, Tensor] = {}
    for number, tensor in enumerate(request.inputs):
        where = f"inputs[{number}]"
        if tensor.name in inputs:
            _refuse(f"{where}.name", "each name once", f"{shown(tensor.name)} again")
        content, tail = _content(tensor, tail, where, regions, part_bytes)
        check_tensor(tensor.datatype, tensor.shape, content, where)
        inputs[tensor.name] = Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), content)
    if len(tail):
        _refuse("body", "no bytes after those of the tensors", f"{len(tail)} more")
    parameters = _checked(request.parameters or {})
    timeout_us = take_timeout_us(parameters)
    binary, classes, places = _requested_forms(request.outputs or (), regions)
    return InferCall(
        id=request.id,
        inputs=inputs,
        outputs=[output.name for output in request.outputs] if request.outputs else None,
        parameters=parameters,
        timeout_us=timeout_us,
        binary=binary,
        binary_by_default=_flag(parameters, BINARY_OUTPUT, "parameters") or False,
        classes=classes,
        places=places,
    )


def find_places(body: bytes, json_bytes: int | None = None) -> Places:
    """Return the places in shared memory that a body names, as `decode_call` uses them: those
    before one for which it refuses the body, and none if it does so as a whole.
    """
    head = body if json_bytes is None else memoryview(body)[:json_bytes]
    if not may_name_places(bytes(head)):
        return NO_PLACES
    try:
        request = _decode_places(head)
    except DECODE_ERRORS:
        return NO_PLACES
    return Places(_places_of(request.inputs, "inputs"), _places_of(request.outputs, "outputs"))


def may_name_places(head: bytes) -> bool:
    """Return whether a tensor may be in shared memory; JSON can write any name with a backslash."""
    return REGION.encode() in head or b"\\" in head


def _places_of(tensors: Sequence[_Named] | None, kind: str) -> list[tuple[Place, str]]:
    found = []
    for number, tensor in enumerate(tensors or ()):
        where = f"{kind}[{number}]"
        try:
            place = take_place(dict(tensor.parameters or {}), where)
        except Rejected:  # unless there is another fault before it, `decode_call` says so
            break
        if place:
            found.append((place, where))
    return found


def _content(
    tensor: InferInput, tail: memoryview, where: str, regions: RegionAccess, part_bytes: int
) -> tuple[bytes | memoryview, memoryview]:
    """Return the raw bytes of an input, and what is left of the bytes after the JSON."""
    parameters = dict(tensor.parameters or {})
    size = parameters.get(BINARY_SIZE)
    place = take_place(parameters, where)
    given = [size is not None, tensor.data is not UNSET, place is not None]
    if given.count(True) != 1:
        expected = f"one of data, parameters.{BINARY_SIZE} and parameters.{REGION}"
        _refuse(where, expected, "several" if any(given) else "none")
    if place is not None:
        return regions.read(place, where), tail
    if size is None:
        encoding = parameters.get(ENCODING)
        datatype, shape, data = tensor.datatype, tensor.shape, tensor.data
        if isinstance(data, msgspec.Raw):
            return text_to_bytes(datatype, shape, data, encoding, where, part_bytes), tail
        return data_to_bytes(datatype, shape, data, encoding, where), tail
    if type(size) is not int or not 0 <= size <= len(tail):
        expected = f"an integer, at most the {len(tail)} bytes that are left of the body"
        _refuse(f"{where}.parameters.{BINARY_SIZE}", expected, shown(size))
    return tail[:size], tail[size:]


def _requested_forms(
    outputs: Sequence[RequestedOutput], regions: RegionAccess
) -> tuple[dict[str, bool], dict[str, int], dict[str, Place]]:
    """Return `binary`, `classes` and `places` of the call."""
    binary: dict[str, bool] = {}
    classes: dict[str, int] = {}
    places: dict[str, Place] = {}
    for number, output in enumerate(outputs):
        where = f"outputs[{number}]"
        parameters = dict(output.parameters or {})
        wanted = _flag(parameters, BINARY, f"{where}.parameters")
        if wanted is not None:
            binary[output.name] = wanted
        if count := take_class_count(parameters, where):
            classes[output.name] = count
        if place := take_place(parameters, where):
            regions.check(place, where)
            places[output.name] = place
    return binary, classes, places


def _checked(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return a copy of the parameters of a request; JSON has integers that no record can hold."""
    for name, value in parameters.items():
        if type(value) is int and not -(2**63) <= value < 2**64:
            _refuse(f"parameters.{name}", "an integer of 64 bits", shown(value))
    return dict(parameters)


def _flag(parameters: dict[str, Parameter], name: str, where: str) -> bool | None:
    value = parameters.pop(name, None)
    if value is not None and type(value) is not bool:
        _refuse(f"{where}.{name}", "true or false", shown(value))
    return value


def take_timeout_us(parameters: dict[str, Parameter]) -> int:
    """Remove the parameter `timeout` of a request, and return it; 0 if there is none.

    Raises:
        Rejected: `INVALID_REQUEST`: it is no number of microseconds.
    """
    timeout_us = parameters.pop(TIMEOUT, 0)
    if type(timeout_us) is not int or timeout_us < 0:
        _refuse("parameters.timeout", "microseconds, 0 or more", shown(timeout_us))
    return timeout_us


def decode_raw(body: bytes, signature: Signature) -> InferCall:
    """Return the request whose body is nothing but the one input of its model.

    The extension calls this a raw binary request: the JSON has 0 bytes. The batch dimension, if
    there is one, is 1; one other dimension may be free, and follows from the size. The body for an
    input of BYTES is its one element, without its length.

    Raises:
        Rejected: `INVALID_REQUEST`: the model does not have one input, or its shape has several
            free dimensions; `INVALID_TENSOR`: the size does not fit.
    """
    if len(signature.inputs) != 1:
        _refuse("body", "JSON, since the model has several inputs", "a bare tensor")
    (spec,) = signature.inputs
    shape = [1, *spec.shape[1:]] if signature.batched else list(spec.shape)
    if shape.count(-1) > 1:
        _refuse("body", f"JSON, since the shape {list(spec.shape)} is open", "a bare tensor")
    if spec.datatype == "BYTES":
        shape = [1 if size == -1 else size for size in shape]
        if math.prod(shape) != 1:
            _refuse("body", f"JSON, since {spec.name} has several elements", "a bare tensor")
        content = join_elements([body])
    else:
        itemsize = DATATYPES[spec.datatype].itemsize
        row_bytes = itemsize * math.prod(size for size in shape if size != -1)
        shape = [len(body) // max(row_bytes, 1) if size == -1 else size for size in shape]
        check_tensor(spec.datatype, shape, body, "body")
        content = body
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), content)
    return InferCall(None, {spec.name: tensor}, None, {}, 0, {}, True)


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    raise Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=str(got))


# --- answers ----------------------------------------------------------------------------------


def encode_answer(
    answer: Response, call: InferCall | None = None, regions: RegionAccess = NO_REGIONS
) -> EncodedAnswer:
    """Encode an answer in the forms that the call asks for; without a call, all in JSON.

    Raises:
        Rejected: `INVALID_REQUEST`: an output does not fit its place in shared memory.
    """
    outputs: list[InferOutput] = []
    tensors: list[bytes | memoryview] = []
    for name, array in answer.outputs.items():
        tensor = from_array(name, array)
        binary = call is not None and call.binary.get(name, call.binary_by_default)
        data: list[Any] | UnsetType = UNSET
        parameters: Mapping[str, Parameter] | None
        if call is not None and (place := call.places.get(name)):
            regions.write(place, tensor.data, f"output {name}")
            parameters = parameters_of(place, len(tensor.data))
        elif binary:
            parameters = {BINARY_SIZE: len(tensor.data)}
            tensors.append(tensor.data)
        else:
            data, parameters = bytes_to_data(tensor)
        outputs.append(
            InferOutput(
                name=name,
                datatype=tensor.datatype,
                shape=list(tensor.shape),
                data=data,
                parameters=parameters,
            )
        )
    head = _encode(
        InferResponse(
            model_name=answer.model_name,
            model_version=answer.model_version,
            id=answer.id,
            parameters=answer.parameters,
            outputs=outputs,
        )
    )
    if not tensors:
        return EncodedAnswer(head, None)
    return EncodedAnswer(b"".join([head, *tensors]), len(head))
