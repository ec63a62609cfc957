"""Messages of the Open Inference Protocol over gRPC: calls and answers.

An input's elements are in its `contents` or, raw, in `raw_input_contents`; a request has one of
both. Answers have `raw_output_contents`, which is what Triton's clients read. Sources: the Open
Inference Protocol, gRPC (https://github.com/kserve/open-inference-protocol), and Triton's
`grpc_service.proto` (https://github.com/triton-inference-server/common).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn, TypeAlias

import numpy as np

from headrace.client import Response
from headrace.errors import Code, Rejected
from headrace.gateway.classification import take_class_count
from headrace.gateway.codec import InferCall, take_timeout_us
from headrace.gateway.open_inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
)
from headrace.gateway.shared_memory import (
    NO_REGIONS,
    REGION,
    Place,
    Places,
    RegionAccess,
    parameters_of,
    take_place,
)
from headrace.protocol.codec.faults import shown
from headrace.protocol.messages import MAX_INPUTS, MAX_OUTPUTS, MAX_PARAMETERS, Parameter, Tensor
from headrace.protocol.tensors import (
    DATATYPES,
    check_shape,
    check_tensor,
    from_array,
    join_elements,
)
from headrace.tuning import TUNING

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` for each datatype; FP16 and BF16 have none."""

_Tensor: TypeAlias = (
    ModelInferRequest.InferInputTensor | ModelInferRequest.InferRequestedOutputTensor
)
_WIDER = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}
"""Dtype of the elements in fields that hold several datatypes."""


# --- requests ---------------------------------------------------------------------------------


def decode_call(
    request: ModelInferRequest,
    regions: RegionAccess = NO_REGIONS,
    part_elements: int = TUNING.gateway.contents_part_elements,
) -> InferCall:
    """Return the call in a request message.

    Args:
        request: the message.
        regions: of shared memory, in which tensors may be.
        part_elements: more of them in `contents` are converted so many at a time.

    Raises:
        Rejected: `INVALID_REQUEST` or `INVALID_TENSOR`, with the place in the message.
    """
    check_counts(request)
    raw = _raw_contents(request)
    inputs: dict[str, Tensor] = {}
    for number, tensor in enumerate(request.inputs):
        where = f"inputs[{number}]"
        if tensor.name in inputs:
            _refuse(f"{where}.name", "each name once", f"{shown(tensor.name)} again")
        inputs[tensor.name] = _tensor(tensor, raw, where, regions, part_elements)
    classes, places = _requested_forms(request, regions)
    parameters = _parameters(request.parameters, "parameters")
    return InferCall(
        id=request.id or None,
        inputs=inputs,
        outputs=[output.name for output in request.outputs] or None,
        timeout_us=take_timeout_us(parameters),
        parameters=parameters,
        binary={},
        binary_by_default=True,
        classes=classes,
        places=places,
    )


def check_counts(request: ModelInferRequest) -> None:
    """Refuse a message with more inputs, outputs or parameters than a request can have.

    Raises:
        Rejected: `INVALID_REQUEST`.
    """
    if len(request.inputs) > MAX_INPUTS:
        _refuse("inputs", f"at most {MAX_INPUTS}", len(request.inputs))
    if len(request.outputs) > MAX_OUTPUTS:
        _refuse("outputs", f"at most {MAX_OUTPUTS}", len(request.outputs))
    if len(request.parameters) > MAX_PARAMETERS:
        _refuse("parameters", f"at most {MAX_PARAMETERS}", len(request.parameters))


def is_decoded_by_element(request: ModelInferRequest) -> bool:
    """Return True if elements are taken one by one, which takes long for large tensors: those that
    are not raw, and those of BYTES.
    """
    return not request.raw_input_contents or any(
        tensor.datatype == "BYTES" for tensor in islice(request.inputs, MAX_INPUTS)
    )


def has_texts_in_regions(request: ModelInferRequest) -> bool:
    """Return True if an input of BYTES is in shared memory, which the message does not show the
    size of.
    """
    return any(
        tensor.datatype == "BYTES" and REGION in tensor.parameters
        for tensor in islice(request.inputs, MAX_INPUTS)
    )


def find_places(request: ModelInferRequest) -> Places:
    """Return the places in shared memory that a request names, as `decode_call` uses them: those
    before one for which it refuses the request.
    """
    return Places(
        _places_of(islice(request.inputs, MAX_INPUTS), "inputs"),
        _places_of(islice(request.outputs, MAX_OUTPUTS), "outputs"),
    )


def _places_of(tensors: Iterable[_Tensor], kind: str) -> list[tuple[Place, str]]:
    found = []
    for number, tensor in enumerate(tensors):
        where = f"{kind}[{number}]"
        try:
            place = take_place(_parameters(tensor.parameters, f"{where}.parameters"), where)
        except Rejected:  # unless there is another fault before it, `decode_call` says so
            break
        if place:
            found.append((place, where))
    return found


