"""Ordered answers: a record that has ended is held until its predecessor has left.

With order by partition, the predecessor of a record is the one delivered before it. With order by
key, it is the last earlier one with the same key, and a record may have none. In both cases a
record leaves once its predecessor has left, or is already answered; with order by partition, all
before its predecessor must be answered as well.

Synchronous, and without I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.tuning import TUNING

T = TypeVar("T")


class Answered(Protocol):
    """Set of answered offsets, such as `headrace.delivery.acked_offsets.AckedOffsets`."""

    def __contains__(self, offset: int) -> bool: ...


class BelowBase:
    """The offsets below a base, for order by partition.

    What is answered above it may have unanswered records before it: a former owner has passed
    over a cancelling record, or has answered in no order.
    """

    def __init__(self, progress: AckedOffsets) -> None:
        self._progress = progress

    def __contains__(self, offset: int) -> bool:
        return offset < self._progress.base


class AnswerOrder(Generic[T]):
    """Holds the ended records of one source partition, for one assignment.

    Args:
        answered: the offsets that are answered.
    """

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._left: set[int] = set()
        self._min_prune_at = self._prune_at = TUNING.delivery.order_prune_at
        self._held: dict[int, list[tuple[int, T]]] = {}

    @property
    def held(self) -> int:
        """Number of items that wait for a predecessor."""
        return sum(map(len, self._held.values()))

    def add(self, offset: int, predecessor: int | None, item: T) -> list[T]:
        """Add an ended record.

        Args:
            offset: the offset of the record.
            predecessor: the offset that must leave first, if any.
            item: the value to release for the record.

        Returns:
            the items that may leave now, in order: none, or the item and all that waited for it.
        """
        # The predecessor may have left here, or have been answered by a former owner, which only
        # the committed offsets show.
        if predecessor is not None and not self._has_left(predecessor):
            self._held.setdefault(predecessor, []).append((offset, item))
            return []
        return self._leave([(offset, item)])

    def release_answered(self) -> list[T]:
        """Return items whose predecessor was answered meanwhile, for example by another owner."""
        free = sorted(each for each in self._held if each in self._answered)
        return [item for each in free for item in self._leave(self._held.pop(each, []))]

    def waiting(self) -> list[T]:
        """Return all held items."""
        return [item for waiting in self._held.values() for _, item in waiting]

    def drop(self) -> list[T]:
        """Remove and return all held items; called when the partition was revoked."""
        items = self.waiting()
        self._held.clear()
        return items

    def _has_left(self, offset: int) -> bool:
        return offset in self._left or offset in self._answered

    def _leave(self, leaving: list[tuple[int, T]]) -> list[T]:
        # Breadth first: all that wait for one record may leave with it, and those that wait for
        # these follow, so that a caller never sees a record before its predecessor.
        items: list[T] = []
        while leaving:
            following: list[tuple[int, T]] = []
            for offset, item in leaving:
                self._left.add(offset)
                items.append(item)
                following += self._held.pop(offset, ())
            leaving = following
        # A record has left before it is answered, so its offset is kept until its answer counts.
        if len(self._left) >= self._prune_at:
            self._left = {each for each in self._left if each not in self._answered}
            self._prune_at = max(self._min_prune_at, 2 * len(self._left))
        return items


class KeyChains:
    """Predecessor of each record read, for order by key.

    Args:
        is_answered: returns True if an offset is known to be answered and may be forgotten.
        prune_at: number of remembered keys at which those of answered records are dropped.
    """

    def __init__(
        self,
        is_answered: Callable[[int], bool],
        prune_at: int = TUNING.delivery.order_prune_at,
    ) -> None:
        self._is_answered = is_answered
        self._last: dict[bytes, int] = {}
        self._min_prune_at = self._prune_at = prune_at

    def follow(self, key: bytes | None, offset: int) -> int:
        """Add a record; return the offset of the last earlier one with its key, or -1.

        Records without a key are not ordered.
        """
        if key is None:
            return -1
        before = self._last.get(key, -1)
        self._last[key] = offset
        # Only answered records may be forgotten: a later record with the key must wait for others.
        if len(self._last) >= self._prune_at:
            self._last = {
                each: last for each, last in self._last.items() if not self._is_answered(last)
            }
            self._prune_at = max(self._min_prune_at, 2 * len(self._last))
        return before
