"""Requests that are sound but for their headers, or for the model that they name."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import Code
from headrace.protocol.compression import CODINGS, compress
from tests.support.bad_records.building import (
    ABSENT,
    DATA,
    JSON_HEADERS,
    BadRecord,
    as_json,
    packed,
    refused,
)

_MILLISECONDS = (b"", b"soon", b"-1", b"+1", b"1.5", b"1e3", b" 1", b"1_000", b"0x10", b"1" * 16)
_NOT_ASCII_DIGITS = "١٢٣".encode()


def headers() -> Iterator[BadRecord]:
    """All faults of headers."""
    good = packed()
    for header, values in _wrong_values().items():
        for value in values:
            name = f"{header} {value[:16]!r} of {len(value)} bytes"
            yield refused(name, good, f"header {header}: ", ((header, value),))
    right, wrong = ("x-deadline-ms", b"1"), ("x-deadline-ms", b"x")
    yield refused("the last of two deadlines is wrong", good, "x-deadline-ms", (right, wrong))
    yield from _content_types()
    yield from _models()


def _wrong_values() -> dict[str, tuple[bytes, ...]]:
    return {
        "x-deadline-ms": (*_MILLISECONDS, _NOT_ASCII_DIGITS, b"1" * 600),
        "x-timeout-ms": (*_MILLISECONDS, b"\xff\xff\xff\xff"),
        "x-priority": (b"", b"high", b"101", b"-101", b"1.0", b"--1", b"-", b"0" * 600),
        "x-tenant": (b"\xff\xfe", b"x" * 257, b"x" * 600),
        "x-model": (b"", b"/", b"/1", b"digits/", b"digits/1/2", b"\xff", b"x" * 257, b"x" * 600),
        "x-cancel": (
            *(b"mine", b"headrace.requests/0", b"headrace.requests/0/", b"headrace.requests//12"),
            *(b"/0/1", b"headrace.requests/0/-1", b"headrace.requests/0/1/2", b"\xff/0/1"),
            b"x" * 600,
        ),
        "kafka_replyTopic": (b"", b"\xff\xfe", b"x" * 257),
        "kafka_replyPartition": (
            b"",
            b"1",
            b"\x00\x00\x01",
            b"\x00\x00\x00\x00\x01",
            b"\x00" * 8,
            b"\xff\xff\xff\xff",
            b"\x80\x00\x00\x00",
        ),
        "content-type": (b"application/json" + b" " * 600,),
    }


def _content_types() -> Iterator[BadRecord]:
    unknown = (
        b"image/jpeg", b"text/plain; charset=utf-8", b"application/octet-stream", b"avro/binary",
        b"application/json+v2", b"msgpack", b"json", b"\xff\xfe", b"*/*", b"application/avro",
    )  # fmt: skip
    for content_type in unknown:
        name = f"{content_type!r} without x-model"
        yield refused(name, packed(), "content-type", (("content-type", content_type),))
    for content_type in (
        b"application/cloudevents+json",
        b"application/cloudevents",
        b"application/cloudevents-batch+json",
        b"Application/CloudEvents+JSON; charset=UTF-8",
    ):
        named = (("content-type", content_type), ("x-model", b"digits"))
        yield refused(f"{content_type!r}", as_json(), "structured mode", named)
    raw = (("content-type", b"image/jpeg"), ("x-model", b"digits"))
    yield refused("a null payload", None, "value: ", raw)
    yield refused("a payload for a model without a transform", DATA, "content-type", raw)
    yield refused("JSON behind spaces", b"\n  " + as_json(), "application/json for a value that be")
    msgpack_type = (("content-type", b"application/msgpack"),)
    yield refused("JSON as MessagePack", as_json(), "header content-type: ", msgpack_type)
    for encoding in (b"lz4", b"x-gzip", b"gzip, gzip", b"gzip;q=1", b"*", b"\xff"):
        header = (("content-encoding", encoding),)
        yield refused(f"{encoding!r} as encoding", packed(), "header content-encoding: ", header)
    for coding in CODINGS:
        header = (("content-encoding", coding.encode()),)
        whole = compress(packed(), coding)
        yield refused(f"{coding} that is none", packed(), "value: expected ", header)
        yield refused(f"half of {coding}", whole[: len(whole) // 2], "value: expected ", header)
        yield refused(f"null in {coding}", None, "value: expected an inference", header)
        yield refused(f"nothing in {coding}", b"", "value: ", header)


def _models() -> Iterator[BadRecord]:
    def unknown(name: str, value: bytes, fragment: str, model: bytes | None = None) -> BadRecord:
        named = () if model is None else (("x-model", model),)
        return BadRecord(name, named, value, Code.UNKNOWN_MODEL, fragment)

    unnamed = packed(model_name=ABSENT)
    yield from (
        unknown("an unknown model", packed(model_name="nobody"), "model_name"),
        unknown("a model's name in capitals", packed(model_name="DIGITS"), "model_name"),
        unknown("a path as a model's name", packed(model_name="../digits"), "model_name"),
        unknown("a NUL in a model's name", packed(model_name="digits\x00"), "model_name"),
        unknown("an unknown version", packed(model_version="2"), "model_version"),
        unknown("a version that is a word", packed(model_version="latest"), "model_version"),
        unknown("an unknown model in x-model", unnamed, "model_name", b"nobody"),
        unknown("an unknown version in x-model", unnamed, "model_version", b"digits/9"),
        refused("x-model is null and no model", unnamed, "model_name", (("x-model", None),)),
        refused("another model in x-model", packed(), "model_name", (("x-model", b"other"),)),
        refused(
            "another version in x-model",
            packed(model_version="1"),
            "model_version",
            (("x-model", b"digits/2"),),
        ),
        refused(
            "another model in x-model (JSON)",
            as_json(),
            "model_name",
            (*JSON_HEADERS, ("x-model", b"other")),
        ),
    )