def _raw_contents(request: ModelInferRequest) -> Iterator[bytes] | None:
    """Return the raw contents of the inputs that are not in shared memory; None if none are raw."""
    raw = request.raw_input_contents
    if not raw:
        return None
    count = sum(REGION not in tensor.parameters for tensor in request.inputs)
    if len(raw) != count:
        expected = f"one for each of {count} inputs that are not in shared memory"
        _refuse("raw_input_contents", expected, len(raw))
    return iter(raw)


def _requested_forms(
    request: ModelInferRequest, regions: RegionAccess
) -> tuple[dict[str, int], dict[str, Place]]:
    """Return `classes` and `places` of the call."""
    classes: dict[str, int] = {}
    places: dict[str, Place] = {}
    for number, output in enumerate(request.outputs):
        where = f"outputs[{number}]"
        parameters = _parameters(output.parameters, f"{where}.parameters")
        if count := take_class_count(parameters, where):
            classes[output.name] = count
        if place := take_place(parameters, where):
            regions.check(place, where)
            places[output.name] = place
    return classes, places


def _tensor(
    tensor: ModelInferRequest.InferInputTensor,
    raw: Iterator[bytes] | None,
    where: str,
    regions: RegionAccess,
    part_elements: int,
) -> Tensor:
    """Return an input with the elements of shared memory, the next raw ones, or `contents`."""
    place = take_place(_parameters(tensor.parameters, f"{where}.parameters"), where)
    if place is None and raw is None:
        return _tensor_of_contents(tensor, where, part_elements)
    if tensor.HasField("contents"):
        _refuse(where, "contents, raw_input_contents or shared memory", "several")
    content = regions.read(place, where) if place else next(raw or iter(()), b"")
    check_tensor(tensor.datatype, tensor.shape, content, where)
    return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), content)


def _tensor_of_contents(
    tensor: ModelInferRequest.InferInputTensor, where: str, part_elements: int
) -> Tensor:
    """Return an input that is not raw."""
    count = check_shape(tensor.datatype, tensor.shape, where)
    field = _CONTENTS.get(tensor.datatype, "raw_input_contents")
    found = [each.name for each, _ in tensor.contents.ListFields()]
    if found and found != [field]:
        _refuse(f"{where}.contents", f"{field} for {tensor.datatype}", ", ".join(found))
    elements: Sequence[Any] = getattr(tensor.contents, field) if found else ()
    if len(elements) != count:
        expected = f"{count} elements for {tensor.datatype} {list(tensor.shape)}"
        _refuse(f"{where}.contents", expected, len(elements), Code.INVALID_TENSOR)
    if tensor.datatype == "BYTES":
        content = b"".join(join_elements(part) for part in _parts(elements, part_elements))
        return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), content)
    dtype = DATATYPES[tensor.datatype].dtype
    array = np.empty(count, dtype)
    start = 0
    for part in _parts(elements, part_elements):
        wide = np.array(part, _WIDER.get(field, dtype))
        narrow = array[start : start + len(wide)] = wide.astype(dtype, copy=False)
        if narrow is not wide and len(wrong := np.flatnonzero(narrow != wide)):
            place = f"{where}.contents.{field}[{start + wrong[0]}]"
            _refuse(place, tensor.datatype, wide[wrong[0]], Code.INVALID_TENSOR)
        start += len(wide)
    return from_array(tensor.name, array.reshape(tuple(tensor.shape)))


def _parts(elements: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield elements in parts. The thread releases the interpreter lock in between."""
    for start in range(0, len(elements), most):
        if start:
            time.sleep(0)
        yield elements[start : start + most]


def _parameters(found: Mapping[str, InferParameter], where: str) -> dict[str, Parameter]:
    if len(found) > MAX_PARAMETERS:
        _refuse(where, f"at most {MAX_PARAMETERS}", len(found))
    parameters: dict[str, Parameter] = {}
    for name, parameter in found.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            _refuse(f"{where}.{name}", "a value", "none")
        parameters[name] = getattr(parameter, choice)
    return parameters


def _refuse(where: str, expected: str, got: object, code: Code = Code.INVALID_REQUEST) -> NoReturn:
    raise Rejected.mismatch(code, where, expected=expected, got=str(got))


# --- answers ----------------------------------------------------------------------------------


def encode_answer(
    answer: Response, call: InferCall | None = None, regions: RegionAccess = NO_REGIONS
) -> ModelInferResponse:
    """Return the message of an answer; its tensors are raw.

    Raises:
        Rejected: `INVALID_REQUEST`: an output does not fit its place in shared memory.
    """
    message = ModelInferResponse(
        model_name=answer.model_name, model_version=answer.model_version, id=answer.id or ""
    )
    for name, value in answer.parameters.items():
        _set(message.parameters[name], value)
    for name, array in answer.outputs.items():
        tensor = from_array(name, array)
        output = message.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        content = bytes(tensor.data)
        if call is not None and (place := call.places.get(name)):
            regions.write(place, content, f"output {name}")
            for key, value in parameters_of(place, len(content)).items():
                _set(output.parameters[key], value)
            content = b""  # clients find the others by the number of their output
        message.raw_output_contents.append(content)
    return message


def _set(parameter: InferParameter, value: Parameter) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int() if value < 2**63:
            parameter.int64_param = value
        case int():
            parameter.uint64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
