"""Decompress values: small ones on the event loop, others on a thread.

How much a compressed value yields is only known afterwards. So the event loop decompresses up to a
number of bytes in one reading; a value that yields more is decompressed again on the thread, where
`limits.max_request_bytes` bounds it.
"""

from __future__ import annotations

from collections import deque

from headrace.config import LimitSettings
from headrace.errors import Code, Rejected
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.compression import decompress, fills_large_window
from headrace.protocol.messages import Request
from headrace.tuning import TUNING, IngestTuning


class ValueDecompressor:
    """Decompresses values of one reading, and keeps those for the thread.

    Attributes:
        waiting: requests whose values are for the thread, in the order of their records.
    """

    def __init__(self, limits: LimitSettings, tuning: IngestTuning = TUNING.ingest) -> None:
        self._limits = limits
        self._inline_bytes = tuning.inline_decompressed_bytes
        self._left_bytes = self._inline_bytes
        self._worker = WorkerThread("decompression")
        self.waiting: deque[Request] = deque()

    @property
    def is_exhausted(self) -> bool:
        """True if this reading should end: the event loop has decompressed enough."""
        return self._left_bytes <= 0 or bool(self.waiting)

    def begin_reading(self) -> None:
        """Allow the event loop as many bytes as one reading may take."""
        self._left_bytes = self._inline_bytes

    def decompress(self, request: Request, value: bytes | memoryview) -> bytes | None:
        """Return what was compressed; None if it is left to the thread.

        Raises:
            Rejected: `TOO_LARGE`, or `INVALID_REQUEST` for a damaged value.
        """
        limit_bytes = self._limits.max_request_bytes
        inline_bytes = min(self._left_bytes, limit_bytes)
        coding = request.envelope.content_encoding
        if len(value) <= inline_bytes and not fills_large_window(value, coding):
            try:
                plain = _decompress(request, value, inline_bytes)
            except Rejected as error:
                self._left_bytes -= inline_bytes if error.code == Code.TOO_LARGE else len(value)
                if error.code != Code.TOO_LARGE or inline_bytes == limit_bytes:
                    raise
            else:
                self._left_bytes -= len(plain)
                return plain
        self.waiting.append(request)
        return None

    async def decompress_next(self) -> tuple[Request, bytes]:
        """Decompress the first waiting value on the thread; return its request and the result.

        One at a time: until its request is passed on, and so charged to its model's share of the
        budget, no other is made.

        Raises:
            Rejected: as `decompress` does.
        """
        request = self.waiting.popleft()
        value = request.value or b""
        if not self._worker.is_started:
            self._worker.start()
        limit_bytes = self._limits.max_request_bytes
        work = self._worker.call(lambda: _decompress(request, value, limit_bytes))
        return request, await work.done

    def close(self) -> None:
        """End the thread."""
        self._worker.close()


def _decompress(request: Request, value: bytes | memoryview, limit_bytes: int) -> bytes:
    return decompress(value, request.envelope.content_encoding, limit_bytes, "value")
