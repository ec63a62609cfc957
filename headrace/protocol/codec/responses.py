"""Encode response records: outputs or the error, in the format of the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import Code
from headrace.primitives.bounded_cache import BoundedCache
from headrace.protocol.codec.json_data import to_json
from headrace.protocol.headers import MSGPACK_TYPES, error_content_type, tensors_content_type
from headrace.protocol.messages import (
    ErrorDetails,
    ErrorResponse,
    Failure,
    InferenceResponse,
    OutputTensor,
    Parameter,
    Parameters,
    Request,
    Tensor,
    TensorMetadata,
    is_whole_answer,
)
from headrace.protocol.tensors import split_elements
from headrace.tuning import TUNING


class JsonOutputTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One output of a response in JSON: `data` is flat, row-major."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]
    parameters: Parameters | None = None


class JsonInferenceResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The value of a response record in JSON: `headrace.protocol.messages.InferenceResponse`."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[JsonOutputTensor]
    parameters: dict[str, Parameter] = {}


_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode

_FIXED_MAP = 0x80  # a MessagePack map of up to 15 fields
_TUNING = TUNING.protocol
_frames: BoundedCache[tuple[object, ...], tuple[bytes, ...] | None] = BoundedCache(
    _TUNING.cached_frames
)
_templates: BoundedCache[tuple[object, ...], bytes | None] = BoundedCache(_TUNING.cached_frames)
_packed_timings: BoundedCache[tuple[int, ...], bytes] = BoundedCache(_TUNING.cached_frames)


def encode_response(request: Request, now_us: int) -> bytes:
    """Return the value of the response record of a request with outputs.

    The element itself for a whole answer; otherwise MessagePack or JSON, as the request accepts,
    by default its own format. `parameters` has the timings: `queue_us` from ingest until the batch
    was formed, `compute_us` in the model, and `batch_us` for the rest of the batch's time until
    `now_us`.

    Args:
        request: a request that has `outputs`.
        now_us: epoch microseconds.
    """
    if is_whole_answer(request.output_metadata):
        return split_elements(_outputs(request)[0])[0]
    timings = _timings(request, now_us)
    if tensors_content_type(request.envelope) in MSGPACK_TYPES:
        return _framed(request, timings)
    return _encode_json(
        JsonInferenceResponse(
            model_name=request.model,
            model_version=request.version,
            id=request.id,
            outputs=[to_json(JsonOutputTensor, tensor) for tensor in _outputs(request)],
            parameters=_parameters(timings),
        )
    )


def encode_responses(requests: Sequence[Request], now_us: int) -> list[bytes]:
    """Return the `encode_response` of each request, in order.

    Requests that ran together and were read together differ only in their tensors' bytes, and are
    mostly adjacent: these are filled into one template.
    """
    values: list[bytes] = []
    append = values.append
    last: Request | None = None
    template: bytes | None = None
    for request in requests:
        if (
            last is None
            or request.output_metadata is not last.output_metadata
            or request.ingested_us != last.ingested_us
            or (request.batch is not last.batch and request.batch != last.batch)
            or request.version != last.version
            or request.model != last.model
        ):
            last = request
            template = _template(request, now_us)
        if (
            template is None
            or request.id is not None
            or (envelope := request.envelope).content_type not in MSGPACK_TYPES
            or envelope.accept
        ):
            append(encode_response(request, now_us))
        else:
            append(template % request.output_data)
    return values


def _timings(request: Request, now_us: int) -> tuple[int, ...]:
    batch = request.batch
    formed_us, compute_us = batch.formed_us, batch.compute_us
    queue_us, batch_us = formed_us - request.ingested_us, now_us - formed_us - compute_us
    return (
        queue_us if queue_us > 0 else 0,
        batch_us if batch_us > 0 else 0,
        compute_us,
        batch.rows,
    )


def _template(request: Request, now_us: int) -> bytes | None:
    """Return the value of an answer without an id, with `%b` for each tensor's bytes; None if
    the outputs are too large or their sizes do not follow from their shapes.
    """
    metadata, data = request.output_metadata, request.output_data
    if not metadata or data is None or sum(map(len, data)) > _TUNING.templated_output_bytes:
        return None
    key = (request.model, request.version, metadata)
    before = _templates.get(key)
    if before is None and key not in _templates:
        frame = _known_frame(request, metadata, data, has_id=False)
        if frame is not None:
            before = b"%b".join([each.replace(b"%", b"%%") for each in frame[::2]])
        _templates.add(key, before)
    if before is None:
        return None
    return before + _packed(_timings(request, now_us)).replace(b"%", b"%%")


def _framed(request: Request, timings: tuple[int, ...]) -> bytes:
    """Return an `InferenceResponse` in MessagePack.

    Answers of a model differ in their tensors' bytes and in few numbers. The parts around the
    bytes are encoded once and cached, as are the timings, which a whole batch shares.
    """
    metadata, data = request.output_metadata, request.output_data
    assert data is not None
    frame = _known_frame(request, metadata, data, has_id=request.id is not None)
    if frame is None:
        return _encode_msgpack(_response(request, timings))
    parts: list[bytes | memoryview] = [*frame, _packed(timings)]
    if request.id is None:
        parts[1:-2:2] = data
    else:
        parts[1:-2:2] = [_encode_msgpack(request.id), *data]
    return b"".join(parts)


def _known_frame(
    request: Request,
    metadata: tuple[TensorMetadata, ...],
    data: tuple[memoryview | bytes, ...],
    *,
    has_id: bool,
) -> tuple[bytes, ...] | None:
    key = (request.model, request.version, has_id, metadata)
    frame = _frames.get(key)
    if frame is None and key not in _frames:
        frame = _frames.add(key, _frame(request, metadata, data, has_id=has_id))
    return frame


def _packed(timings: tuple[int, ...]) -> bytes:
    packed = _packed_timings.get(timings)
    if packed is None:
        packed = _packed_timings.add(timings, _encode_msgpack(_parameters(timings)))
    return packed


def _frame(
    request: Request,
    metadata: tuple[TensorMetadata, ...],
    data: tuple[memoryview | bytes, ...],
    *,
    has_id: bool,
) -> tuple[bytes, ...] | None:
    """Return the parts of a response before the id (if it has one), before each tensor's bytes
    and after the last, with an empty item after each but the last. None if the number of bytes
    does not follow from the shape.
    """
    if any(datatype == "BYTES" for _, datatype, _ in metadata):
        return None
    encode = _encode_msgpack
    pieces: list[bytes] = []
    piece = bytes([_FIXED_MAP + 4 + has_id])
    piece += encode("model_name") + encode(request.model)
    piece += encode("model_version") + encode(request.version)
    if has_id:
        pieces += (piece + encode("id"), b"")
        piece = b""
    piece += encode("outputs") + _list_header(len(metadata))
    for (name, datatype, shape), content in zip(metadata, data, strict=True):
        size = len(content)
        piece += bytes([_FIXED_MAP + 4]) + encode("name") + encode(name)
        piece += encode("datatype") + encode(datatype) + encode("shape") + encode(shape)
        pieces += (piece + encode("data") + encode(bytes(size))[: -size or None], b"")
        piece = b""
    return (*pieces, piece + encode("parameters"))


def _outputs(request: Request) -> tuple[Tensor, ...]:
    assert request.outputs is not None
    return request.outputs


def _response(request: Request, timings: tuple[int, ...]) -> InferenceResponse:
    return InferenceResponse(
        model_name=request.model,
        model_version=request.version,
        id=request.id,
        outputs=[
            OutputTensor(name=name, datatype=datatype, shape=list(shape), data=memoryview(data))
            for name, datatype, shape, data in _outputs(request)
        ],
        parameters=_parameters(timings),
    )


def _list_header(length: int) -> bytes:
    return _encode_msgpack([None] * length)[: -length or None]


def _parameters(timings: tuple[int, ...]) -> dict[str, Parameter]:
    names = ("queue_us", "batch_us", "compute_us", "batch_size")
    return dict(zip(names, timings, strict=True))


def encode_error(request: Request, failure: Failure) -> bytes:
    """Return the value of the response record of a failed request, in its request's format,
    or the one that it accepts.
    """
    response = ErrorResponse(
        id=request.id,
        error=failure.message,
        error_details=ErrorDetails(
            code=failure.code,
            stage=failure.stage,
            retriable=Code(failure.code).is_retriable,
            retry_after_ms=failure.retry_after_ms,
        ),
    )
    if error_content_type(request) in MSGPACK_TYPES:
        return _encode_msgpack(response)
    return _encode_json(response)
