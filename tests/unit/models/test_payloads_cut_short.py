"""Payloads that end early, at every byte where they can: each is refused with its place.

Images and sounds are in `test_images.py` and `test_sounds.py`.
"""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pytest

from headrace.config import make_settings
from headrace.errors import Code, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.transforms import Transform, make_transform
from headrace.models.signature import make_signature
from headrace.protocol.codec import decode_request
from headrace.protocol.compression import CODINGS, compress, decompress
from headrace.protocol.headers import JSON, MSGPACK, NO_HEADERS
from tests.support.protoc import write_descriptors
from tests.unit.models.requests import spec

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "amount", "type": "double"},
        {"name": "country", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
ROW = {"amount": 1.5, "country": "Norway", "at": datetime(2026, 3, 1, tzinfo=UTC)}
PROTO = 'syntax = "proto3"; package shop; message Order { double amount = 1; string country = 2; }'


def avro_of(schema: Any, value: Any) -> bytes:
    """A value in Avro's binary encoding."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def container_of(codec: str) -> bytes:
    """An Avro container with one block."""
    stream = io.BytesIO()
    fastavro.writer(stream, fastavro.parse_schema(ORDER), [ROW] * 3, codec=codec)
    return stream.getvalue()


def transform_of(directory: Path, more: str) -> Transform:
    """A transform of orders."""
    text = f"[transform.record]\n{more}\n[transform.record.inputs]\nx = [{{ path = 'amount' }}]\n"
    config = make_model_config(tomllib.loads(text), make_settings({}))
    signature = make_signature([spec("x", "FP64", [-1, 1])], [spec("y", "FP64", [-1])])
    return make_transform(directory, config, signature)


def refusals(transform: Transform, payload: bytes, content_type: str) -> Iterator[tuple[int, str]]:
    """The end of each shorter payload, and what is said of it."""
    transform(payload, content_type)  # the whole one is read
    for end in range(len(payload)):
        with pytest.raises(Rejected) as caught:
            transform(payload[:end], content_type)
        assert caught.value.code in (Code.INVALID_REQUEST, Code.INVALID_TENSOR)
        yield end, caught.value.message


def test_json_payload_cut_short_is_refused_with_its_end() -> None:
    """Within numbers the parser names the byte itself."""
    payload = json.dumps([{"amount": 1.5, "note": 'é\n"'}, {"amount": 2}]).encode()
    for end, message in refusals(transform_of(Path(), ""), payload, JSON):
        assert f"a value that ends at byte {end}" in message or f"(byte {end})" in message


def test_json_lines_cut_short_within_a_line_are_refused_with_their_end() -> None:
    """Between two lines they are a shorter payload."""
    transform, line = transform_of(Path(), ""), b'{"amount":1.5}\n'
    for end in range(len(line) + 1, 2 * len(line) - 1):
        with pytest.raises(Rejected) as caught:
            transform((line * 2)[:end], "application/x-ndjson")
        message = caught.value.message
        assert f"a value that ends at byte {end}" in message or f"(byte {end})" in message


def test_csv_cut_short_within_a_record_is_refused_with_its_row_or_line() -> None:
    """Behind the last comma the last field is a shorter one, unless it is quoted."""
    transform, payload = transform_of(Path(), ""), b'amount,note\r\n1.5,"a"\r\n2.5,"b\r\nc"'
    begins, comma = payload.index(b"2.5"), payload.rindex(b",")
    for end in (*range(begins + 1, comma + 1), *range(comma + 2, len(payload))):
        with pytest.raises(Rejected) as caught:
            transform(payload[:end], "text/csv")
        expected = "rows[1]: expected 2 fields, got 1" if end <= comma else "end of data in line"
        assert expected in caught.value.message


def test_avro_payload_cut_short_is_refused_with_its_end(tmp_path: Path) -> None:
    """The payload may end within a number, a length or a text."""
    (tmp_path / "order.avsc").write_text(json.dumps(ORDER))
    transform = transform_of(tmp_path, 'avro_schema = "order.avsc"')
    for end, message in refusals(transform, avro_of(ORDER, ROW), "avro/binary"):
        assert f"a value that ends at byte {end}" in message


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_avro_container_cut_short_is_refused_with_its_end(codec: str) -> None:
    """In its metadata, its marks, the head of a block or the block."""
    payload = container_of(codec)
    behind_mark = payload.index(payload[-16:]) + 16
    for end, message in refusals(transform_of(Path(), ""), payload, "avro/container"):
        if end < 4:
            assert "expected an Avro container, which begins with" in message
        elif end == behind_mark:  # a whole container without a block
            assert message == "payload: expected at least one record, got none"
        else:
            assert message.endswith(f"got a file that ends at byte {end}")


def test_protobuf_cut_short_is_refused_with_its_size(tmp_path: Path) -> None:
    """Between two fields it is a message with fewer."""
    (tmp_path / "order.proto").write_text(PROTO)
    write_descriptors(tmp_path, "order.proto", "order.desc", "--include_imports")
    more = 'protobuf_descriptors = "order.desc"\nprotobuf_message = "shop.Order"'
    transform = transform_of(tmp_path, more)
    payload = b"\x09" + bytes(7) + b"\x40" + b"\x12\x06Norway"
    for end in (*range(1, 9), *range(10, len(payload))):
        with pytest.raises(Rejected, match=rf"Protobuf as in shop\.Order, got .* in {end} bytes"):
            transform(payload[:end], "application/x-protobuf")


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_request_with_tensors_cut_short_is_refused_with_its_size(content_type: str) -> None:
    """Requests in JSON and in MessagePack are refused wherever they are cut."""
    envelope = NO_HEADERS._replace(content_type=content_type)
    values = {
        JSON: b'{"model_name":"m","inputs":[{"name":"x","datatype":"BOOL","shape":[1],'
        b'"data":[true]}]}',
        MSGPACK: b"\x82\xaamodel_name\xa1m\xa6inputs\x91\x84\xa4name\xa1x\xa8datatype\xa4BOOL"
        b"\xa5shape\x91\x01\xa4data\xc4\x01\x01",
    }
    value, limits = values[content_type], make_settings({}).limits
    decode_request(value, envelope, limits)
    for end in range(1, len(value)):
        with pytest.raises(Rejected) as caught:
            decode_request(value[:end], envelope, limits)
        assert f"{end} bytes that end early" in caught.value.message or f"(byte {end})" in (
            caught.value.message
        )


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_value_cut_short_is_refused_with_its_size(coding: str) -> None:
    """At each byte of its stream, and not taken for a shorter value."""
    content = compress(bytes(range(256)) * 20, coding)
    for end in range(len(content)):
        with pytest.raises(
            Rejected, match=rf"expected (a )?whole {coding}.*\b{end} bytes"
        ) as caught:
            decompress(content[:end], coding, 10_000, "value")
        assert caught.value.code == Code.INVALID_REQUEST
