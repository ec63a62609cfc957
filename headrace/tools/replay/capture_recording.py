"""A recording backed by a capture file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.capture_reader import Contents, read_contents, read_frame
from headrace.tools.replay.recording import CHUNK_RECORDS, Recording, Span
from headrace.tools.replay.selection import Selection


class CaptureRecording(Recording):
    """Selected records of a capture file; made by `open_capture`.

    The order is that of the file, in which records were captured in order of time.
    """

    def __init__(self, path: Path, contents: Contents, selection: Selection) -> None:
        self.name = str(path)
        self.notice = contents.notice
        self.spans = _spans(contents, selection)
        self._path = path
        self._contents = contents
        self._selection = selection

    async def chunks(self) -> AsyncGenerator[list[Record], None]:
        """See `Recording`."""
        reading = _Reading(self.spans, self._selection)
        from_ms = self._selection.window.from_ms
        for frame in self._contents.frames:
            if from_ms is not None and frame.last_ms < from_ms:
                continue
            if reading.finished:
                return
            records = await asyncio.to_thread(
                read_frame, self._path, frame, complete=self._contents.complete
            )
            selected = reading.select(records)
            for start in range(0, len(selected), CHUNK_RECORDS):
                yield selected[start : start + CHUNK_RECORDS]


class _Reading:
    """State of one reading: which partitions have ended, and how many records may still come."""

    def __init__(self, spans: Sequence[Span], selection: Selection) -> None:
        self._selection = selection
        self._open = {span.partition: span for span in spans if span.begin < span.end}
        self._left = selection.limit

    @property
    def finished(self) -> bool:
        """Return whether no further record can be selected."""
        return not self._open or self._left == 0

    def select(self, records: Sequence[Record]) -> list[Record]:
        """Return the selected records."""
        selected: list[Record] = []
        until_ms = self._selection.window.until_ms
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            span = self._open.get(partition)
            if span is None or record.offset < span.begin:
                continue
            if record.offset >= span.end or (until_ms is not None and record.timestamp >= until_ms):
                del self._open[partition]
            elif self._selection.fits(record):
                if self.finished:
                    break
                selected.append(record)
                if self._left is not None:
                    self._left -= 1
        return selected


def _spans(contents: Contents, selection: Selection) -> list[Span]:
    window = selection.window
    return [
        window.span(each.partition, each.first_offset, each.last_offset + 1)
        for each in contents.partitions
        if window.includes(each.partition.partition)
    ]


@asynccontextmanager
async def open_capture(path: Path, selection: Selection) -> AsyncIterator[CaptureRecording]:
    """Open a capture file as a recording.

    Raises:
        ConfigurationError: the file is missing, or is not a capture file of this version.
        CaptureFault: it is damaged.
    """
    yield CaptureRecording(path, await asyncio.to_thread(read_contents, path), selection)
