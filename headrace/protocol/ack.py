"""Ack handles of records that a process has read, as the stages see them."""

from __future__ import annotations

from typing import Protocol


class Revocable(Protocol):
    """Assignment of a partition to this process, shared by the ack handles of its records."""

    @property
    def revoked(self) -> bool:
        """True if the partition is no longer assigned to this process."""
        ...


class AckHandle(Protocol):
    """Ack handle of a record that was read; implemented in `headrace.delivery.inflight`."""

    @property
    def assignment(self) -> Revocable:
        """Return the partition's assignment; to check many handles, check each assignment once."""
        ...

    @property
    def revoked(self) -> bool:
        """True if the partition was revoked: further work on this record is useless."""
        ...

    def ack(self) -> None:
        """Mark the record as done: everything produced from it is acknowledged."""
        ...


class NullAck:
    """Ack handle of a request whose record is not tracked; it is never revoked."""

    revoked = False

    @property
    def assignment(self) -> NullAck:
        """Return itself."""
        return self

    def ack(self) -> None:
        """Do nothing."""


NULL_ACK = NullAck()
