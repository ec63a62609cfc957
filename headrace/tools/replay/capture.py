"""The capture file's format, and its writer. `docs/replay.md` describes it in full.

A capture file is a stream of MessagePack objects, so any MessagePack library can read it:

1. a map, the header: `format`, `version`, `codec`, `source`;
2. for each frame a map, its head (`records`, `raw_bytes`, `stored_bytes`, `crc32`, `first_ms`,
   `last_ms`), and a bin, the frame: records as consecutive MessagePack maps, compressed;
3. a map, the index: `frames` (each head, and `at`, its byte position) and `partitions`;
4. an extension object of type 1, the footer: the byte position of the index (8 bytes) and its
   CRC-32 (4 bytes), both big-endian.

Records written before a crash can be read: without an index, a reader reads frames up to the end,
and the complete records of a truncated frame. The latter works because zlib can decompress up to
the last available byte.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgpack

from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.port import Record
from headrace.tools.replay.totals import PartitionTotals, Totals

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


class CaptureFault(HeadraceError):
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
        with self._opened:
            if error is None:
                self.flush()
                self._write_index()

    def add(self, records: Sequence[Record]) -> None:
        """Write records, in the order in which they are to be read.

        Raises:
            CaptureFault: the file cannot be written (the disk is full, say), or a record is too
                large.
        """
        for record in records:
            packed = _packed(_as_map(record))
            if len(packed) > MAX_FRAME_BYTES - self._frame_bytes:
                raise CaptureFault(f"{self._path}: a record of {len(packed)} bytes is too large")
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
            raise CaptureFault(f"{self._path}: {error.strerror}") from error
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
