"""An image or sound file whose structure is read, and the errors that it may lead to."""

from __future__ import annotations

import struct
from collections.abc import Collection

from headrace.errors import Code, Rejected


class MediaFile:
    """A file in memory. What it lacks, and where it ends, is an error of its request.

    Args:
        content: the file.
        where: the file in messages, such as `payload`.
        name: its format.
        max_parts: most parts that may be counted.

    Attributes:
        content, name: the same.
        size: number of bytes.
    """

    def __init__(self, content: bytes, where: str, name: str, max_parts: int) -> None:
        self.content = content
        self.size = len(content)
        self.name = name
        self._where = where
        self._parts_left = self._max_parts = max_parts

    def need(self, what: str, start: int, stop: int) -> None:
        """Refuse a file that ends within a part of it. Raises `Rejected`."""
        if stop > self.size:
            raise self.damaged(
                f"{what} in bytes {start} to {stop}", f"a file that ends at byte {self.size}"
            )

    def count(self, what: str) -> None:
        """Count a part of the file; refuse one with too many. Raises `Rejected`."""
        self._parts_left -= 1
        if self._parts_left < 0:
            raise self.too_large(f"at most {self._max_parts} {what}", "more")

    def unpack(self, layout: str, start: int, what: str) -> tuple[int, ...]:
        """Return integers from the file. Raises `Rejected` if it ends within them."""
        self.need(what, start, start + struct.calcsize(layout))
        return struct.unpack_from(layout, self.content, start)

    def damaged(self, expected: str, got: str) -> Rejected:
        """Return the error of a file that does not have the structure of its format."""
        return self._mismatch(Code.INVALID_REQUEST, expected, got)

    def too_large(self, expected: str, got: str) -> Rejected:
        """Return the error of a file over a limit."""
        return self._mismatch(Code.TOO_LARGE, expected, got)

    def _mismatch(self, code: Code, expected: str, got: str) -> Rejected:
        where = f"{self._where}: {self.name}"
        return Rejected.mismatch(code, where, expected=expected, got=got)


def other_content_type(content_type: str, where: str, known: Collection[str]) -> Rejected:
    """Return the error of content whose type is none of the known ones."""
    return Rejected.mismatch(
        Code.INVALID_REQUEST,
        "header content-type" if where == "payload" else f"{where}: content-type",
        expected=f"one of {', '.join(known)}, multipart/mixed",
        got=content_type,
    )


def other_format(named: str | None, content_type: str, where: str, found: str) -> Rejected:
    """Return the error of a file in another format than its content type names."""
    return Rejected.mismatch(
        Code.INVALID_REQUEST,
        where,
        expected=f"{named}, as content-type {content_type} says",
        got=found,
    )
