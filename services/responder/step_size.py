"""The size limit of a partition's next transaction: a pure rule.

A transaction that does not end within `transaction_timeout_ms` is aborted, and all of its answers
must be written again. If a producer quota or a slow network is the cause, the same transaction
would time out forever. So the next one is half as large; the size that worked is kept, and grows
while transactions of that size end well within the timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSizing:
    """The bounds of a step's size.

    Attributes:
        timeout_s: timeout of a transaction.
        quick_share: share of the timeout; a size grows if its transaction took no longer.
        patience: quick transactions before a size that timed out is tried again; doubled after
            each failed try, since a try costs a whole timeout.
        max_patience: upper bound of `patience`.
        max_bytes: from this size on a step has no limit, since the queue itself is bounded.
    """

    timeout_s: float = 10.0
    quick_share: float = 0.25
    patience: int = 32
    max_patience: int = 4096
    max_bytes: int = 64 * 1024 * 1024


class StepSize:
    """The size of the next transactions of one partition.

    Attributes:
        limit_bytes: largest size of one transaction; None if there is no limit.
    """

    def __init__(self, sizing: StepSizing) -> None:
        self._sizing = sizing
        self._timed_out_bytes: int | None = None  # the ceiling: the smallest that has timed out
        self._worked_bytes = 0  # the largest below the ceiling that was committed
        self._quick = 0  # quick transactions since the last time-out
        self._patience = sizing.patience
        self.limit_bytes: int | None = None

    def count(self, sizes: Iterable[int]) -> int:
        """Return how many answers of these sizes, in order, fit into one transaction.

        At least 1, since an answer cannot be divided.
        """
        total = count = 0
        for size_bytes in sizes:
            total += size_bytes
            if count and self.limit_bytes is not None and total > self.limit_bytes:
                break
            count += 1
        return count

    def timed_out(self, size_bytes: int, answers: int) -> None:
        """Halve the size, or return to the last size that worked; keep it for a single answer."""
        if answers <= 1:
            return
        self._quick = 0
        if self._timed_out_bytes is not None and size_bytes >= self._timed_out_bytes:
            self._patience = min(2 * self._patience, self._sizing.max_patience)
            self.limit_bytes = max(size_bytes // 2, self._worked_bytes)
        else:
            self._patience = self._sizing.patience
            self._timed_out_bytes, self._worked_bytes = size_bytes, 0
            self.limit_bytes = size_bytes // 2

    def committed(self, size_bytes: int, took_s: float) -> None:
        """Grow if the transaction was quick and the limit kept it small.

        Near the size that has timed out the limit grows by an eighth, elsewhere it doubles.
        """
        limit, ceiling = self.limit_bytes, self._timed_out_bytes
        if limit is None:
            return
        if ceiling is not None and size_bytes >= ceiling:
            self._timed_out_bytes = ceiling = None
        self._worked_bytes = max(self._worked_bytes, size_bytes)
        is_quick = took_s <= self._sizing.quick_share * self._sizing.timeout_s
        if not is_quick or 2 * size_bytes < limit:
            return
        self._quick += 1
        is_near = ceiling is not None and limit >= ceiling // 2
        grown = limit + (limit // 8 if is_near else limit) + 1
        if ceiling is not None and grown >= ceiling and self._quick < self._patience:
            return
        self.limit_bytes = grown if grown < self._sizing.max_bytes else None
