"""What a process owes the log for a record that it has read, as the stages see it."""

from __future__ import annotations

from typing import Protocol


class Revocable(Protocol):
    """What many ack handles have in common: the time for which their partition is ours."""

    @property
    def revoked(self) -> bool:
        """It is over."""
        ...


class AckHandle(Protocol):
    """What a process owes the log for a record that it has read: `headrace.delivery.inflight`."""

    @property
    def assignment(self) -> Revocable:
        """Of its partition. To ask many ack handles, ask each of their assignments once."""
        ...

    @property
    def revoked(self) -> bool:
        """The partition is no longer ours: work on this record is for nothing."""
        ...

    def ack(self) -> None:
        """All that came of the record is acknowledged."""
        ...
