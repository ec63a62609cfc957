"""Golden samples: one record of each kind, as the bytes that the first release wrote.

`SAMPLES` creates each sample with the current code. A sample's file is written once; a kind of
record that changes gets a new sample besides the old one, which must stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.config import LimitSettings
from headrace.errors import Code
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    decode_batch,
    decode_items,
    decode_request,
    decode_response,
    decode_results,
    encode_batch,
    encode_error,
    encode_items,
    encode_request,
    encode_response,
    encode_results,
    plain_value,
    refer_to_source,
    wire_single,
)
from headrace.protocol.codec.control import decode_control, encode_control
from headrace.protocol.codec.events import decode_event, encode_event
from headrace.protocol.compression import CODINGS, compress, decompress
from headrace.protocol.control import ControlRecord, WantedModel
from headrace.protocol.events import Completion, ExecutorEvent, HostedModel
from headrace.protocol.headers import JSON, MSGPACK, parse_envelope
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request, Tensor
from headrace.protocol.schemas.types import SCHEMAS
from headrace.protocol.tensors import DATATYPES, from_array
from headrace.protocol.trace_context import SAMPLED, Parent, Trace

_TIMESTAMP_MS = 1_700_000_000_000
_INGESTED_US = _TIMESTAMP_MS * 1000 + 250


class GoldenSample(NamedTuple):
    """Golden sample and how to write and read it.

    Attributes:
        schema: schema of its value, in `headrace.protocol.schemas.types`.
        content_type: content type of its value.
        encoding: coding of its value; empty for none.
        write: returns the bytes.
        read: raises `Rejected` if the bytes can no longer be read.
    """

    schema: str
    content_type: str
    write: Callable[[], bytes]
    read: Callable[[bytes], object]
    encoding: str = ""

    def plain(self, content: bytes) -> bytes:
        """Return the sample without its coding: releases of zlib and zstd write other bytes."""
        return decompress(content, self.encoding, 1 << 20, "sample") if self.encoding else content

    def described(self, content: bytes) -> str:
        """Return a readable form of the sample: its type, and its value with `bin` as base64."""
        codec = msgspec.json if self.content_type == JSON else msgspec.msgpack
        value = codec.decode(self.plain(content), type=SCHEMAS[self.schema])
        return json.dumps(
            {
                "schema": f"{self.schema}.schema.json",
                "content_type": self.content_type,
                **({"content_encoding": self.encoding} if self.encoding else {}),
                "value": msgspec.to_builtins(value),
            },
            indent=2,
            ensure_ascii=False,
        )


def sample_array(datatype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return two rows of three elements, which include the extremes of the datatype."""
    dtype = DATATYPES[datatype].dtype
    if datatype == "BYTES":
        elements: list[Any] = [b"", "Grüße".encode(), b"\x00\xff", b"a", b"bc", b"def"]
        array = np.empty(6, dtype=object)
        array[:] = elements
    elif datatype == "BOOL":
        array = np.array([True, False, True, False, False, True])
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        array = np.array([limits.min, limits.max, 0, 1, 2, 3], dtype=dtype)
    else:
        array = np.array([np.nan, np.inf, -np.inf, -0.0, 1.5, 0.1]).astype(dtype)
    return array.reshape(2, 3)


def _request_bytes(content_type: str, datatype: str) -> bytes:
    return encode_request(
        content_type,
        "sample",
        {"input": sample_array(datatype)},
        version="1",
        id=datatype.lower(),
        parameters={"text": "t", "number": 1, "ratio": 0.5, "flag": True},
        outputs=["output"],
    )


def _request(content_type: str) -> Request:
    """Return a request from ingest, with one tensor in its value and one with its own bytes."""
    value = _request_bytes(content_type, "FP32")
    headers: list[tuple[str, bytes | None]] = [
        ("content-type", content_type.encode()),
        ("kafka_correlationId", b"\x00\x01\x02\x03"),
        ("x-timeout-ms", b"1000"),
        ("empty", None),
    ]
    envelope = parse_envelope(headers, _TIMESTAMP_MS, 0)
    origin = (3, 41, 39, _TIMESTAMP_MS)
    request = Request(NULL_ACK, *origin, b"key", value, headers, envelope)
    body = decode_request(value, envelope, LimitSettings())
    given = body.inputs[0]
    request.inputs = (
        Tensor(given.name, given.datatype, tuple(given.shape), given.data),
        from_array("made", sample_array("INT8")),
    )
    request.id = body.id
    request.model, request.version = "sample", "1"
    request.rows = 2
    request.shape_class = (3,)
    request.wanted = ("output",)
    request.ingested_us = _INGESTED_US
    request.batch = BatchSummary(_INGESTED_US + 500)
    return request


def _response_bytes(content_type: str, datatype: str) -> bytes:
    return encode_response(_answered(content_type, datatype), _INGESTED_US + 900)


def _error_bytes(content_type: str) -> bytes:
    return encode_error(_failed(content_type, _OVERLOAD), _OVERLOAD)


def _answered(content_type: str, datatype: str) -> Request:
    request = _request(content_type)
    request.outputs = (from_array("output", sample_array(datatype)),)
    request.batch = BatchSummary(_INGESTED_US + 500, compute_us=120, rows=8)
    return request


