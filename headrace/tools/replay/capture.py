"""Capture files: recorded requests in a file. `docs/replay.md` describes the format in full.

A capture file is a stream of MessagePack objects, so any MessagePack library can read it:

1. a map, the header: `format`, `version`, `codec`, `source`;
2. for each frame a map, its head (`records`, `raw_bytes`, `stored_bytes`, `crc32`, `first_ms`,
   `last_ms`), and a bin, the frame: records as consecutive MessagePack maps, compressed;
3. a map, the index: `frames` (each head, and `at`, its byte position) and `partitions`;
4. an extension object of type 1, the footer: the byte position of the index (8 bytes) and its
   CRC-32 (4 bytes), both big-endian.

A complete file is read by its index. A file without one was truncated by a crash: it is read frame
by frame up to its end, the complete records of a truncated frame included, since zlib can
decompress up to the last available byte.
"""

from __future__ import annotations

import asyncio
import io
import os
import struct
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgpack

from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.recording import (
    CHUNK_RECORDS,
    PartitionTotals,
    Recording,
    Selection,
    Span,
    Totals,
)

# --- format and writer ---------------------------------------------------------------------------


FORMAT = "headrace-capture"
VERSION = 1
CODEC = "zlib"
FOOTER_TYPE = 1
FOOTER = struct.Struct(">QI")
FOOTER_BYTES = 3 + FOOTER.size
"""Size of an `ext 8` object: its type byte, length and own type, and the content."""

FRAME_BYTES = 256 * 1024
"""Uncompressed size of its records at which a frame is closed."""

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Limit of a frame's size, beyond which a file is refused. A frame exceeds `FRAME_BYTES` by at most
one record.
"""

_LEVEL = 1  # higher levels hardly make tensors smaller


class CaptureError(HeadraceError):
    """A capture file is damaged, or cannot be written; the message says where."""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Frame(NamedTuple):
    """A frame's head, and its byte position in the file."""

    at: int
    records: int
    raw_bytes: int
    stored_bytes: int
    crc32: int
    first_ms: int
    last_ms: int


class CaptureWriter:
    """Context manager that writes a capture file. Leaving it adds the index.

    Args:
        path: of the file, which must not exist yet.
        source: description of what is captured.

    Raises (on entering):
        ConfigurationError: the file already exists, or cannot be created.
    """

    def __init__(self, path: Path, source: str, *, frame_bytes: int = FRAME_BYTES) -> None:
        self._path = path
        self._source = source
        self._frame_bytes = frame_bytes
        self._pending = io.BytesIO()
        self._pending_ms: list[int] = []
        self._frames: list[Frame] = []
        self._totals = Totals()
        self._at = 0
        self._opened: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            # It contains callers' data, so only the user who made it may read it.
            self._opened = open(self._path, "xb", opener=_open_private)
        except OSError as error:
            raise ConfigurationError(f"{self._path}: {error.strerror}") from error
        header = {"format": FORMAT, "version": VERSION, "codec": CODEC, "source": self._source}
        self._write(_packed(header))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._opened is not None
        try:
            with self._opened:
                if error is None:
                    self.flush()
                    self._write_index()
        except OSError as closing:  # it tries once more what could not be written
            if error is None:
                raise CaptureError(f"{self._path}: {closing.strerror}") from closing

    def add(self, records: Sequence[Record]) -> None:
        """Write records, in the order in which they are to be read.

        Raises:
            CaptureError: the file cannot be written (the disk is full, say), or a record is too
                large.
        """
        for record in records:
            packed = _packed(_as_map(record))
            if len(packed) > MAX_FRAME_BYTES - self._frame_bytes:
                raise CaptureError(f"{self._path}: a record of {len(packed)} bytes is too large")
            self._pending.write(packed)
            self._pending_ms.append(record.timestamp)
            if self._pending.tell() >= self._frame_bytes:
                self.flush()
        self._totals.add(records)

    def flush(self) -> None:
        """Close the frame, so that its records are safely in the file."""
        if not self._pending_ms:
            return
        raw = self._pending.getvalue()
        stored = zlib.compress(raw, _LEVEL)
        frame = Frame(
            self._at,
            len(self._pending_ms),
            len(raw),
            len(stored),
            zlib.crc32(stored),
            min(self._pending_ms),
            max(self._pending_ms),
        )
        self._frames.append(frame)
        head = frame._asdict()
        del head["at"]
        self._write(_packed(head) + _packed(stored))
        self._pending = io.BytesIO()
        self._pending_ms = []

    def _write_index(self) -> None:
        partitions = [
            {**each.partition._asdict(), **_without_partition(each)}
            for each in self._totals.partitions()
        ]
        frames = [frame._asdict() for frame in self._frames]
        index = _packed({"frames": frames, "partitions": partitions})
        footer = msgpack.ExtType(FOOTER_TYPE, FOOTER.pack(self._at, zlib.crc32(index)))
        self._write(index + _packed(footer))

    def _write(self, content: bytes) -> None:
        assert self._opened is not None
        try:
            self._opened.write(content)
            self._opened.flush()
        except OSError as error:
            raise CaptureError(f"{self._path}: {error.strerror}") from error
        self._at += len(content)


