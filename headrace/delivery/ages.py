"""How old the oldest unanswered record of a partition is, without a note for each record."""

from __future__ import annotations

from collections import deque

MAX_MARKS = 256


class RecordAges:
    """The first timestamp of each chunk that was read, until the chunk is answered.

    A chunk that is answered in part counts as old as its first record: the age is too high by what
    one poll spans, and never too low. With too many chunks two neighbours become one.
    """

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()

    def note(self, last_offset: int, first_timestamp_ms: int) -> None:
        """A chunk was read, up to this offset."""
        marks = self._marks
        marks.append((last_offset, first_timestamp_ms))
        if len(marks) > MAX_MARKS:
            lasts = list(marks)[1::2]
            firsts = list(marks)[::2]
            newest = [firsts[-1]] if len(firsts) > len(lasts) else []
            merged = [(last, first) for (last, _), (_, first) in zip(lasts, firsts, strict=False)]
            self._marks = deque(merged + newest)

    def oldest_ms(self, base: int) -> int | None:
        """The timestamp of the oldest chunk that is not answered; None when all are.

        Args:
            base: the lowest unanswered offset; it never goes back.
        """
        marks = self._marks
        while marks and marks[0][0] < base:
            marks.popleft()
        return marks[0][1] if marks else None
