"""Cache of a bounded number of entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """Dictionary that is cleared when it is full.

    Look-ups are those of a dictionary. It suits values that are cheap to make again, and keys that
    are few unless a caller makes them up.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def add(self, key: K, value: V) -> V:
        """Cache a value, and return it."""
        if len(self) >= self._max_entries:
            self.clear()
        self[key] = value
        return value