def _as_map(record: Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "value": record.value,
        "headers": [list(header) for header in record.headers],
    }


def _without_partition(totals: PartitionTotals) -> dict[str, Any]:
    fields = totals._asdict()
    del fields["partition"]
    return fields


def _packed(content: object) -> bytes:
    # A header name that is not UTF-8 keeps its bytes when written and read again.
    packed: bytes = msgpack.packb(content, unicode_errors="surrogateescape")
    return packed


# --- reader --------------------------------------------------------------------------------------


_HEADER_BYTES = 64 * 1024
_HEAD_BYTES = 4096
_MAX_HEADERS = 100_000
_BROKEN = (msgpack.UnpackException, ValueError, TypeError, KeyError, RecursionError)
"""Errors that msgpack, or the fields of a map, raise for corrupt bytes."""


class Contents(NamedTuple):
    """Contents of a capture file.

    Attributes:
        source: description of what was captured.
        frames: in file order; the last one may be truncated.
        complete: whether the file has its index; otherwise its contents were counted by reading it.
        records: number of complete records.
        notice: a note for display; empty if nothing is missing.
    """

    source: str
    frames: list[Frame]
    partitions: list[PartitionTotals]
    complete: bool
    records: int
    notice: str = ""


def read_contents(path: Path) -> Contents:
    """Return a file's index; without one, the result of reading the whole file.

    Raises:
        ConfigurationError: the file is missing, or is not a capture file of this version.
        CaptureError: the index, or a frame of a file without index, is damaged.
    """
    try:
        with path.open("rb") as file:
            source, first_at = _read_header(path, file)
            index_at = _footer(path, file)
            if index_at is not None:
                return _read_index(path, file, source, index_at)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    return _survey(path, source, first_at)


def read_frame(path: Path, frame: Frame, *, complete: bool) -> list[Record]:
    """Return the records of a frame; the complete ones if the frame is truncated.

    Raises:
        CaptureError: the frame is damaged, or no longer there.
    """
    try:
        with path.open("rb") as file:
            stored = _frame_at(path, file, frame.at)
    except (OSError, msgpack.OutOfData, _EndOfFrames) as error:
        raise CaptureError(f"{path}: byte {frame.at}: the frame is gone ({error!r})") from error
    return _records(path, stored, complete=complete)


class _Stored(NamedTuple):
    """A stored frame; `content` may be shorter than its head says."""

    frame: Frame
    content: bytes
    end: int


def _survey(path: Path, source: str, at: int) -> Contents:
    """Read a file without index."""
    frames: list[Frame] = []
    totals = Totals()
    records = 0
    at_end = path.stat().st_size
    with path.open("rb") as file:
        for stored in _frames(path, file, at):
            found = _records(path, stored, complete=False)
            frames.append(stored.frame)
            totals.add(found)
            records += len(found)
            at = min(stored.end, at_end)
    notice = (
        f"{path}: its end is missing or damaged; {records} whole records are in its first {at} "
        f"of {at_end} bytes"
    )
    return Contents(source, frames, totals.partitions(), False, records, notice)


def _frames(path: Path, file: BinaryIO, at: int) -> Iterator[_Stored]:
    while True:
        try:
            stored = _frame_at(path, file, at)
        except (msgpack.OutOfData, _EndOfFrames):
            return
        yield stored
        if len(stored.content) < stored.frame.stored_bytes:
            return
        at = stored.end


class _EndOfFrames(Exception):
    """Raised at the beginning of the index."""


def _frame_at(path: Path, file: BinaryIO, at: int) -> _Stored:
    """Read a frame; raise `OutOfData` if its head, or the start of its bin, is truncated."""
    file.seek(at)
    unpacker = _unpacker(file, MAX_FRAME_BYTES)
    try:
        head = unpacker.unpack()
        if isinstance(head, dict) and "frames" in head:
            raise _EndOfFrames
        frame = Frame(at, *(head[name] for name in Frame._fields[1:]))
        if not all(isinstance(each, int) for each in frame):
            raise ValueError(f"expected numbers, got {frame}")
    except msgpack.OutOfData:
        raise
    except _BROKEN as error:
        raise CaptureError(f"{path}: byte {at}: expected a frame, got {error}") from error
    if not 0 < frame.raw_bytes <= MAX_FRAME_BYTES or not 0 < frame.stored_bytes <= MAX_FRAME_BYTES:
        raise CaptureError(
            f"{path}: byte {at}: expected a frame of at most {MAX_FRAME_BYTES} bytes, got {frame}"
        )
    start = at + unpacker.tell()
    content, end = _read_bin(path, file, start, frame.stored_bytes)
    return _Stored(frame, content, end)


def _read_bin(path: Path, file: BinaryIO, at: int, size: int) -> tuple[bytes, int]:
    """Return the available content of a bin object, and the byte position after it."""
    file.seek(at)
    lengths = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # for `bin 8`, `bin 16` and `bin 32`
    kind = file.read(1)
    if not kind:
        raise msgpack.OutOfData
    width = lengths.get(kind[0], 0)
    length = file.read(width)
    if len(length) < width:
        raise msgpack.OutOfData
    if not width or int.from_bytes(length, "big") != size:
        raise CaptureError(f"{path}: byte {at}: expected {size} bytes of a frame")
    return file.read(size), at + 1 + width + size


