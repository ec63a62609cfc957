"""Bodies of TensorFlow Serving's `:predict`, which KServe calls its protocol of version 1.

Sources: https://www.tensorflow.org/tfx/serving/api_rest ("Predict API"), and
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol. A request has no
datatypes and shapes: they come from the model and from the nesting of the values.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from headrace.client import Response
from headrace.errors import Code, Rejected
from headrace.gateway.codec import InferCall
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.codec import faults
from headrace.protocol.codec.faults import DECODE_ERRORS, shown
from headrace.protocol.codec.json_data import (
    BASE64,
    ENCODING,
    bytes_to_data,
    count_values,
    data_to_bytes,
)
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import check_shape, from_array
from headrace.tuning import TUNING

_B64: Final = "b64"


class PredictCall(NamedTuple):
    """A request as a caller sent it.

    Attributes:
        call: the same request in the terms of the Open Inference Protocol.
        by_row: whether it has `instances`, so that the answer has `predictions`.
    """

    call: InferCall
    by_row: bool


class PredictRequest(Struct, kw_only=True):
    """A request of TensorFlow Serving's protocol: `instances` or `inputs`."""

    signature_name: str = ""
    instances: list[Any] | None = None
    inputs: Any = UNSET


class PredictResponse(Struct, kw_only=True):
    """The answer: `predictions` to `instances`, or `outputs` to `inputs`."""

    predictions: list[Any] | UnsetType = UNSET
    outputs: Any = UNSET


_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode = msgspec.json.Decoder(PredictRequest).decode
_encode = msgspec.json.Encoder().encode


def decode_predict(
    body: bytes, signature: Signature, most_values: int = TUNING.gateway.max_predict_values
) -> PredictCall:
    """Decode a request: `instances`, one value for each row, or `inputs`, one for each input.

    A value is an object by the names of the inputs, or bare if the model has a single input.
    Elements of BYTES are strings, or `{"b64": …}` with base64.

    Raises:
        Rejected: `INVALID_REQUEST` or `INVALID_TENSOR`, with the place in the body; `TOO_LARGE`: it
            has more values than `most_values`.
    """
    try:
        if len(body) > most_values:  # each takes a byte or more
            _check_json(body)
            _check_values(count_values(body), most_values)
        request = _decode(body)
    except DECODE_ERRORS as error:
        raise faults.refusal(error, body, faults.JSON) from error
    by_row = request.instances is not None
    if by_row == (request.inputs is not UNSET):
        raise _mismatch("body", '"instances" or "inputs"', "both" if by_row else "neither")
    if by_row and not signature.batched:
        raise _mismatch("body", '"inputs", since the model takes no batches', '"instances"')
    if by_row:
        values: Mapping[str, Any] = _columns(request.instances or [], signature)
    else:
        values = _named(request.inputs, signature, "inputs")
    tensors = {
        spec.name: _tensor(spec, values[spec.name], "instances" if by_row else "inputs")
        for spec in signature.inputs
    }
    return PredictCall(InferCall(None, tensors, None, {}, 0, {}, False), by_row)


def _check_values(values: int, most: int) -> None:
    """Refuse a body of too many values, which would all be objects of Python at once."""
    if values > most:
        expected = f"at most {most} values (commas and opening brackets)"
        raise Rejected.mismatch(Code.TOO_LARGE, "body", expected=expected, got=str(values))


def _columns(instances: list[Any], signature: Signature) -> dict[str, Any]:
    """Return the values of each input over the rows."""
    if not instances:
        raise _mismatch("instances", "at least one", "none")
    rows = [_named(row, signature, f"instances[{n}]") for n, row in enumerate(instances)]
    return {spec.name: [row[spec.name] for row in rows] for spec in signature.inputs}


def _named(value: Any, signature: Signature, where: str) -> Mapping[str, Any]:
    """Return a value by the names of the inputs."""
    names = [spec.name for spec in signature.inputs]
    if isinstance(value, dict) and value.keys() == set(names):
        return value
    if len(names) == 1 and not (isinstance(value, dict) and value.keys() != {_B64}):
        return {names[0]: value}
    got = _shown_names(value) if isinstance(value, dict) else shown(value)
    raise _mismatch(where, f"an object of {', '.join(names)}", got)


def _shown_names(value: Mapping[str, Any], most: int = TUNING.gateway.shown_names) -> str:
    if not value:
        return "an empty object"
    names = ", ".join(map(shown, islice(value, most)))
    rest = f" and {len(value) - most} more" if len(value) > most else ""
    return f"one of {names}{rest}"


def _tensor(spec: TensorSpec, value: Any, where: str) -> Tensor:
    where = f"{where}.{spec.name}"
    data = value if isinstance(value, list) else [value]
    shape: list[int] = []
    level: Any = data
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    encoding = None
    if spec.datatype == "BYTES":
        check_shape(spec.datatype, shape, where)  # which bounds the depth
        data, encoding = _all_base64(data, len(shape)), BASE64
    content = data_to_bytes(spec.datatype, shape, data, encoding, where)
    if not (spec.shape or isinstance(value, list)):
        shape = []
    return Tensor(spec.name, spec.datatype, tuple(shape), content)


def _all_base64(value: Any, depth: int) -> Any:
    """Return strings, and objects of base64, as base64; anything else unchanged."""
    match value:
        case list() if depth:
            return [_all_base64(each, depth - 1) for each in value]
        case str():
            return base64.b64encode(value.encode()).decode()
        case {"b64": str(encoded)} if len(value) == 1:
            return encoded
    return value


def encode_predictions(answer: Response, request: PredictCall) -> bytes:
    """Encode an answer: `predictions` by row for `instances`, or `outputs` for `inputs`.

    With a single output its values are bare; with several they are objects by name.
    """
    values = {name: _nested(name, array) for name, array in answer.outputs.items()}
    if not request.by_row:
        return _encode(PredictResponse(outputs=_bare(values)))
    names, columns = values.keys(), values.values()
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return _encode(PredictResponse(predictions=[_bare(row) for row in rows]))


def _bare(values: dict[str, Any]) -> Any:
    return next(iter(values.values())) if len(values) == 1 else values


def _nested(name: str, array: NDArray[Any]) -> Any:
    """Return a tensor as nested lists; elements of BYTES that are no text as base64."""
    tensor = from_array(name, array)
    elements, parameters = bytes_to_data(tensor)
    if parameters is not None and parameters.get(ENCODING) == BASE64:
        elements = [{_B64: each} for each in elements]
    nested = np.empty(len(elements), dtype=object)
    nested[:] = elements
    return nested.reshape(tensor.shape).tolist()


def _mismatch(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=got)
