"""Answered offsets of a partition: a base, and the answered ranges above it.

Every offset below the *base* is answered. Above it, answers complete out of order, so a set of
answered ranges is kept. A commit carries both, the base as the offset and the ranges as the
metadata text, so that a new owner repeats no answer.

Offsets that were never delivered (transaction markers, compacted or aborted records) lie between
a record and the one delivered before it. An answer therefore covers everything from just after
its predecessor up to itself, and gaps close by themselves.

The metadata text is a version digit, a form letter and URL-safe base64 of the body, relative to
the base: `1r` holds run lengths as unsigned LEB128 numbers (gap, run, gap, run, …), `1b` a bitmap
whose lowest bit is the base. Runs are written unless a bitmap holds more of the ranges.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

from headrace.errors import Fatal
from headrace.log.port import Committed, TopicPartition
from headrace.tuning import TUNING

_MAX_CHARACTERS = TUNING.delivery.metadata_characters

Range = tuple[int, int]
"""Half-open range of offsets: (start, stop)."""


class UnknownMetadata(Fatal):
    """Committed metadata that this version cannot read; ignoring it would repeat answers."""


class AckedOffsets:
    """Base and answered ranges of one partition."""

    __slots__ = ("_starts", "_stops", "base")

    def __init__(self, base: int, answered: Iterable[Range] = ()) -> None:
        self.base = base
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in answered:
            self._add(start, stop)

    def __contains__(self, offset: int) -> bool:
        """Return True if the offset is answered."""
        if offset < self.base:
            return True
        place = bisect_right(self._starts, offset) - 1
        return place >= 0 and offset < self._stops[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AckedOffsets):
            return NotImplemented
        return self.base == other.base and self.ranges == other.ranges

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"AckedOffsets(base={self.base}, answered={self.ranges})"

    @property
    def highest(self) -> int:
        """Offset at and above which nothing is answered."""
        return self._stops[-1] if self._stops else self.base

    @property
    def answered_above(self) -> tuple[int, int]:
        """Number of answered offsets above the base, and of their ranges."""
        return sum(self._stops) - sum(self._starts), len(self._starts)

    def answered_beyond(self, committed: Committed) -> int:
        """Return how many offsets are answered here and not in a commit. Raises
        `UnknownMetadata`.
        """
        other = AckedOffsets.from_committed(committed)
        return max(0, self.base + self.answered_above[0] - other.base - other.answered_above[0])

    @property
    def ranges(self) -> list[Range]:
        """Answered ranges above the base, in order; no two touch."""
        return list(zip(self._starts, self._stops, strict=True))

    def unanswered(self, stop: int) -> list[Range]:
        """Return the unanswered ranges below `stop`, in order."""
        found: list[Range] = []
        position = self.base
        for start, end in self.ranges:
            if start >= stop:
                break
            found.append((position, start))
            position = end
        if position < stop:
            found.append((position, stop))
        return found

    def mark_acked(self, previous: int, offset: int) -> None:
        """Mark `offset` as answered, and all offsets between `previous` and it as absent."""
        self._add(previous + 1, offset + 1)

    def _add(self, start: int, stop: int) -> None:
        if stop <= self.base:
            return
        if start <= self.base:
            self.base = stop
            if self._starts:
                self._absorb_into_base()
            return
        starts, stops = self._starts, self._stops
        # Merge the new range with all that it touches or overlaps.
        first = bisect_left(stops, start)
        last = bisect_right(starts, stop)
        if first < last:
            start = min(start, starts[first])
            stop = max(stop, stops[last - 1])
        starts[first:last] = [start]
        stops[first:last] = [stop]

    def _absorb_into_base(self) -> None:
        starts, stops = self._starts, self._stops
        reached = bisect_right(starts, self.base)
        if reached:
            self.base = max(self.base, stops[reached - 1])
            del starts[:reached], stops[:reached]

    def truncate(self, end: int) -> None:
        """Forget answered offsets from `end` on: the log has lost those records and will reuse
        their offsets.
        """
        self.base = min(self.base, end)
        starts, stops = self._starts, self._stops
        kept = bisect_left(starts, end)
        del starts[kept:], stops[kept:]
        if stops:
            stops[-1] = min(stops[-1], end)

    def copy(self) -> AckedOffsets:
        """Return an independent copy."""
        other = AckedOffsets(self.base)
        other._starts, other._stops = self._starts[:], self._stops[:]
        return other

    def merge(self, other: AckedOffsets) -> None:
        """Merge the answered offsets of `other` into this one."""
        self._add(self.base, other.base)
        for start, stop in other.ranges:
            self._add(start, stop)

    def committable(self, max_characters: int = _MAX_CHARACTERS) -> Committed:
        """Return what may be committed now. If not all ranges fit into `max_characters` of
        metadata, the highest are left out; a new owner would answer them once more.
        """
        return self._committable(max_characters)[0]

    def committable_whole(self, max_characters: int) -> Committed | None:
        """Return what may be committed now; None if not all ranges fit."""
        committable, ranges = self._committable(max_characters)
        return committable if ranges == len(self._starts) else None

    def _committable(self, max_characters: int) -> tuple[Committed, int]:
        """Return what may be committed now, and how many ranges it holds."""
        max_bytes = _body_bytes(max_characters)
        # More ranges fit in neither form: in a bitmap a range takes two bits or more.
        count = max_bytes * 4
        ranges = list(zip(self._starts[:count], self._stops[:count], strict=True))
        text, kept = _encode(self.base, ranges, max_bytes)
        return Committed(self.base, text), kept

    @classmethod
    def from_committed(cls, committed: Committed) -> AckedOffsets:
        """Decode a commit. Raises `UnknownMetadata`."""
        return cls(committed.offset, decode_ranges(committed.offset, committed.metadata))

    @classmethod
    def of_partition(cls, partition: TopicPartition, committed: Committed) -> AckedOffsets:
        """Decode the commit of a partition, which is named in `UnknownMetadata`."""
        try:
            return cls.from_committed(committed)
        except UnknownMetadata as error:
            raise UnknownMetadata(f"{partition}: {error}") from error


def encode_ranges(base: int, ranges: Sequence[Range]) -> str:
    """Encode as many ranges as fit, lowest first; return empty text for none."""
    return _encode(base, ranges, _body_bytes(_MAX_CHARACTERS))[0]


def _body_bytes(max_characters: int) -> int:
    """Return the bytes that fit as base64 after the version and form characters."""
    return (max_characters - 2) * 6 // 8


def _encode(base: int, ranges: Sequence[Range], max_bytes: int) -> tuple[str, int]:
    """Return the metadata text, and how many of the ranges it holds."""
    if not ranges:
        return "", 0
    runs, in_runs = _encode_runs(base, ranges, max_bytes)
    if in_runs < len(ranges):
        bitmap, in_bitmap = _encode_bitmap(base, ranges, max_bytes)
        if in_bitmap > in_runs:
            return "1b" + bitmap, in_bitmap
    return ("1r" + runs, in_runs) if in_runs else ("", 0)


def decode_ranges(base: int, metadata: str) -> list[Range]:
    """Decode the text of `encode_ranges`. Raises `UnknownMetadata`."""
    if not metadata:
        return []
    form, text = metadata[:2], metadata[2:]
    try:
        body = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnknownMetadata(_unreadable(metadata)) from error
    if form == "1r":
        return _decode_runs(base, body, metadata)
    if form == "1b":
        return _decode_bitmap(base, body)
    raise UnknownMetadata(_unreadable(metadata))


def _unreadable(metadata: str) -> str:
    return (
        f"committed metadata: expected forms 1r and 1b, got {metadata[:20]!r}: another version of "
        "Headrace, or something else, has committed for this group"
    )


def _text(body: bytes) -> str:
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode("ascii")


def _encode_runs(base: int, ranges: Sequence[Range], max_bytes: int) -> tuple[str, int]:
    """Return the run-length text, without the form, and how many ranges it holds."""
    body = bytearray()
    position = base
    kept = 0
    for start, stop in ranges:
        length = len(body)
        for number in (start - position, stop - start):
            while number >= 0x80:
                body.append(number & 0x7F | 0x80)
                number >>= 7  # noqa: PLW2901 - LEB128 takes the number apart
            body.append(number)
        if len(body) > max_bytes:
            del body[length:]
            break
        kept += 1
        position = stop
    return _text(bytes(body)), kept


def _decode_runs(base: int, body: bytes, metadata: str) -> list[Range]:
    numbers: list[int] = []
    number = shift = 0
    for byte in body:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            numbers.append(number)
            number = shift = 0
    if shift or len(numbers) % 2:
        raise UnknownMetadata(_unreadable(metadata))
    ranges: list[Range] = []
    position = base
    for gap, run in zip(numbers[::2], numbers[1::2], strict=True):
        ranges.append((position + gap, position + gap + run))
        position += gap + run
    return ranges


def _encode_bitmap(base: int, ranges: Sequence[Range], max_bytes: int) -> tuple[str, int]:
    """Return the bitmap text, without the form, and how many ranges it holds."""
    kept = bisect_right(ranges, base + max_bytes * 8, key=itemgetter(1))
    digits: list[str] = []
    position = base
    for start, stop in ranges[:kept]:
        digits += ("0" * (start - position), "1" * (stop - start))
        position = stop
    # Parsing is linear in the number of digits, because the radix is a power of two.
    bits = int("".join(digits)[::-1] or "0", 2)
    return _text(bits.to_bytes((position - base + 7) // 8, "little")), kept


def _decode_bitmap(base: int, body: bytes) -> list[Range]:
    bits = int.from_bytes(body, "little")
    ranges: list[Range] = []
    position = base
    while bits:
        gap = (bits & -bits).bit_length() - 1
        bits >>= gap
        run = (~bits & (bits + 1)).bit_length() - 1
        bits >>= run
        ranges.append((position + gap, position + gap + run))
        position += gap + run
    return ranges
