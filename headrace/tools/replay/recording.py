"""A recording: recorded records in order of time, from a topic or a capture file.

Everything that replays, compares or simulates reads through this one interface:

```
selection = Selection(window=Window(from_ms=...), filters=Filters(model="digits"), limit=5000)
async with open_recording(log, "headrace.requests", selection) as recording:   # or a Path
    for span in recording.spans:            # what is there, before the filters, per partition
        ...
    async for chunk in recording.chunks():  # lists of records, timestamps merged over partitions
        ...
    async for record in recording:          # the same, one at a time; it begins again
        ...
```

`open_recording` is in `headrace.tools.replay.opening`, `Selection` in
`headrace.tools.replay.selection`.

What is read is fixed when the recording is opened: records that arrive later are not part of it,
nor is anything at or above the last stable offset. It can be read any number of times,
one reading at a time, and each gives the same records in the same order, as long as retention
leaves them there. No consumer group is joined or changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from headrace.log.port import Gap, Record, TopicPartition

CHUNK_RECORDS = 500
"""A chunk has at most so many records."""


class Span(NamedTuple):
    """Offsets of one partition to read, from `begin` up to `end`, exclusive.

    They are fixed when the recording is opened, before filters and the limit apply.
    """

    partition: TopicPartition
    begin: int
    end: int


def identity(record: Record) -> str:
    """Return `topic/partition/offset`, by which a copy names its original."""
    return f"{record.topic}/{record.partition}/{record.offset}"


def record_bytes(record: Record) -> int:
    """Return the bytes of a record's key, value and headers."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers)


class Recording(ABC):
    """Recorded records, bounded and filtered, in order of time.

    Partitions are merged by timestamp; within a partition the order of offsets holds, whatever the
    timestamps say. Memory is bounded however long the recording is.

    Attributes:
        name: the topic or the file, for display.
        spans: offsets to read of each partition, in the order of partitions; constant.
        notice: a note for display, such as that a file is truncated; otherwise empty.
        passed_over: if set, called with each unreadable range of a topic.
    """

    name: str
    spans: Sequence[Span]
    notice: str = ""
    passed_over: Callable[[Gap], object] | None = None

    @abstractmethod
    def chunks(self) -> AsyncGenerator[list[Record], None]:
        """Read from the beginning, in lists of 1 to `CHUNK_RECORDS` records.

        To stop early, close the generator (`contextlib.aclosing`).

        Raises:
            LogUnavailable: no broker answered for a while.
            OffsetOutOfRange: retention has removed records of the recording.
            CaptureFault: the capture file is damaged where it is read.
        """

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield each record; see `chunks`."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for record in chunk:
                    yield record
