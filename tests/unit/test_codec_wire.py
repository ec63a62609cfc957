"""Items, batches and results between two processes."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    decode_batch,
    decode_items,
    decode_request,
    decode_results,
    encode_batch,
    encode_items,
    encode_results,
)
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request, Tensor
from headrace.protocol.tensors import from_array

HEADERS = (("kafka_correlationId", b"c"), ("x-priority", b"3"), ("empty", None))
SEEN = (
    "partition", "offset", "previous", "timestamp_ms", "key", "envelope", "id", "model", "version",
    "rows", "shape_class", "wanted", "size_bytes", "ingested_us", "batch", "failure",
)  # fmt: skip


def checked(default_timeout_ms: int = 0) -> Request:
    """A request with one tensor that is a view of its value, and one that is not."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": bytes(range(16))}
    value: bytes = msgpack.packb({"model_name": "m", "inputs": [tensor]})
    envelope = parse_envelope(HEADERS, 1_000, default_timeout_ms)
    request = Request(NULL_ACK, 2, 7, 5, 1_000, b"key", value, HEADERS, envelope)
    view = decode_request(value, envelope, LimitSettings()).inputs[0]
    request.inputs = (
        Tensor("x", "FP32", (2, 2), view.data),
        from_array("made", np.array([1, 2], np.int8)),
    )
    request.id, request.model, request.version = "r-1", "m", "4"
    request.rows, request.shape_class, request.wanted = 2, (2,), ("y",)
    request.size_bytes = 18
    request.ingested_us = 11
    request.batch = BatchSummary(12, compute_us=13, rows=14)
    return request


def seen(request: Request, *but: str) -> dict[str, Any]:
    """Return the fields that a stage reads of a request, without its tensors."""
    return {name: getattr(request, name) for name in SEEN if name not in but}


def plain(tensors: tuple[Tensor, ...] | None) -> list[tuple[Any, ...]]:
    """Tensors with their bytes."""
    return [(*tensor[:3], bytes(tensor.data)) for tensor in tensors or ()]


def test_item_survives_wire() -> None:
    """Every field that the next stages read is there again."""
    sent = checked()

    received = decode_items(encode_items([sent]), NULL_ACK)[0]

    assert seen(received) == seen(sent)
    assert plain(received.inputs) == plain(sent.inputs)
    assert list(received.headers) == list(sent.headers)
    assert bytes(received.value or b"") == sent.value


def test_item_value_is_sent_once_with_its_views() -> None:
    """It travels as a place in the value, and is a view again."""
    record = encode_items([checked()])

    received = decode_items(record, NULL_ACK)[0]

    assert record.count(bytes(range(16))) == 1
    assert isinstance(received.inputs[0].data, memoryview)
    assert received.inputs[0].data.obj is record


def test_item_received_by_wire_can_be_sent_again() -> None:
    """A batcher reads items, whose values are views of records already, and writes batches."""
    received = decode_items(encode_items([checked()]), NULL_ACK)[0]

    batch = decode_batch(encode_batch(Batch("b-1", [received], "full")), NULL_ACK)

    assert (batch.batch_id, batch.reason, batch.rows) == ("b-1", "full", 2)
    assert plain(batch.requests[0].inputs) == plain(received.inputs)


def test_batch_contains_items_byte_for_byte() -> None:
    """Fields that a newer release has added are kept."""
    item = encode_items([checked()])
    newer = msgpack.packb({**msgpack.unpackb(item), "newer": 1})

    batch = encode_batch(Batch("b-1", [decode_items(newer, NULL_ACK)[0]], "full"))

    assert batch.endswith(newer)


def test_batch_record_carries_time_of_forming() -> None:
    """The time in its items is older."""
    received = decode_items(encode_items([checked()]), NULL_ACK)[0]
    received.batch = BatchSummary(99)

    batch = decode_batch(encode_batch(Batch("b-1", [received], "full")), NULL_ACK)

    assert batch.requests[0].batch.formed_us == 99


def test_results_that_differ_in_their_bytes_alone_share_head() -> None:
    """Requests that ran together share the head; strings do so only if of one length."""
    results = []
    for content in (b"\1\0\0\0a", b"\1\0\0\0b", b"\2\0\0\0bb"):
        sent = checked()
        sent.outputs = (Tensor("label", "BYTES", (1,), content),)
        results.append(decode_results(encode_results([sent]), NULL_ACK)[0])

    first, second, third = results
    assert first.output_metadata is second.output_metadata
    assert first.output_metadata is not third.output_metadata


