"""Requests that have run, and whose answers no broker takes for now.

A reply partition may have no leader for hours. Its requests stay in flight as long, but nothing of
a model's runs for them any more: a process cannot die of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.flow.inflight import Assignment, Ledger, LedgerReceipt
from headrace.messages import Request

QUIET_S = 1.0
"""What is in the responder and has not been settled, nor anything else, for so long, is aside."""


def _nobody() -> Iterable[Request]:
    return ()


class Aside:
    """Looks for them, when it is asked.

    Args:
        ledger: of what is in flight.

    Attributes:
        unacknowledged: says which requests the responder has in hand; nobody's, where there is
            no responder in the process.
        receipts: of those that are aside, as of the last look.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._budget = ledger.budget
        self._settled = -1
        self._quiet_since_s = 0.0
        self.unacknowledged: Callable[[], Iterable[Request]] = _nobody
        self.receipts: Sequence[LedgerReceipt] = ()

    def look(self, now_s: float) -> None:
        """Find them anew after a while in which nothing was settled."""
        if self._budget.settled != self._settled:
            self._settled, self._quiet_since_s = self._budget.settled, now_s
            self.receipts = [receipt for receipt in self.receipts if receipt.parts]
        elif now_s - self._quiet_since_s >= QUIET_S:
            self._quiet_since_s = now_s
            receipts = [request.receipt for request in self.unacknowledged()]
            self.receipts = [
                each for each in receipts if isinstance(each, LedgerReceipt) and each.parts
            ]

    @property
    def is_all(self) -> bool:
        """Whether nothing else is in flight."""
        return self._budget.used_bytes == sum(each.size_bytes for each in self.receipts)

    def has_all_below(self, assignment: Assignment, stop: int) -> bool:
        """Whether each record of a partition below `stop` is either answered or aside."""
        mine = [each for each in self.receipts if each.assignment is assignment]
        if assignment.in_flight > len(mine):
            return False
        progress = assignment.progress
        if mine:
            progress = progress.copy()
            for receipt in mine:
                progress.cover(receipt.previous, receipt.offset)
        return not progress.unanswered(stop)