_FAILURE = Failure(Code.INVALID_TENSOR, "inputs[0].shape: expected [-1, 64], got [1, 63]", "ingest")
_OVERLOAD = Failure(Code.OVERLOADED, "in-flight bytes: expected at most 1, got 2", "ingest", 250)


def _failed(content_type: str, failure: Failure) -> Request:
    request = _request(content_type)
    request.fail(failure)
    return request


def _chunk() -> list[Request]:
    """Return three requests of one partition that differ in what is their own."""
    chunk = [_request(MSGPACK), _request(MSGPACK), _request(MSGPACK)]
    for place, request in enumerate(chunk):
        request.previous, request.offset = request.offset - 2 + place, request.offset + place
        request.headers = [*request.headers[:1], ("kafka_correlationId", b"c-%d" % place)]
        request.id = f"r-{place}"
    return chunk


def _referring_chunk() -> list[Request]:
    """Return requests whose values are only in their source records; one tensor is in neither."""
    chunk = _chunk()
    for request in chunk:
        refer_to_source(request, 1)
    return chunk


def _failed_chunk() -> list[Request]:
    chunk = _referring_chunk()
    for request in chunk:
        request.fail(_FAILURE)
    return chunk


def _answered_chunk() -> list[Request]:
    chunk = _chunk()
    for request in chunk:
        request.outputs = (from_array("output", sample_array("FP32")),)
        request.batch = chunk[0].batch
    return chunk


def _traced(request: Request) -> Request:
    parent = Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, SAMPLED)
    request.trace = Trace(parent, since_us=_INGESTED_US + 900)
    request.checked_us, request.done_us = _INGESTED_US + 300, _INGESTED_US + 900
    request.batch_id = "b-1"
    return request


def _headers(content_type: str, encoding: str = "") -> list[tuple[str, bytes | None]]:
    return [("content-type", content_type.encode()), ("content-encoding", encoding.encode())]


def _read_request(content_type: str, content: bytes, encoding: str = "") -> object:
    envelope, limits = parse_envelope(_headers(content_type, encoding), 0, 0), LimitSettings()
    return decode_request(
        plain_value(content, envelope, limits.max_request_bytes), envelope, limits
    )


def _public_samples() -> Iterator[tuple[str, GoldenSample]]:
    for form, content_type in (("msgpack", MSGPACK), ("json", JSON)):
        suffix = "" if content_type == MSGPACK else "-json"
        read_request = partial(_read_request, content_type)
        read_response = partial(decode_response, _headers(content_type))
        for datatype in DATATYPES:
            name = f"{form}-{datatype.lower()}"
            write = partial(_request_bytes, content_type, datatype)
            schema = f"inference-request{suffix}"
            yield f"request-{name}", GoldenSample(schema, content_type, write, read_request)
            write = partial(_response_bytes, content_type, datatype)
            schema = f"inference-response{suffix}"
            yield f"response-{name}", GoldenSample(schema, content_type, write, read_response)
        write = partial(_error_bytes, content_type)
        yield f"error-{form}", GoldenSample("error-response", content_type, write, read_response)


def _compressed_samples() -> Iterator[tuple[str, GoldenSample]]:
    for coding in CODINGS:
        for form, content_type in (("msgpack", MSGPACK), ("json", JSON)):
            suffix = "" if content_type == MSGPACK else "-json"

            def write_request(coding: str = coding, content_type: str = content_type) -> bytes:
                return compress(_request_bytes(content_type, "FP32"), coding)

            def write_response(coding: str = coding, content_type: str = content_type) -> bytes:
                return compress(_response_bytes(content_type, "FP32"), coding)

            yield (
                f"request-{form}-fp32-{coding}",
                GoldenSample(
                    f"inference-request{suffix}",
                    content_type,
                    write_request,
                    partial(_read_request, content_type, encoding=coding),
                    coding,
                ),
            )
            yield (
                f"response-{form}-fp32-{coding}",
                GoldenSample(
                    f"inference-response{suffix}",
                    content_type,
                    write_response,
                    partial(decode_response, _headers(content_type, coding)),
                    coding,
                ),
            )


