"""Decode request records into messages with valid tensors.

In MessagePack, one pass of msgspec checks types and lengths and leaves tensors as views of the
value; in JSON, `data` is converted to the same raw bytes. Both refuse an invalid request with the
path and the reason. A payload of any other type is not decoded here: the model in `x-model`
defines how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.protocol.codec import faults
from headrace.protocol.codec.faults import DECODE_ERRORS, refusal
from headrace.protocol.codec.json_data import ENCODING, data_to_bytes, text_to_bytes
from headrace.protocol.compression import decompress
from headrace.protocol.headers import JSON, MSGPACK_TYPES, begins_as_json, begins_as_map
from headrace.protocol.messages import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    Envelope,
    InferenceRequest,
    InputTensor,
    Name,
    Parameter,
    Parameters,
    RequestedOutput,
    Shape,
    Text,
)
from headrace.protocol.tensors import check_tensor
from headrace.tuning import TUNING


class Contradiction(Rejected):
    """A value names another model or version than the header `x-model`."""


class JsonInputTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One input of a request in JSON: `data` is flat or nested, row-major."""

    name: Name
    datatype: Text
    shape: Shape
    data: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "array"})]
    parameters: Parameters | None = None


class _JsonInputText(JsonInputTensor):
    """One input whose `data` is still JSON text."""

    data: msgspec.Raw


class JsonInferenceRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The value of a request record in JSON; see `headrace.protocol.messages.InferenceRequest`."""

    model_name: Text = ""
    model_version: Text | None = None
    id: Text | None = None
    parameters: Parameters | None = None
    inputs: Annotated[list[JsonInputTensor], msgspec.Meta(max_length=MAX_INPUTS)]
    outputs: Annotated[list[RequestedOutput], msgspec.Meta(max_length=MAX_OUTPUTS)] | None = None


class _LargeJsonRequest(JsonInferenceRequest):
    """A large request, whose inputs are converted in parts."""

    inputs: Annotated[  # type: ignore[assignment]  # nothing is ever appended
        list[_JsonInputText], msgspec.Meta(max_length=MAX_INPUTS)
    ]


class _CallersName(msgspec.Struct):
    id: Text | None = None


class _NamedVersion(msgspec.Struct):
    model_name: Text = ""
    model_version: Text | None = None


_PLACES = tuple(f"inputs[{number}]" for number in range(MAX_INPUTS))
_decode_msgpack = msgspec.msgpack.Decoder(InferenceRequest).decode
_decode_json = msgspec.json.Decoder(JsonInferenceRequest).decode
_decode_large_json = msgspec.json.Decoder(_LargeJsonRequest).decode
_decode_id_msgpack = msgspec.msgpack.Decoder(_CallersName).decode
_decode_id_json = msgspec.json.Decoder(_CallersName).decode
_decode_version_msgpack = msgspec.msgpack.Decoder(_NamedVersion).decode
_decode_version_json = msgspec.json.Decoder(_NamedVersion).decode


def check_value(value: bytes | memoryview | None, limits: LimitSettings) -> bytes | memoryview:
    """Return a record's value if it has one of an allowed size; for raw payloads as well.

    Raises:
        Rejected: `INVALID_REQUEST` for a null value, `TOO_LARGE`.
    """
    if value is None:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, "value", expected="an inference request", got="null"
        )
    if len(value) > limits.max_request_bytes:
        raise _too_large("value", len(value), limits)
    return value


def plain_value(
    value: bytes | memoryview | None, envelope: Envelope, limit_bytes: int
) -> bytes | memoryview | None:
    """Return a record's value without its `content-encoding`.

    Raises:
        Rejected: `TOO_LARGE`, or `INVALID_REQUEST` for a damaged value.
    """
    if value is None or not envelope.content_encoding:
        return value
    return decompress(value, envelope.content_encoding, limit_bytes, "value")


def decode_request(
    value: bytes | memoryview | None, envelope: Envelope, limits: LimitSettings
) -> InferenceRequest:
    """Decode a request record's value and check its tensors.

    The value must not be compressed any more, see `plain_value`. Each input has a known datatype,
    a valid shape, and as many bytes as the shape requires; in MessagePack they are a view of
    `value`. `headrace.models` checks whether the model accepts them. `model_name` and
    `model_version` are from the body or `x-model`.

    Raises:
        Rejected: `INVALID_REQUEST`, `INVALID_TENSOR` or `TOO_LARGE`.
    """
    if envelope.fault is not None:
        raise Rejected(Code.INVALID_REQUEST, envelope.fault)
    value = check_value(value, limits)
    content_type = envelope.content_type
    if content_type in MSGPACK_TYPES:
        request = _from_msgpack(value, content_type)
    elif content_type == JSON:
        request = _from_json(
            value, limits, is_large=len(value) > TUNING.protocol.payload_part_bytes
        )
    else:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            "header content-type",
            expected="application/msgpack or application/json for this model",
            got=content_type,
        )
    _check_parameters(request)
    if len(request.inputs) != 1:
        _check_inputs(request)
    if request.outputs is not None:
        _check_distinct([output.name for output in request.outputs], "outputs")
    if envelope.model or not request.model_name or request.model_version == "":
        _complete_model(request, envelope)
    return request


def _from_msgpack(value: bytes | memoryview, content_type: str) -> InferenceRequest:
    try:
        request = _decode_msgpack(value)
    except DECODE_ERRORS as error:
        if begins_as_json(value):
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "header content-type",
                expected=f"{JSON} for a value that begins with {{",
                got=content_type or "none, which means MessagePack",
            ) from error
        refused = refusal(error, value, faults.MSGPACK)
        if not content_type and value and not begins_as_map(value):
            text = f"{refused.message}; without content-type a value is MessagePack"
            raise Rejected(refused.code, text) from error
        raise refused from error
    for tensor, where in zip(request.inputs, _PLACES, strict=False):
        check_tensor(tensor.datatype, tensor.shape, tensor.data, where)
    return request


def _from_json(
    value: bytes | memoryview, limits: LimitSettings, *, is_large: bool
) -> InferenceRequest:
    body: JsonInferenceRequest
    try:
        body = _decode_large_json(value) if is_large else _decode_json(value)
    except DECODE_ERRORS as error:
        raise refusal(error, value, faults.JSON) from error
    total = 0
    inputs: list[InputTensor] = []
    for number, tensor in enumerate(body.inputs):
        where = f"inputs[{number}]"
        encoding = (tensor.parameters or {}).get(ENCODING)
        convert = text_to_bytes if is_large else data_to_bytes
        content = convert(tensor.datatype, tensor.shape, tensor.data, encoding, where)
        total += len(content)
        if total > limits.max_request_bytes:
            raise _too_large("inputs", total, limits)
        inputs.append(
            InputTensor(
                name=tensor.name,
                datatype=tensor.datatype,
                shape=tensor.shape,
                data=memoryview(content),
                parameters=tensor.parameters,
            )
        )
    return InferenceRequest(
        model_name=body.model_name,
        model_version=body.model_version,
        id=body.id,
        parameters=body.parameters,
        inputs=inputs,
        outputs=body.outputs,
    )


_NO_STATE = "none: no state is kept between requests"
_NO_EXTENSION = "none: tensors are in the value, as the content type has them"
_OF_REQUESTS = {
    "timeout": "none; the header x-timeout-ms says it, in milliseconds",
    "priority": "none; the header x-priority says it, larger goes first",
    "sequence_id": _NO_STATE,
    "sequence_start": _NO_STATE,
    "sequence_end": _NO_STATE,
    "binary_data_output": _NO_EXTENSION,
}
_OF_TENSORS = {
    "binary_data": _NO_EXTENSION,
    "binary_data_size": _NO_EXTENSION,
    "shared_memory_region": _NO_EXTENSION,
    "shared_memory_offset": _NO_EXTENSION,
    "shared_memory_byte_size": _NO_EXTENSION,
    "classification": "none; postprocess in the model's model.toml does it",
}


def _check_parameters(request: InferenceRequest) -> None:
    """Refuse parameters that have an effect in other servers of the protocol but none here.

    0, false and the empty string request no effect and are accepted.
    """
    if request.parameters:
        _refuse_known(request.parameters, "parameters", _OF_REQUESTS)
    for number, tensor in enumerate(request.inputs):
        if tensor.parameters:
            _refuse_known(tensor.parameters, f"inputs[{number}].parameters", _OF_TENSORS)
    for number, output in enumerate(request.outputs or ()):
        if output.parameters:
            _refuse_known(output.parameters, f"outputs[{number}].parameters", _OF_TENSORS)


def _refuse_known(
    parameters: Mapping[str, Parameter], where: str, known: Mapping[str, str]
) -> None:
    for name in parameters.keys() & known.keys():
        if parameters[name]:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                f"{where}.{name}",
                expected=known[name],
                got=faults.shown(parameters[name]),
            )


def _check_inputs(request: InferenceRequest) -> None:
    if not request.inputs:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, "inputs", expected="at least one input", got="none"
        )
    _check_distinct([tensor.name for tensor in request.inputs], "inputs")


def _check_distinct(names: list[str], where: str) -> None:
    if len(set(names)) == len(names):
        return
    number = next(n for n, name in enumerate(names) if name in names[:n])
    raise Rejected.mismatch(
        Code.INVALID_REQUEST,
        f"{where}[{number}].name",
        expected="each name once",
        got=f'"{names[number]}" again',
    )


def _complete_model(request: InferenceRequest, envelope: Envelope) -> None:
    """Set model and version from the body or `x-model`, which must not contradict each other."""
    name, version = request.model_name, request.model_version
    if not name:
        name = envelope.model
        if not name:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "model_name",
                expected="a model, here or in the header x-model",
                got="none",
            )
        request.model_name = name
    elif envelope.model.startswith(f"{name}@"):
        request.model_name = envelope.model  # a label of the model that the body names
    elif envelope.model and envelope.model != name:
        raise _contradiction("model_name", envelope.model, name)
    if not version:
        request.model_version = envelope.version or None
    elif envelope.version and envelope.version != version:
        raise _contradiction("model_version", envelope.version, version)


def _contradiction(where: str, header: str, body: str) -> Rejected:
    return Contradiction.mismatch(
        Code.INVALID_REQUEST, where, expected=f'"{header}", as in x-model', got=f'"{body}"'
    )


def _too_large(where: str, size: int, limits: LimitSettings) -> Rejected:
    expected = f"at most {limits.max_request_bytes} bytes"
    return Rejected.mismatch(Code.TOO_LARGE, where, expected=expected, got=str(size))


def takes_long(
    value: bytes | memoryview, content_type: str, json_bytes: int, texts_bytes: int
) -> bool:
    """Return True if a value would take `decode_request` long: JSON of more than `json_bytes`, or
    an input of BYTES in MessagePack of more than `texts_bytes`, whose elements are checked.
    """
    if content_type == JSON:
        return len(value) > json_bytes
    if content_type not in MSGPACK_TYPES or len(value) <= texts_bytes:
        return False
    try:
        request = _decode_msgpack(value)
    except DECODE_ERRORS:
        return False
    return any(
        tensor.datatype == "BYTES" and len(tensor.data) > texts_bytes for tensor in request.inputs
    )


def callers_id(value: bytes | memoryview | None, envelope: Envelope) -> str | None:
    """Return the `id` in a value that `decode_request` refused; None if it is unreadable."""
    is_json = envelope.content_type == JSON or begins_as_json(value)
    decode = _decode_id_json if is_json else _decode_id_msgpack
    if value is None or envelope.content_type not in MSGPACK_TYPES | {JSON}:
        return None
    try:
        return decode(value).id
    except DECODE_ERRORS:
        return None


def find_label(value: bytes | memoryview | None, envelope: Envelope) -> str | None:
    """Return the label by which a request that `decode_request` accepted names a version.

    Returns:
        "" if it names no version; None if it names one by number, or may do so.
    """
    content_type = envelope.content_type
    if envelope.version:
        return None
    _, sign, label = envelope.model.partition("@")
    if value and content_type in MSGPACK_TYPES | {JSON}:
        decode = _decode_version_json if content_type == JSON else _decode_version_msgpack
        try:
            plain = plain_value(value, envelope, TUNING.protocol.max_decompressed_bytes)
            named = decode(plain or b"")
        except (*DECODE_ERRORS, Rejected):  # not the caller's fault: assume that it names one
            return None
        if named.model_version:
            return None
        if not sign:
            _, _, label = named.model_name.partition("@")
    return label
