"""A priority queue of items whose keys change while they wait.

A heap with lazily updated entries: an entry is corrected when it reaches the top. A key that has
risen needs nothing before that; a key that has fallen needs a new entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """An item of a `Ranking`."""

    @property
    def is_empty(self) -> bool:
        """True if no request waits in it; the item is then removed."""
        ...


R = TypeVar("R", bound=Ranked)


class Ranking(Generic[R]):
    """Priority queue that returns the item with the smallest current key.

    Args:
        key: returns an item's current key; never called with an empty item.
        max_stale: outdated entries to keep before they are removed.
    """

    __slots__ = ("_heap", "_key", "_max_stale", "_order")

    def __init__(self, key: Callable[[R], float], max_stale: int) -> None:
        self._max_stale = max_stale
        self._key = key
        self._order = count()
        self._heap: list[tuple[float, int, R]] = []

    def add(self, one: R, members: int) -> None:
        """Add an item, or update one whose key has fallen; `members` counts all items with it."""
        if len(self._heap) > 2 * members + self._max_stale:
            kept = {id(entry[2]): entry[2] for entry in self._heap if not entry[2].is_empty}
            self._heap = [(self._key(each), next(self._order), each) for each in kept.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._key(one), next(self._order), one))

    def first(self) -> R | None:
        """Return the first item, None if there is none; equal keys keep their insertion order."""
        heap = self._heap
        while heap:
            key, order, one = heap[0]
            if one.is_empty:
                heapq.heappop(heap)
                continue
            now = self._key(one)
            if now <= key:
                return one
            heapq.heapreplace(heap, (now, order, one))
        return None
