"""What waits for its callers, within a bound that the longest-waiting ones give way to."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingForCallers(Generic[T]):
    """Counts what waits for its callers, and the bytes that are kept for it meanwhile.

    Args:
        max_bytes: of all of them; the newest one alone may have more.
        max_count: number of them; None for no limit.

    Attributes:
        size_bytes: of those that wait now.
    """

    def __init__(self, max_bytes: int, max_count: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._sizes: dict[T, int] = {}
        """Longest-waiting first."""
        self.size_bytes = 0

    def add(self, one: T, size_bytes: int) -> list[T]:
        """Count one that begins to wait.

        Returns:
            Those that have waited longest and have to be dropped for it; they no longer count.
        """
        self._sizes[one] = size_bytes
        self.size_bytes += size_bytes
        dropped: list[T] = []
        while len(self._sizes) > 1 and self._is_exceeded():
            longest = next(iter(self._sizes))
            self.remove(longest)
            dropped.append(longest)
        return dropped

    def remove(self, one: T) -> None:
        """Count one no longer, if it waits."""
        self.size_bytes -= self._sizes.pop(one, 0)

    def _is_exceeded(self) -> bool:
        has_too_many = self._max_count is not None and len(self._sizes) > self._max_count
        return has_too_many or self.size_bytes > self._max_bytes
