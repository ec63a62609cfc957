"""What a dead letter says of itself, and which letters a command means.

Nothing here raises on a letter, whoever wrote it: what is absent or unreadable is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace.log.port import Record, TopicPartition
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.headers import JSON, MSGPACK_TYPES, parse_envelope

_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_MAX_ATTEMPT_DIGITS = 4


class Identity(NamedTuple):
    """The place of a record, by which it is known."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Letter(NamedTuple):
    """A dead letter.

    Attributes:
        record: as it was read: the request's key, value and headers, and those of the failure.
        origin: the request that failed; None where the headers do not say.
        code: a `headrace.errors.Code`, or whatever another program put in its place.
        attempt: how often it was tried, counted from 1.
        model, version: which the request asked for; empty where it cannot be read.
    """

    record: Record
    origin: Identity | None
    code: str
    message: str
    stage: str
    attempt: int
    model: str
    version: str

    @property
    def identity(self) -> Identity:
        """The place of the letter itself."""
        return Identity(self.record.topic, self.record.partition, self.record.offset)

    @property
    def partition(self) -> TopicPartition:
        """The partition that the letter lies in."""
        return TopicPartition(self.record.topic, self.record.partition)


class _Named(msgspec.Struct):
    model_name: str = ""
    model_version: str | None = None


_decode_msgpack = msgspec.msgpack.Decoder(_Named).decode
_decode_json = msgspec.json.Decoder(_Named).decode


def parse_letter(record: Record) -> Letter:
    """A record of the topic of dead letters, read."""
    headers = {name: value for name, value in record.headers if value is not None}
    model, version = _model(record)
    return Letter(
        record,
        _origin(headers),
        _text(headers, "kafka_dlt-exception-fqcn"),
        _text(headers, "kafka_dlt-exception-message"),
        _text(headers, "x-stage"),
        attempts(headers.get("x-attempt")),
        model,
        version,
    )


def attempts(value: bytes | None) -> int:
    """What a header `x-attempt` says; 1 where it says nothing that can be understood."""
    if value is None or not value.isdigit() or len(value) > _MAX_ATTEMPT_DIGITS:
        return 1
    return max(int(value), 1)


def _text(headers: Mapping[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")


def _origin(headers: Mapping[str, bytes]) -> Identity | None:
    topic = _text(headers, "kafka_dlt-original-topic")
    partition = headers.get("kafka_dlt-original-partition", b"")
    offset = headers.get("kafka_dlt-original-offset", b"")
    if not topic or len(partition) != _INT32.size or len(offset) != _INT64.size:
        return None
    return Identity(topic, _INT32.unpack(partition)[0], _INT64.unpack(offset)[0])


def _model(record: Record) -> tuple[str, str]:
    """From `x-model`, otherwise from the body; a body too large to be served is read as well."""
    envelope = parse_envelope(record.headers, record.timestamp, 0)
    if envelope.model or record.value is None:
        return envelope.model, envelope.version
    content_type = envelope.content_type
    if content_type != JSON and content_type not in MSGPACK_TYPES:
        return "", ""
    decode = _decode_json if content_type == JSON else _decode_msgpack
    try:
        body = decode(record.value)
    except DECODE_ERRORS:
        return "", ""
    return body.model_name, body.model_version or ""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant; what is empty or None leaves all in.

    Attributes:
        codes, models, stages: any of these. A model is meant with all its versions.
        since_ms, until_ms: when it became a letter, in epoch milliseconds; `until_ms` is left out.
        places: single letters, by partition and offset.
    """

    codes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    places: frozenset[tuple[int, int]] = frozenset()

    def takes(self, letter: Letter) -> bool:
        """Whether the letter is meant."""
        record = letter.record
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.models or letter.model in self.models)
            and (not self.stages or letter.stage in self.stages)
            and (self.since_ms is None or record.timestamp >= self.since_ms)
            and (self.until_ms is None or record.timestamp < self.until_ms)
            and (not self.places or (record.partition, record.offset) in self.places)
        )
