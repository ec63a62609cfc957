"""Recordings: recorded records in order of time, from a topic or a capture file.

Everything that replays, compares or simulates reads through one interface:

```
selection = Selection(window=Window(from_ms=...), filters=Filters(model="digits"), limit=5000)
async with open_recording(log, "headrace.requests", selection) as recording:   # or a Path
    for span in recording.spans:            # offsets per partition, before the filters
        ...
    async for chunk in recording.chunks():  # lists of records, merged by timestamp
        ...
    async for record in recording:          # one record at a time, from the beginning
        ...
```

`headrace.tools.replay.jobs` has `open_recording`. The contents are fixed when the recording is
opened: later records are not part of it, nor is anything at or above the last stable offset. It can
be read repeatedly, one reading at a time; each gives the same records in the same order, as long as
retention leaves them there. No consumer group is joined or changed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from headrace.client.rpc import last_header
from headrace.log.port import Gap, Record, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.bodies import BodyReader

CHUNK_RECORDS = 500
"""A chunk has at most so many records."""


class Span(NamedTuple):
    """Offsets of one partition to read, from `begin` up to `end`, exclusive.

    They are fixed when the recording is opened, before filters and the limit apply.
    """

    partition: TopicPartition
    begin: int
    end: int


RECORD_OVERHEAD_BYTES = 500
"""Size of a record in memory beside its bytes: its Python objects."""


def identity(record: Record) -> str:
    """Return `topic/partition/offset`, by which a copy names its original."""
    return f"{record.topic}/{record.partition}/{record.offset}"


def record_bytes(record: Record) -> int:
    """Return the bytes of a record's key, value and headers."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers)


def memory_bytes(record: Record) -> int:
    """Return about how much memory a record takes."""
    return record_bytes(record) + RECORD_OVERHEAD_BYTES


class Recording(ABC):
    """Recorded records, bounded and filtered, in order of time.

    Partitions are merged by timestamp; within a partition the order of offsets holds, whatever the
    timestamps say. Memory is bounded however long the recording is.

    Attributes:
        name: the topic or the file, for display.
        spans: offsets to read of each partition, in the order of partitions; constant.
        notice: a note for display, such as that a file is truncated; otherwise empty.
        on_unreadable: if set, called with each unreadable range of a topic.
    """

    name: str
    spans: Sequence[Span]
    notice: str = ""
    on_unreadable: Callable[[Gap], object] | None = None

    @abstractmethod
    def chunks(self) -> AsyncGenerator[list[Record], None]:
        """Read from the beginning, in lists of 1 to `CHUNK_RECORDS` records.

        To stop early, close the generator (`contextlib.aclosing`).

        Raises:
            LogUnavailable: no broker answered for a while.
            OffsetOutOfRange: retention has removed records of the recording.
            CaptureError: the capture file is damaged where it is read.
        """

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield each record; see `chunks`."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for record in chunk:
                    yield record


# --- selection -----------------------------------------------------------------------------------


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

    def named_partitions(self) -> list[int]:
        """Return the partitions to read, and those that have offsets of their own, in order."""
        numbers = {*(self.partitions or ()), *self.from_offsets, *self.until_offsets}
        return sorted(number for number in numbers if number is not ALL)

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


_model_names = BodyReader(_ModelName)


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
            and (self.status is None or _text_header(record, HeaderName.STATUS) == self.status)
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
            and last_header(record.headers, HeaderName.CANCEL) is None
        )


def model_of(record: Record) -> tuple[str, str]:
    """Return the model's name and version of a request or an answer; empty if missing.

    A label of `x-model` (`name@label`) is left out. The body takes precedence over `x-model`.
    """
    name, _, version = _text_header(record, HeaderName.MODEL).partition("/")
    name = name.partition("@")[0]
    body = _model_names.read(record)
    if body is None:
        return name, version
    return body.model_name or name, body.model_version or version


def _text_header(record: Record, name: str) -> str:
    return (last_header(record.headers, name) or b"").decode("utf-8", "replace")


def _trace_id(record: Record) -> str:
    return _text_header(record, HeaderName.TRACEPARENT)[_TRACE_ID].lower()


# --- totals --------------------------------------------------------------------------------------


class PartitionTotals(NamedTuple):
    """Totals of one partition in a file or dry run.

    Attributes:
        bytes: of keys, values and headers.
        first_ms, last_ms: the lowest and the highest timestamp.
    """

    partition: TopicPartition
    records: int
    bytes: int
    first_offset: int
    last_offset: int
    first_ms: int
    last_ms: int


class Totals:
    """Adds records up by partition."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, PartitionTotals] = {}

    def add(self, records: Sequence[Record]) -> None:
        """Count more records."""
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            offset, at_ms = record.offset, record.timestamp
            before = self._by_partition.get(partition)
            if before is None:
                before = PartitionTotals(partition, 0, 0, offset, offset, at_ms, at_ms)
            self._by_partition[partition] = PartitionTotals(
                partition,
                before.records + 1,
                before.bytes + record_bytes(record),
                min(before.first_offset, offset),
                max(before.last_offset, offset),
                min(before.first_ms, at_ms),
                max(before.last_ms, at_ms),
            )

    def partitions(self) -> list[PartitionTotals]:
        """Return the totals in the order of partitions."""
        return [self._by_partition[partition] for partition in sorted(self._by_partition)]
