"""Ack handles for requests that owe nothing to a log."""

from __future__ import annotations

from headrace.protocol.ack import AckHandle


class _NullAck:
    revoked = False

    @property
    def assignment(self) -> _NullAck:
        """Itself: nobody takes it away."""
        return self

    def ack(self) -> None:
        """Nothing is owed."""


NO_RECEIPT: AckHandle = _NullAck()