def _records(path: Path, stored: _Stored, *, complete: bool) -> list[Record]:
    frame, content = stored.frame, stored.content
    where = f"{path}: frame at byte {frame.at}"
    whole = len(content) == frame.stored_bytes
    if not whole and complete:
        raise CaptureError(f"{where}: expected {frame.stored_bytes} bytes, got {len(content)}")
    if whole and zlib.crc32(content) != frame.crc32:
        raise CaptureError(f"{where}: expected CRC-32 {frame.crc32}, got {zlib.crc32(content)}")
    try:
        raw = zlib.decompressobj().decompress(content, frame.raw_bytes + 1)
    except zlib.error as error:
        raise CaptureError(f"{where}: {error}") from error
    if len(raw) > frame.raw_bytes or (whole and len(raw) < frame.raw_bytes):
        raise CaptureError(f"{where}: expected {frame.raw_bytes} bytes of records, got {len(raw)}")
    records = _unpacked(where, raw)
    if whole and len(records) != frame.records:
        raise CaptureError(f"{where}: expected {frame.records} records, got {len(records)}")
    return records


def _unpacked(where: str, raw: bytes) -> list[Record]:
    records: list[Record] = []
    unpacker = _unpacker(None, max(len(raw), 1))
    unpacker.feed(raw)
    try:
        for each in unpacker:
            headers = tuple((name, value) for name, value in each["headers"])
            record = Record._make((*(each[name] for name in Record._fields[:-1]), headers))
            _check(record)
            records.append(record)
    except (*_BROKEN, AttributeError) as error:
        raise CaptureError(f"{where}: record {len(records)}: {error}") from error
    return records


def _check(record: Record) -> None:
    """Check a record against Kafka's rules, so that a file yields only valid records."""
    for name, value in record._asdict().items():
        if name == "topic":
            fits = isinstance(value, str)
        elif name in {"key", "value"}:
            fits = value is None or isinstance(value, bytes)
        elif name == "headers":
            fits = all(
                isinstance(key, str) and (content is None or isinstance(content, bytes))
                for key, content in value
            )
        else:
            fits = type(value) is int
        if not fits:
            raise ValueError(f"{name}: unexpected {value!r}"[:200])


def _read_header(path: Path, file: BinaryIO) -> tuple[str, int]:
    unpacker = _unpacker(file, _HEADER_BYTES)
    try:
        header = unpacker.unpack()
    except _BROKEN:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigurationError(f"{path}: expected a capture file, got something else")
    if header.get("version") != VERSION:
        raise ConfigurationError(
            f"{path}: expected version {VERSION} of the capture format, got {header.get('version')}"
        )
    if header.get("codec") != CODEC:
        raise ConfigurationError(f"{path}: expected codec {CODEC}, got {header.get('codec')}")
    return str(header.get("source", "")), unpacker.tell()


def _footer(path: Path, file: BinaryIO) -> int | None:
    """Return the position of the index; None if the file has no complete footer."""
    size = path.stat().st_size
    file.seek(max(size - FOOTER_BYTES, 0))
    try:
        footer = msgpack.unpackb(file.read(FOOTER_BYTES))
    except _BROKEN:
        return None
    if not isinstance(footer, msgpack.ExtType) or footer.code != FOOTER_TYPE:
        return None
    at, crc32 = FOOTER.unpack(footer.data)
    file.seek(min(at, size))
    return int(at) if zlib.crc32(file.read()[:-FOOTER_BYTES]) == crc32 else None


def _read_index(path: Path, file: BinaryIO, source: str, at: int) -> Contents:
    file.seek(at)
    try:
        index = _unpacker(file, MAX_FRAME_BYTES).unpack()
        frames = [Frame(*(each[name] for name in Frame._fields)) for each in index["frames"]]
        partitions = [
            PartitionTotals(
                TopicPartition(each["topic"], each["partition"]),
                *(each[name] for name in PartitionTotals._fields[1:]),
            )
            for each in index["partitions"]
        ]
    except _BROKEN as error:
        raise CaptureError(f"{path}: byte {at}: expected an index, got {error}") from error
    records = sum(frame.records for frame in frames)
    return Contents(source, frames, partitions, True, records)


def _unpacker(file: BinaryIO | None, most_bytes: int) -> Any:
    """Return a streaming reader that accepts no object larger than the format allows."""
    return msgpack.Unpacker(
        file,
        read_size=min(_HEAD_BYTES, most_bytes),
        max_buffer_size=most_bytes,
        max_array_len=max(_MAX_HEADERS, most_bytes // 64),
        max_map_len=64,
        unicode_errors="surrogateescape",
    )


# --- recording -----------------------------------------------------------------------------------


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
        reading = _CaptureReader(self.spans, self._selection)
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


class _CaptureReader:
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
        CaptureError: it is damaged.
    """
    yield CaptureRecording(path, await asyncio.to_thread(read_contents, path), selection)
