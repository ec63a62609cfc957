"""Accused records: the first stage sets them aside when it reads them, and runs them alone later.

A record cannot be left in the log and read later, since a gap in what is admitted counts as absent
records. So an accused one is admitted in its turn, *parked* undecoded, and delivered again, by
itself, when everything else stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.crash_isolation.poison_search import Alone, Unit
from headrace.delivery.inflight import AssignedPartition, InFlightAck, record_bytes
from headrace.log.port import Record, TopicPartition
from headrace.protocol.ack import AckHandle, Revocable
from headrace.protocol.messages import Request


class IsolatedReceipt:
    """The ack handle of a request that is to run alone, until it has."""

    __slots__ = ("isolated", "place", "record_receipt")

    def __init__(self, isolated: Isolated, place: int) -> None:
        self.isolated = isolated
        self.place = place
        self.record_receipt: AckHandle = isolated.ack_handle

    @property
    def assignment(self) -> Revocable:
        """See `AckHandle`."""
        return self.record_receipt.assignment

    @property
    def revoked(self) -> bool:
        """See `AckHandle`."""
        return self.record_receipt.revoked

    def ack(self) -> None:
        """See `AckHandle`."""
        self.record_receipt.ack()


class Isolated:
    """An accused record that was admitted and waits to run alone.

    Args:
        after: which record goes before it, where answers keep the order of their keys.

    Attributes:
        is_delivered: the first stage has received it again.
        open_places: how many of its requests are still to end their runs.
    """

    __slots__ = ("ack_handle", "after", "assignment", "is_delivered", "open_places", "record")

    def __init__(
        self,
        assignment: AssignedPartition,
        record: Record,
        ack_handle: InFlightAck,
        after: int = -1,
    ) -> None:
        self.assignment = assignment
        self.record = record
        self.ack_handle = ack_handle
        self.after = after
        self.is_delivered = False
        self.open_places = 0


class Isolation(NamedTuple):
    """What the first stage has to know of records that are read after an unclean end.

    Attributes:
        condemned: to be answered without being run.
        accused: to be parked.
        park: takes a parked one.
        isolated: the delivery is this record alone, whose turn has come.
        runs: models run in this process, so that isolated requests run alone there as well.
    """

    condemned: frozenset[Unit]
    accused: frozenset[int]
    park: Callable[[Isolated], None]
    isolated: Isolated | None = None
    runs: bool = False

    def is_accused(self, offset: int) -> bool:
        """Return whether a record is to be parked; one that is condemned is not run any more."""
        return offset in self.accused and (offset, 0) not in self.condemned

    def set_aside(self, assignment: AssignedPartition, record: Record) -> None:
        """Admit an accused record and park it."""
        after = -1
        if assignment.chains is not None:  # its place is where it was read
            after = assignment.chains.follow(record.key, record.offset)
        ack_handle = assignment.admit(record.offset, record_bytes(record))
        self.park(Isolated(assignment, record, ack_handle, after))

    def isolate(self, requests: Iterable[Request]) -> None:
        """Have the requests of the isolated record run alone, each by itself.

        Args:
            requests: those that are to be run, by their places in the record.
        """
        isolated = self.isolated
        if isolated is None or not self.runs:
            return
        for place, request in enumerate(requests):
            if request.failure is None:
                isolated.open_places += 1
                request.ack_handle = IsolatedReceipt(isolated, place)


def is_isolated(request: Request) -> bool:
    """Whether a request is to run alone."""
    return type(request.ack_handle) is IsolatedReceipt


def alone_of(request: Request) -> Alone:
    """Return what is marked while an isolated request runs."""
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, IsolatedReceipt)
    isolated = ack_handle.isolated
    return Alone(isolated.assignment.partition, isolated.record.offset, ack_handle.place)


def places_of(requests: Iterable[Request]) -> set[tuple[TopicPartition, int]]:
    """Return the records that requests were read from, as far as they are owed for."""
    ack_handles = [request.ack_handle for request in requests]
    return {
        (ack_handle.assignment.partition, ack_handle.offset)
        for ack_handle in ack_handles
        if isinstance(ack_handle, InFlightAck)
    }
