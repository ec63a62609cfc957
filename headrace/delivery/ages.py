"""Age of a partition's oldest unanswered record, tracked by chunk instead of by record."""

from __future__ import annotations

from collections import deque

from headrace.tuning import TUNING


class RecordAges:
    """First timestamp of each chunk read, kept until the chunk is answered.

    A partly answered chunk counts as old as its first record: the age is too high by at most the
    span of one poll, and never too low. Beyond `max_marks` chunks, neighbours are merged in pairs.
    """

    __slots__ = ("_marks", "_max_marks")

    def __init__(self, max_marks: int = TUNING.delivery.max_age_marks) -> None:
        self._max_marks = max_marks
        self._marks: deque[tuple[int, int]] = deque()

    def note(self, last_offset: int, first_timestamp_ms: int) -> None:
        """Record that a chunk was read, up to and including `last_offset`."""
        marks = self._marks
        marks.append((last_offset, first_timestamp_ms))
        if len(marks) > self._max_marks:
            lasts = list(marks)[1::2]
            firsts = list(marks)[::2]
            newest = [firsts[-1]] if len(firsts) > len(lasts) else []
            merged = [(last, first) for (last, _), (_, first) in zip(lasts, firsts, strict=False)]
            self._marks = deque(merged + newest)

    def oldest_ms(self, base: int) -> int | None:
        """Return the first timestamp of the oldest unanswered chunk; None if all are answered.

        Args:
            base: the lowest unanswered offset; it never decreases.
        """
        marks = self._marks
        while marks and marks[0][0] < base:
            marks.popleft()
        return marks[0][1] if marks else None
