"""Reading of capture files: complete ones by index, truncated ones up to the last whole record."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from headrace.errors import ConfigurationError
from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.capture import (
    CODEC,
    FOOTER,
    FOOTER_BYTES,
    FOOTER_TYPE,
    FORMAT,
    MAX_FRAME_BYTES,
    VERSION,
    CaptureFault,
    Frame,
)
from headrace.tools.replay.totals import PartitionTotals, Totals

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
        CaptureFault: the index, or a frame of a file without index, is damaged.
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
        CaptureFault: the frame is damaged, or no longer there.
    """
    try:
        with path.open("rb") as file:
            stored = _frame_at(path, file, frame.at)
    except (OSError, msgpack.OutOfData, _EndOfFrames) as error:
        raise CaptureFault(f"{path}: byte {frame.at}: the frame is gone ({error!r})") from error
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
        raise CaptureFault(f"{path}: byte {at}: expected a frame, got {error}") from error
    if not 0 < frame.raw_bytes <= MAX_FRAME_BYTES or not 0 < frame.stored_bytes <= MAX_FRAME_BYTES:
        raise CaptureFault(
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
        raise CaptureFault(f"{path}: byte {at}: expected {size} bytes of a frame")
    return file.read(size), at + 1 + width + size


def _records(path: Path, stored: _Stored, *, complete: bool) -> list[Record]:
    frame, content = stored.frame, stored.content
    where = f"{path}: frame at byte {frame.at}"
    whole = len(content) == frame.stored_bytes
    if not whole and complete:
        raise CaptureFault(f"{where}: expected {frame.stored_bytes} bytes, got {len(content)}")
    if whole and zlib.crc32(content) != frame.crc32:
        raise CaptureFault(f"{where}: expected CRC-32 {frame.crc32}, got {zlib.crc32(content)}")
    try:
        raw = zlib.decompressobj().decompress(content, frame.raw_bytes + 1)
    except zlib.error as error:
        raise CaptureFault(f"{where}: {error}") from error
    if len(raw) > frame.raw_bytes or (whole and len(raw) < frame.raw_bytes):
        raise CaptureFault(f"{where}: expected {frame.raw_bytes} bytes of records, got {len(raw)}")
    records = _unpacked(where, raw)
    if whole and len(records) != frame.records:
        raise CaptureFault(f"{where}: expected {frame.records} records, got {len(records)}")
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
        raise CaptureFault(f"{where}: record {len(records)}: {error}") from error
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
        raise CaptureFault(f"{path}: byte {at}: expected an index, got {error}") from error
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
