"""Parsing of answers as plain maps, as a consumer in another language would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.log.port import Record
from headrace.tools.demo.questions import CORRELATION_ID, JSON

OK = "ok"


class Answer(NamedTuple):
    """An answer.

    Attributes:
        correlation_id: of the question.
        request: `topic/partition/offset` of the request record.
        status: `ok`, or the error's code.
        message: error message for people.
        labels: one per row.
        queue_us, batch_us, compute_us, batch_size: the response's parameters of these names.
    """

    correlation_id: bytes
    request: str
    status: str
    message: str = ""
    labels: tuple[str, ...] = ()
    queue_us: int = 0
    batch_us: int = 0
    compute_us: int = 0
    batch_size: int = 0


def read_answer(record: Record, file_labels: Sequence[str]) -> Answer:
    """Parse a response record.

    `file_labels` are the names of the magika model's outputs, in their order.

    Raises:
        KeyError, ValueError: the record violates the protocol.
    """
    headers = {name: value for name, value in record.headers if value is not None}
    body = _body(record.value or b"", headers.get("content-type", b"").decode())
    common = (
        headers[CORRELATION_ID],
        headers["x-request"].decode(),
        headers["x-status"].decode(),
    )
    if "error" in body:
        return Answer(*common, message=body["error"])
    timings = body["parameters"]
    return Answer(
        *common,
        labels=_labels(body["outputs"], file_labels),
        queue_us=timings["queue_us"],
        batch_us=timings["batch_us"],
        compute_us=timings["compute_us"],
        batch_size=timings["batch_size"],
    )


def _body(value: bytes, content_type: str) -> dict[str, Any]:
    decode = msgspec.json.decode if content_type == JSON else msgspec.msgpack.decode
    return decode(value, type=dict[str, Any])


def _labels(outputs: Sequence[Mapping[str, Any]], file_labels: Sequence[str]) -> tuple[str, ...]:
    by_name = {output["name"]: output for output in outputs}
    if "label" in by_name:
        return tuple(str(label) for label in _array(by_name["label"]))
    scores = _array(by_name["target_label"])
    return tuple(file_labels[best] for best in scores.argmax(axis=1))


def _array(output: Mapping[str, Any]) -> Any:
    values = output["data"]
    if isinstance(values, bytes):
        dtypes = {"FP32": "<f4", "INT64": "<i8"}
        return np.frombuffer(values, dtypes[output["datatype"]]).reshape(output["shape"])
    return np.asarray(values).reshape(output["shape"])
