"""Client-side codec: encode arrays into a request's value, decode an answer's into arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.codec.json_data import ENCODING, data_to_bytes, to_json
from headrace.protocol.codec.requests import JsonInferenceRequest, JsonInputTensor
from headrace.protocol.compression import decompress
from headrace.protocol.headers import (
    JSON,
    MSGPACK_TYPES,
    HeaderName,
    parse_envelope,
)
from headrace.protocol.messages import (
    ErrorDetails,
    ErrorResponse,
    InferenceRequest,
    InputTensor,
    OutputTensor,
    Parameter,
    Parameters,
    RequestedOutput,
    Tensor,
)
from headrace.protocol.tensors import from_array, to_array
from headrace.tuning import TUNING

_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


def encode_request(
    content_type: str,
    model: str,
    inputs: Mapping[str, NDArray[Any] | Tensor],
    *,
    version: str | None = None,
    id: str | None = None,
    parameters: Mapping[str, Parameter] | None = None,
    outputs: Sequence[str] | None = None,
) -> bytes:
    """Return the value of a request record.

    Args:
        content_type: `application/msgpack` or `application/json`.
        model: name of the model.
        inputs: arrays, or checked tensors of these names; shapes include the batch dimension.
        version: model version; None for the newest.
        id: the caller's own identifier of the request.
        parameters: parameters of the request.
        outputs: names of the requested outputs; None for all.

    Raises:
        Rejected: `INVALID_TENSOR`: an array has a dtype that the protocol does not know.
        ValueError: unknown content type.
    """
    tensors = [
        value if isinstance(value, Tensor) else from_array(name, value)
        for name, value in inputs.items()
    ]
    wanted = None if outputs is None else [RequestedOutput(name=name) for name in outputs]
    fields: dict[str, Any] = {
        "model_name": model,
        "model_version": version,
        "id": id,
        "parameters": None if parameters is None else dict(parameters),
        "outputs": wanted,
    }
    if content_type in MSGPACK_TYPES:
        return _encode_msgpack(
            InferenceRequest(inputs=[_input(tensor) for tensor in tensors], **fields)
        )
    if content_type == JSON:
        return _encode_json(
            JsonInferenceRequest(
                inputs=[to_json(JsonInputTensor, tensor) for tensor in tensors], **fields
            )
        )
    raise ValueError(f"content_type: expected MessagePack or JSON, got {content_type}")


def _input(tensor: Tensor) -> InputTensor:
    return InputTensor(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=list(tensor.shape),
        data=memoryview(tensor.data),
    )


# --- answers ----------------------------------------------------------------------------------


RECORD = "record"
"""Output whose only element is the answer, if that is a record with outputs in it."""


class Answer(NamedTuple):
    """Response whose outputs are read-only arrays by name; other fields are unchanged."""

    model_name: str
    model_version: str
    id: str | None
    outputs: dict[str, NDArray[Any]]
    parameters: dict[str, Parameter]


class _JsonOutput(msgspec.Struct, kw_only=True):
    name: str
    datatype: str
    shape: list[int]
    data: Any
    parameters: Parameters | None = None


class _Fields(msgspec.Struct, kw_only=True):
    """Fields of an answer of either kind, except its outputs."""

    model_name: str = ""
    model_version: str = ""
    id: str | None = None
    parameters: dict[str, Parameter] = {}
    error: str | None = None
    error_details: ErrorDetails | None = None


class _Packed(_Fields, kw_only=True):
    outputs: list[OutputTensor] = []


class _Json(_Fields, kw_only=True):
    outputs: list[_JsonOutput] = []


_decode_msgpack = msgspec.msgpack.Decoder(_Packed).decode
_decode_json = msgspec.json.Decoder(_Json).decode


def decode_response(
    headers: Sequence[tuple[str, bytes | None]], value: bytes | memoryview | None
) -> Answer | ErrorResponse:
    """Decode an answer of either kind.

    Raises:
        Rejected: `INTERNAL`: the record is not an answer from Headrace.
    """
    envelope = parse_envelope(headers, 0, 0)
    content_type = envelope.content_type
    if value is None:
        raise _unreadable("a value", "null")
    if envelope.content_encoding:
        value = _decompress(value, envelope.content_encoding)
    record_of = dict(headers).get(HeaderName.RECORD_OF)
    if record_of is not None:
        model, _, version = record_of.decode("utf-8", "replace").partition("/")
        return Answer(model, version, None, {RECORD: _element(bytes(value))}, {})
    body: _Packed | _Json
    try:
        if content_type in MSGPACK_TYPES:
            body = _decode_msgpack(value)
            tensors = [_tensor(output) for output in body.outputs]
        elif content_type == JSON:
            body = _decode_json(value)
            tensors = [_tensor_of_json(output) for output in body.outputs]
        else:
            raise _unreadable("MessagePack or JSON", content_type)
    except DECODE_ERRORS as error:
        raise _unreadable("a response", str(error)) from error
    if body.error is not None:
        details = body.error_details or ErrorDetails(code=Code.INTERNAL, stage="", retriable=False)
        return ErrorResponse(id=body.id, error=body.error, error_details=details)
    outputs = {tensor.name: to_array(tensor) for tensor in tensors}
    return Answer(body.model_name, body.model_version, body.id, outputs, body.parameters)


def answer_takes_long(
    headers: Sequence[tuple[str, bytes | None]], value: bytes | memoryview | None, inline_bytes: int
) -> bool:
    """Return True if an answer would take `decode_response` long: one of more than `inline_bytes`
    that is compressed, or in JSON, or has an output of BYTES.
    """
    if value is None or len(value) <= inline_bytes:
        return False
    envelope = parse_envelope(headers, 0, 0)
    if envelope.content_encoding or envelope.content_type == JSON:
        return True
    if envelope.content_type not in MSGPACK_TYPES or HeaderName.RECORD_OF in dict(headers):
        return False
    try:
        outputs = _decode_msgpack(value).outputs
    except DECODE_ERRORS:
        return False
    return any(output.datatype == "BYTES" for output in outputs)


def _element(value: bytes) -> NDArray[Any]:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def _decompress(value: bytes | memoryview, coding: str) -> bytes:
    try:
        return decompress(value, coding, TUNING.protocol.max_decompressed_bytes, "answer")
    except Rejected as error:
        raise Rejected(Code.INTERNAL, error.message) from error


def _tensor(output: OutputTensor) -> Tensor:
    return Tensor(output.name, output.datatype, tuple(output.shape), output.data)


def _tensor_of_json(output: _JsonOutput) -> Tensor:
    encoding = (output.parameters or {}).get(ENCODING)
    where = f"outputs.{output.name}"
    content = data_to_bytes(output.datatype, output.shape, output.data, encoding, where)
    return Tensor(output.name, output.datatype, tuple(output.shape), content)


def _unreadable(expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INTERNAL, "answer", expected=expected, got=got)
