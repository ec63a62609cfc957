"""Answers in the order of their source offsets: what has ended waits for its predecessor to leave.

With order by partition, the predecessor of a record is the one delivered before it. With order by
key, it is the last earlier one with the same key, and a record may have none. Either way one rule
is enough: it leaves once its predecessor has left, or is answered since long.

Synchronous, and without I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

_PRUNE_AT = 1024


class Answered(Protocol):
    """The offsets that are answered, such as `headrace.delivery.acked_offsets.Progress`."""

    def __contains__(self, offset: int) -> bool: ...


class Order(Generic[T]):
    """One source partition, for one assignment.

    Args:
        answered: the offsets that are answered.
    """

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._left: set[int] = set()
        self._prune_at = _PRUNE_AT
        self._held: dict[int, list[tuple[int, T]]] = {}

    @property
    def held(self) -> int:
        """How many wait for a predecessor."""
        return sum(map(len, self._held.values()))

    def ended(self, offset: int, predecessor: int | None, item: T) -> list[T]:
        """A record has ended.

        Args:
            offset: the record's.
            predecessor: the offset that goes before it, if any does.
            item: what stands for it.

        Returns:
            what may leave now, in order: nothing, or the item and what waited for it.
        """
        if predecessor is not None and not self._has_left(predecessor):
            self._held.setdefault(predecessor, []).append((offset, item))
            return []
        return self._leave([(offset, item)])

    def look_again(self) -> list[T]:
        """What may leave since its predecessor was found to be answered: by another owner, say."""
        free = sorted(each for each in self._held if each in self._answered)
        return [item for each in free for item in self._leave(self._held.pop(each, []))]

    def waiting(self) -> list[T]:
        """Everything that is held."""
        return [item for waiting in self._held.values() for _, item in waiting]

    def drop(self) -> list[T]:
        """The same, held no more; the partition is not ours any more."""
        items = self.waiting()
        self._held.clear()
        return items

    def _has_left(self, offset: int) -> bool:
        return offset in self._left or offset in self._answered

    def _leave(self, leaving: list[tuple[int, T]]) -> list[T]:
        items: list[T] = []
        while leaving:
            following: list[tuple[int, T]] = []
            for offset, item in leaving:
                self._left.add(offset)
                items.append(item)
                following += self._held.pop(offset, ())
            leaving = following
        if len(self._left) >= self._prune_at:
            self._left = {each for each in self._left if each not in self._answered}
            self._prune_at = max(_PRUNE_AT, 2 * len(self._left))
        return items


class KeyChains:
    """For order by key: which offset goes before a record that is read.

    Args:
        is_answered: whether an offset is, as far as is known: then it need not be remembered.
    """

    def __init__(self, is_answered: Callable[[int], bool]) -> None:
        self._is_answered = is_answered
        self._last: dict[bytes, int] = {}
        self._prune_at = _PRUNE_AT

    def follow(self, key: bytes | None, offset: int) -> int:
        """Note a record; returns the last earlier one with its key, -1 where there is none.

        Records without a key are in no order.
        """
        if key is None:
            return -1
        before = self._last.get(key, -1)
        self._last[key] = offset
        if len(self._last) >= self._prune_at:
            self._last = {
                each: last for each, last in self._last.items() if not self._is_answered(last)
            }
            self._prune_at = max(_PRUNE_AT, 2 * len(self._last))
        return before
