"""Decompress small values on the event loop, and leave others to a worker.

How much a compressed value yields is only known afterwards. So the event loop decompresses up to a
number of bytes in one reading; a value that yields more is decompressed again by a worker of
`headrace.services.ingest.transform_waits`, where `limits.max_request_bytes` bounds it.
"""

from __future__ import annotations

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.protocol.compression import decompress, may_hide_its_size
from headrace.tuning import TUNING, IngestTuning


class InlineDecompressor:
    """Decompresses small values, up to a number of bytes in one reading."""

    def __init__(self, limits: LimitSettings, tuning: IngestTuning = TUNING.ingest) -> None:
        self._limits = limits
        self._inline_bytes = tuning.inline_decompressed_bytes
        self._left_bytes = self._inline_bytes

    @property
    def is_exhausted(self) -> bool:
        """True if this reading should end: the event loop has decompressed enough."""
        return self._left_bytes <= 0

    def begin_reading(self) -> None:
        """Allow the event loop as many bytes as one reading may take."""
        self._left_bytes = self._inline_bytes

    def decompress(self, value: bytes | memoryview, coding: str) -> bytes | None:
        """Return what was compressed; None if it is left to a worker.

        Raises:
            Rejected: `TOO_LARGE`, or `INVALID_REQUEST` for a damaged value.
        """
        limit_bytes = self._limits.max_request_bytes
        inline_bytes = min(self._left_bytes, limit_bytes)
        if len(value) > inline_bytes or may_hide_its_size(value, coding):
            return None
        try:
            plain = decompress(value, coding, inline_bytes, "value")
        except Rejected as error:
            self._left_bytes -= inline_bytes if error.code == Code.TOO_LARGE else len(value)
            if error.code != Code.TOO_LARGE or inline_bytes == limit_bytes:
                raise
            return None
        self._left_bytes -= len(plain)
        return plain