@pytest.mark.parametrize("start", [3, 5])
def test_tensor_at_any_place_of_value_survives_wire(start: int) -> None:
    """Wherever it stood in another value of the same length."""
    sent = checked()
    value = bytes(range(40))
    sent.value = value
    sent.inputs = (Tensor("x", "INT8", (2, 2), memoryview(value)[start : start + 4]),)

    received = decode_items(encode_items([sent]), NULL_ACK)[0]

    assert plain(received.inputs) == [("x", "INT8", (2, 2), value[start : start + 4])]


def test_empty_tensor_survives_wire() -> None:
    """A place of no bytes is a place as well."""
    sent = checked()
    sent.inputs = (Tensor("x", "FP32", (2, 0), b""),)

    received = decode_items(encode_items([sent]), NULL_ACK)[0]

    assert plain(received.inputs) == [("x", "FP32", (2, 0), b"")]


def test_deadline_of_default_timeout_survives_wire() -> None:
    """Other processes may have another default; the first one counts."""
    sent = checked(default_timeout_ms=500)

    received = decode_items(encode_items([sent]), NULL_ACK)[0]

    assert received.envelope == sent.envelope
    assert received.envelope.deadline_ms == 1_500


def test_result_record_carries_outputs_without_request_value() -> None:
    """The value is of no more use, since no dead letter can come of it."""
    sent = checked()
    sent.outputs = sent.inputs

    received = decode_results(encode_results([sent]), NULL_ACK)[0]

    but = ("rows", "shape_class", "wanted", "size_bytes")
    assert seen(received, *but) == seen(sent, *but)
    assert plain(received.outputs) == plain(sent.outputs)
    assert received.value is None


@pytest.mark.parametrize("code", list(Code))
def test_failure_record_carries_value_for_dead_letter(code: Code) -> None:
    """The code says so."""
    sent = checked()
    sent.fail(Failure(code, "why", "executor", 100))

    received = decode_results(encode_results([sent]), NULL_ACK)[0]

    assert received.failure == Failure(code, "why", "executor", 100)
    assert received.outputs is None
    expected = sent.value if code.is_dead_letter else None
    assert (received.value and bytes(received.value)) == expected


def test_record_of_other_release_is_read_with_defaults() -> None:
    """Two releases may run side by side."""
    fields = msgpack.unpackb(encode_items([checked()]), use_list=True)
    fields |= {"colour": "red", "timings": {"ingested_us": 5, "moved_us": 6}}
    for name in ("key", "headers", "id", "shape_class", "wanted", "deadline_ms"):
        fields.pop(name, None)

    received = decode_items(msgpack.packb(fields), NULL_ACK)[0]

    assert (received.key, received.headers, received.id, received.wanted) == (None, [], None, None)
    assert (received.ingested_us, received.batch.formed_us) == (5, 0)


@pytest.mark.parametrize("decode", [decode_items, decode_batch, decode_results])
@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x80", b"\x90", b"\xc0", b"text"])
def test_foreign_record_is_refused_as_item(decode: Any, value: bytes) -> None:
    """No request can be made out in it."""
    with pytest.raises(Rejected):
        decode(value, NULL_ACK)


@pytest.mark.parametrize("place", [{"start": -1}, {"start": 1 << 20}, {"size": 1 << 40}])
def test_tensor_place_outside_value_is_refused(place: dict[str, int]) -> None:
    """It would be another's memory, or none."""
    fields = msgpack.unpackb(encode_items([checked()]))
    fields["inputs"][0] |= place

    with pytest.raises(Rejected):
        decode_items(msgpack.packb(fields), NULL_ACK)[0]


def test_tensor_whose_bytes_do_not_fit_is_refused_before_it_joins_batch() -> None:
    """The executor gathers rows without looking at them again."""
    fields = msgpack.unpackb(encode_items([checked()]))
    fields["inputs"][0]["shape"] = [2, 3]

    with pytest.raises(Rejected, match="24 bytes"):
        decode_items(msgpack.packb(fields), NULL_ACK)[0]


def test_unknown_code_of_newer_release_becomes_internal_error() -> None:
    """Its message still says what happened."""
    sent = checked()
    sent.fail(Failure(Code.OVERLOADED, "why", "executor"))
    fields = msgpack.unpackb(encode_results([sent]))
    fields["failure"]["code"] = "TOO_HOT"

    received = decode_results(msgpack.packb(fields), NULL_ACK)[0]

    assert received.failure == Failure(Code.INTERNAL, "why", "executor")
