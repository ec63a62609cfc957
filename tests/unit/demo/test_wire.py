"""How the demo writes its requests and reads its answers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.errors import Code
from headrace.log.port import Record
from headrace.tools.demo.questions import (
    DemoAnswer,
    Digits,
    Question,
    Questions,
    SampleFile,
    read_answer,
)

PIXELS = (np.arange(5 * 64) % 17).astype(np.uint8).reshape(5, 64)


def _reply(value: bytes, content_type: bytes, status: bytes = b"ok") -> Record:
    """A response record."""
    return Record(
        *("headrace.responses", 0, 0, 0, None, value),
        (
            ("content-type", content_type),
            ("x-status", status),
            ("x-request", b"headrace.requests/2/17"),
        ),
    )


@pytest.fixture
def questions() -> Questions:
    digits = Digits(PIXELS, np.arange(5, dtype=np.uint8))
    return Questions(digits, [SampleFile("csv", b"a,b\n1,2\n")])


def _decoded(question: Question) -> dict[str, Any]:
    value = question.record.value or b""
    if dict(question.record.headers)["content-type"] == b"application/json":
        return msgspec.json.decode(value, type=dict[str, Any])
    return msgspec.msgpack.decode(value, type=dict[str, Any])


def test_demo_images_are_little_endian_floats(questions: Questions) -> None:
    """Two rows are [2, 64] and 512 bytes, and only the label is requested."""
    question = questions.digits_msgpack(2)
    body = _decoded(question)
    (tensor,) = body["inputs"]
    assert (tensor["datatype"], tensor["shape"]) == ("FP32", [2, 64])
    assert np.frombuffer(tensor["data"], "<f4").tolist() == PIXELS[:2].ravel().tolist()
    assert body["outputs"] == [{"name": "label"}]
    assert question.labels == ("0", "1")


def test_demo_json_image_is_list_of_numbers(questions: Questions) -> None:
    """JSON has the same fields, with nested data."""
    (tensor,) = _decoded(questions.digits_json())["inputs"]
    assert tensor["data"] == [PIXELS[0].tolist()]


def test_demo_file_is_sent_unchanged(questions: Questions) -> None:
    """The record's value is the file; a header names the model."""
    record = questions.file().record
    assert record.value == b"a,b\n1,2\n"
    assert dict(record.headers)["x-model"] == b"magika"


def test_wrong_demo_requests_get_their_stated_error(questions: Questions) -> None:
    """Four kinds, of which three leave a dead letter."""
    wrong = {question.code: question.dead_letter for question in questions.invalid()}
    assert wrong == {
        Code.INVALID_TENSOR: True,
        Code.INVALID_REQUEST: True,
        Code.UNKNOWN_MODEL: True,
        Code.DEADLINE_EXCEEDED: False,
    }


def test_demo_reads_labels_in_messagepack() -> None:
    """INT64 elements become the labels, the parameters the timings."""
    label = np.array([3, 8], "<i8").tobytes()
    body = {
        "model_name": "digits",
        "model_version": "1",
        "outputs": [{"name": "label", "datatype": "INT64", "shape": [2], "data": label}],
        "parameters": {"queue_us": 5, "batch_us": 6, "compute_us": 7, "batch_size": 32},
    }
    reply = _reply(msgspec.msgpack.encode(body), b"application/msgpack")
    expected = DemoAnswer("ok", "", ("3", "8"), 5, 32)
    assert read_answer(reply, ()) == expected


def test_demo_reads_file_type_of_best_json_score() -> None:
    """Scores become the label of the largest, nested or flat."""
    scores = {"name": "target_label", "datatype": "FP32", "shape": [1, 3], "data": [0.1, 0.7, 0.2]}
    timings = {"queue_us": 5, "batch_us": 6, "compute_us": 7, "batch_size": 1}
    body = {"outputs": [scores], "parameters": timings}
    reply = _reply(msgspec.json.encode(body), b"application/json")
    assert read_answer(reply, ("csv", "ini", "json")).labels == ("ini",)


def test_demo_reads_error_with_message() -> None:
    """The header has the code, the value the words."""
    body = {"error": "no such model", "error_details": {"code": "UNKNOWN_MODEL"}}
    reply = _reply(msgspec.msgpack.encode(body), b"application/msgpack", b"UNKNOWN_MODEL")
    read = read_answer(reply, ())
    assert (read.status, read.message) == ("UNKNOWN_MODEL", "no such model")


def test_demo_refuses_answer_without_headers() -> None:
    """An answer that breaks the contract is an error."""
    bare = Record("headrace.responses", 0, 0, 0, None, msgspec.msgpack.encode({}), ())
    with pytest.raises(KeyError):
        read_answer(bare, ())
