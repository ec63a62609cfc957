"""Parsing of dead letters, and selection of the letters that a command applies to.

No letter makes this code raise, whatever wrote it: missing or unreadable fields are empty.
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
    """Topic, partition and offset of a record, which identify it."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Letter(NamedTuple):
    """A dead letter.

    Attributes:
        record: as read, with the request's key, value and headers, and the headers of the failure.
        origin: the request that failed; None if the headers do not name it.
        code: a `headrace.errors.Code`, or another program's value.
        attempt: number of attempts, counted from 1.
        model, version: as requested; empty if unreadable.
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
        """Identity of the letter itself."""
        return Identity(self.record.topic, self.record.partition, self.record.offset)

    @property
    def partition(self) -> TopicPartition:
        """Partition that contains the letter."""
        return TopicPartition(self.record.topic, self.record.partition)


class _Named(msgspec.Struct):
    model_name: str = ""
    model_version: str | None = None


_decode_msgpack = msgspec.msgpack.Decoder(_Named).decode
_decode_json = msgspec.json.Decoder(_Named).decode


def parse_letter(record: Record) -> Letter:
    """Parse a record of the dead-letter topic."""
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
    """Return the value of an `x-attempt` header; 1 if it is unreadable."""
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
    """Read the model from `x-model`, otherwise from the body, even one too large to be served."""
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
    """A selection of letters; empty fields and None select all.

    Attributes:
        codes, models, stages: any of these. A model is selected with all its versions.
        since_ms, until_ms: time at which the request became a letter, in epoch milliseconds;
            `until_ms` is exclusive.
        places: single letters, by partition and offset.
    """

    codes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    places: frozenset[tuple[int, int]] = frozenset()

    def takes(self, letter: Letter) -> bool:
        """Return whether the letter is selected."""
        record = letter.record
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.models or letter.model in self.models)
            and (not self.stages or letter.stage in self.stages)
            and (self.since_ms is None or record.timestamp >= self.since_ms)
            and (self.until_ms is None or record.timestamp < self.until_ms)
            and (not self.places or (record.partition, record.offset) in self.places)
        )