def _internal_samples() -> Iterator[tuple[str, GoldenSample]]:
    def sample(
        schema: str, write: Callable[[], bytes], read: Callable[..., object]
    ) -> GoldenSample:
        return GoldenSample(schema, MSGPACK, write, lambda content: read(content, NULL_ACK))

    yield "item", sample("item-record", lambda: encode_items([_request(MSGPACK)]), decode_items)
    yield (
        "item-traced",
        sample("item-record", lambda: encode_items([_traced(_request(MSGPACK))]), decode_items),
    )
    yield (
        "batch",
        sample(
            "batch-record",
            lambda: wire_single.encode_batch(
                Batch("b-1", [_request(MSGPACK), _request(JSON)], "full")
            ),
            decode_batch,
        ),
    )
    yield (
        "item-chunk",
        sample("item-chunk-record", lambda: encode_items(_chunk()), decode_items),
    )
    yield (
        "chunked-batch",
        sample(
            "chunked-batch-record",
            lambda: encode_batch(Batch("b-1", [*_chunk(), _request(JSON)], "full")),
            decode_batch,
        ),
    )
    yield (
        "result-chunk",
        sample("result-chunk-record", lambda: encode_results(_answered_chunk()), decode_results),
    )
    yield (
        "item-chunk-referring",
        sample("item-chunk-record", lambda: encode_items(_referring_chunk()), decode_items),
    )
    yield (
        "chunked-batch-referring",
        sample(
            "chunked-batch-record",
            lambda: encode_batch(Batch("b-1", _referring_chunk(), "full")),
            decode_batch,
        ),
    )
    yield (
        "result-chunk-referring",
        sample("result-chunk-record", lambda: encode_results(_failed_chunk()), decode_results),
    )
    for name, make in (
        ("result-outputs", lambda: _answered(MSGPACK, "FP32")),
        ("result-failure", lambda: _failed(MSGPACK, _FAILURE)),
        ("result-traced", lambda: _traced(_answered(MSGPACK, "FP32"))),
    ):
        yield name, sample("result-record", partial(_result_bytes, make), decode_results)
    for name, event in (("event", _EVENT), ("event-rejected", _EVENT_WITH_REJECTED)):
        encode = partial(encode_event, event)
        yield name, GoldenSample("event-record", MSGPACK, encode, decode_event)
    for name, record in (
        ("control", _CHANGE),
        ("control-snapshot", _CHANGE_WITH_SNAPSHOT),
        ("control-overrides", _CHANGE_OF_OVERRIDES),
        ("control-former", _CHANGE_WITH_FORMER_NAMES),
    ):
        write = partial(encode_control, record)
        yield name, GoldenSample("control-record", MSGPACK, write, decode_control)


_EVENT = ExecutorEvent(
    executor="4711-0a1b2c3d",
    silent_after_ms=30_000,
    partitions=[0, 2],
    models=[
        HostedModel(name="sample", version="1", instances=2, max_batch_size=32),
        HostedModel(
            name="alone", version="3", instances=1, max_batch_size=1, batching_off="mates leak"
        ),
    ],
    completions=[
        Completion(
            batch_id="b-1",
            model="sample",
            version="1",
            shape_class=[3],
            rows=4,
            compute_us=120,
            stay_us=450,
        ),
        Completion(batch_id="b-2", model="alone", version="3"),
    ],
)

_EVENT_WITH_REJECTED = ExecutorEvent(
    executor="4711-0a1b2c3d",
    silent_after_ms=30_000,
    generation=3,
    unready=[
        "sample/1: inputs: expected some of x, as the model has, got y",
        "sample/2: cuda:0: out of memory",
        "sample/3: loading",
    ],
    stages=["executor"],
    failed=["sample/1", "sample/2"],
    rejected=["sample/1"],
)


_SAMPLE_MODEL = WantedModel(versions=["1", "2"], default="1", labels={"canary": "2"})
_CHANGE = ControlRecord(
    format=1,
    generation=3,
    change_id="0a1b2c3d",
    at_ms=_TIMESTAMP_MS,
    who="ada@ops-1",
    why="ticket 4711",
    action="label",
    before={"sample": WantedModel(versions=["1", "2"], default="1")},
    after={"sample": _SAMPLE_MODEL},
)
_CHANGE_WITH_SNAPSHOT = ControlRecord(
    format=1,
    generation=64,
    change_id="4e5f6071",
    at_ms=_TIMESTAMP_MS + 1,
    who="ada@ops-1",
    action="unload",
    before={"alone": WantedModel(versions=["3"], default="3")},
    after={"alone": None},
    snapshot={"sample": _SAMPLE_MODEL},
)
_CHANGE_WITH_FORMER_NAMES = ControlRecord(
    format=1,
    generation=128,
    change_id="7a8b9c0d",
    at_ms=_TIMESTAMP_MS + 3,
    who="ada@ops-1",
    action="default",
    before={"sample": WantedModel(versions=["1", "2"], default="1")},
    after={"sample": WantedModel(versions=["1", "2"], default="2")},
    snapshot={"sample": WantedModel(versions=["1", "2"], default="2")},
    former={"sample": {"": ["1"]}},
)
_CHANGE_OF_OVERRIDES = ControlRecord(
    format=2,
    generation=65,
    change_id="8293a4b5",
    at_ms=_TIMESTAMP_MS + 2,
    who="ada@ops-1",
    action="load",
    before={"sample": _SAMPLE_MODEL},
    after={
        "sample": WantedModel(
            versions=["1", "2"],
            default="1",
            labels={"canary": "2"},
            overrides={"max_batch_size": 8, "range": {"x": [0, 1]}},
            reads=1,
        )
    },
)


def _result_bytes(make: Callable[[], Request]) -> bytes:
    return encode_results([make()])


SAMPLES: dict[str, GoldenSample] = {
    **dict(_public_samples()),
    **dict(_compressed_samples()),
    **dict(_internal_samples()),
}
"""All samples by name: `golden/<name>.bin` has the bytes, `<name>.json` their meaning."""
