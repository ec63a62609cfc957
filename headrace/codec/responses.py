"""Response records: outputs, or the error, in the form in which the request came."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.codec.json_data import bytes_to_data
from headrace.envelope import MSGPACK_TYPES
from headrace.errors import Code
from headrace.messages import (
    ErrorDetails,
    ErrorResponse,
    Failure,
    InferenceResponse,
    OutputTensor,
    Parameter,
    Parameters,
    Request,
    Tensor,
)


class JsonOutputTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One output of a response in JSON: `data` is flat, row-major."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]
    parameters: Parameters | None = None


class JsonInferenceResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The value of a response record in JSON; see `headrace.messages.InferenceResponse`."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[JsonOutputTensor]
    parameters: dict[str, Parameter] = {}


_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


def encode_response(request: Request, now_us: int) -> bytes:
    """The value of the response record of a request that has its outputs.

    MessagePack for a request in MessagePack, otherwise JSON. `parameters` says where the time
    went: `queue_us` from ingest until the batch was formed, `compute_us` in the model, and
    `batch_us` in the batch besides, until `now_us`.

    Args:
        request: with `outputs`.
        now_us: epoch microseconds.
    """
    assert request.outputs is not None
    in_batch_us = now_us - request.formed_us - request.compute_us
    parameters: dict[str, Parameter] = {
        "queue_us": max(request.formed_us - request.ingested_us, 0),
        "batch_us": max(in_batch_us, 0),
        "compute_us": request.compute_us,
        "batch_size": request.batch_rows,
    }
    if request.envelope.content_type in MSGPACK_TYPES:
        return _encode_msgpack(
            InferenceResponse(
                model_name=request.model,
                model_version=request.version,
                id=request.id,
                outputs=[
                    OutputTensor(
                        name=tensor.name,
                        datatype=tensor.datatype,
                        shape=list(tensor.shape),
                        data=memoryview(tensor.data),
                    )
                    for tensor in request.outputs
                ],
                parameters=parameters,
            )
        )
    return _encode_json(
        JsonInferenceResponse(
            model_name=request.model,
            model_version=request.version,
            id=request.id,
            outputs=[_json_output(tensor) for tensor in request.outputs],
            parameters=parameters,
        )
    )


def _json_output(tensor: Tensor) -> JsonOutputTensor:
    elements, parameters = bytes_to_data(tensor)
    return JsonOutputTensor(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=list(tensor.shape),
        data=elements,
        parameters=None if parameters is None else dict(parameters),
    )


def encode_error(request: Request, failure: Failure) -> bytes:
    """The value of the response record of a request that failed, in the form of its request."""
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
    if request.envelope.content_type in MSGPACK_TYPES:
        return _encode_msgpack(response)
    return _encode_json(response)
