"""A recording: recorded records, in the order of time, read from a topic or a capture file.

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
and neither is anything at or above the last stable offset. It can be read any number of times,
one reading at a time, and each gives the same records in the same order, as long as retention
leaves them there. No consumer group is joined, asked or moved.
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
    """What is read of one partition: offsets from `begin` up to, and without, `end`.

    Fixed when the recording is opened; filters and the limit come after it.
    """

    partition: TopicPartition
    begin: int
    end: int


def identity(record: Record) -> str:
    """`topic/partition/offset`, by which a copy names its original."""
    return f"{record.topic}/{record.partition}/{record.offset}"


def record_bytes(record: Record) -> int:
    """The bytes of a record's key, value and headers."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers)


class Recording(ABC):
    """Recorded records, bounded and filtered, in the order of time.

    Partitions are merged by timestamp; within a partition the order of offsets holds, whatever
    the timestamps say. Memory is bounded however long the recording is.

    Attributes:
        name: the topic or the file, for people.
        spans: what is read of each partition, in the order of partitions; it does not change.
        notice: what one should know about it, a file that is cut off, say; empty otherwise.
        passed_over: called, where it is set, with what cannot be read of a topic.
    """

    name: str
    spans: Sequence[Span]
    notice: str = ""
    passed_over: Callable[[Gap], object] | None = None

    @abstractmethod
    def chunks(self) -> AsyncGenerator[list[Record], None]:
        """Read from the beginning, in lists of 1 to `CHUNK_RECORDS` records.

        Close it where it is left early (`contextlib.aclosing`).

        Raises:
            LogUnavailable: no broker answered for a while.
            OffsetOutOfRange: retention has removed records that the recording has.
            CaptureFault: the capture file is damaged where it is read.
        """

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Each record; see `chunks`."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for record in chunk:
                    yield record
