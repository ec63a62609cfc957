"""An order among things whose keys change while they wait.

A heap whose entries may be out of date: an entry is put right when it comes to the top. A key that
has risen needs nothing before that; one that has fallen needs a new entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, TypeVar

_TOLERATED = 32
"""So many entries that are out of date may be kept, before they are cleared away."""


class Ranked(Protocol):
    """What is put in order."""

    @property
    def is_empty(self) -> bool:
        """It has nothing that waits, and leaves the order."""
        ...


R = TypeVar("R", bound=Ranked)


class Ranking(Generic[R]):
    """The one with the smallest key, at any time.

    Args:
        key: what counts now; never asked of what is empty.
    """

    __slots__ = ("_heap", "_key", "_order")

    def __init__(self, key: Callable[[R], float]) -> None:
        self._key = key
        self._order = count()
        self._heap: list[tuple[float, int, R]] = []

    def add(self, one: R, members: int) -> None:
        """One has come, or its key has fallen; `members` is how many there are with it."""
        if len(self._heap) > 2 * members + _TOLERATED:
            kept = {id(entry[2]): entry[2] for entry in self._heap if not entry[2].is_empty}
            self._heap = [(self._key(each), next(self._order), each) for each in kept.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._key(one), next(self._order), one))

    def first(self) -> R | None:
        """The first; of several with the same key, the one that came first."""
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
