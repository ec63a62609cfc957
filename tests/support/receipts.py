"""Receipts for requests that owe nothing to a log."""

from __future__ import annotations

from headrace.protocol.ack import Receipt


class _NoReceipt:
    void = False

    @property
    def assignment(self) -> _NoReceipt:
        """Itself: nobody takes it away."""
        return self

    def settle(self) -> None:
        """Nothing is owed."""


NO_RECEIPT: Receipt = _NoReceipt()
