"""Selection of records of a topic or a capture file; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.client.rpc import last_header
from headrace.log.port import Record, TopicPartition
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.headers import JSON, MSGPACK_TYPES
from headrace.tools.replay.recording import Span

ALL: None = None
"""Stands for every partition in `Window.from_offsets` and `Window.until_offsets`."""

_TRACE_ID = slice(3, 35)  # of a traceparent: version "-" trace id "-" parent id "-" flags


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds by time and by offset; all given ones apply.

    A partition is read from its first record at or after `from_ms` to its first one at or after
    `until_ms`, exclusive; records between them with a timestamp before `from_ms` are left out.
    Clocks of producers differ, so timestamps need not ascend.

    Attributes:
        from_ms, until_ms: epoch milliseconds.
        from_offsets, until_offsets: by partition number, or `ALL`; a partition's own offset takes
            precedence.
        partitions: numbers of the partitions to read; None for all.
        fixed: if given, nothing outside of these bounds is read: the rest of a recording that was
            opened and partly read before.
    """

    from_ms: int | None = None
    until_ms: int | None = None
    from_offsets: Mapping[int | None, int] = field(default_factory=dict)
    until_offsets: Mapping[int | None, int] = field(default_factory=dict)
    partitions: frozenset[int] | None = None
    fixed: Mapping[TopicPartition, tuple[int, int]] | None = None

    def includes(self, partition: int) -> bool:
        """Return whether the partition is read at all."""
        return self.partitions is None or partition in self.partitions

    def span(self, partition: TopicPartition, begin: int, end: int) -> Span:
        """Return the part of a partition, which has `begin` up to `end`, that the offsets allow."""
        number = partition.partition
        first = self.from_offsets.get(number, self.from_offsets.get(ALL, begin))
        past = self.until_offsets.get(number, self.until_offsets.get(ALL, end))
        begin, end = max(begin, first), min(end, past)
        if self.fixed is not None:
            low, high = self.fixed.get(partition, (0, 0))
            begin, end = max(begin, low), min(end, high)
        return Span(partition, min(begin, end), end)


class _ModelName(msgspec.Struct):
    model_name: str = ""
    model_version: str | None = None


_name_in_msgpack = msgspec.msgpack.Decoder(_ModelName).decode
_name_in_json = msgspec.json.Decoder(_ModelName).decode


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters on records; all given ones must match.

    Attributes:
        key: the exact key.
        key_pattern: searched in the key; a record without a key has an empty one.
        headers: names and values; the last value of a repeated header counts.
        model: a name, or `name/version`: from the body, or from `x-model`. A request without a
            version only matches a name alone.
        status: the value of `x-status` of an answer.
        trace_id: 32 hexadecimal digits, of `traceparent`.
    """

    key: bytes | None = None
    key_pattern: re.Pattern[bytes] | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    model: str | None = None
    status: str | None = None
    trace_id: str | None = None

    def fits(self, record: Record) -> bool:
        """Return whether the record matches."""
        return (
            (self.key is None or record.key == self.key)
            and (self.key_pattern is None or bool(self.key_pattern.search(record.key or b"")))
            and all(last_header(record.headers, name) == value for name, value in self.headers)
            and (self.status is None or _text_header(record, "x-status") == self.status)
            and (self.trace_id is None or _trace_id(record) == self.trace_id.lower())
            and (self.model is None or self._is_of_model(record, self.model))
        )

    @staticmethod
    def _is_of_model(record: Record, wanted: str) -> bool:
        name, version = model_of(record)
        return wanted in (name, f"{name}/{version}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Bounds, filters, and a maximum number of records (after both; None for all)."""

    window: Window = field(default_factory=Window)
    filters: Filters = field(default_factory=Filters)
    limit: int | None = None

    def fits(self, record: Record) -> bool:
        """Return whether a record within the offsets is part of the recording.

        A cancellation never is: it refers to a request of the past.
        """
        from_ms = self.window.from_ms
        return (
            (from_ms is None or record.timestamp >= from_ms)
            and self.filters.fits(record)
            and last_header(record.headers, "x-cancel") is None
        )


def model_of(record: Record) -> tuple[str, str]:
    """Return the model's name and version of a request or an answer; empty if missing.

    The body takes precedence over `x-model`; an unreadable body yields no model.
    """
    name, _, version = _text_header(record, "x-model").partition("/")
    content_type = _text_header(record, "content-type").partition(";")[0].strip().lower()
    decode = _name_in_json if content_type == JSON else _name_in_msgpack
    if record.value is None or content_type not in MSGPACK_TYPES | {JSON}:
        return name, version
    try:
        body = decode(record.value)
    except DECODE_ERRORS:
        return name, version
    return body.model_name or name, body.model_version or version


def _text_header(record: Record, name: str) -> str:
    return (last_header(record.headers, name) or b"").decode("utf-8", "replace")


def _trace_id(record: Record) -> str:
    return _text_header(record, "traceparent")[_TRACE_ID].lower()
