"""Accused records: the first stage sets them aside when it reads them, and runs them alone later.

A record cannot be left in the log and read later, since a gap in what is admitted counts as absent
records. So an accused one is admitted in its turn, *parked* undecoded, and delivered again, by
itself, when everything else stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.crash_isolation.poison_search import Alone, Unit
from headrace.delivery.inflight import Assignment, LedgerReceipt, record_bytes
from headrace.log.port import Record, TopicPartition
from headrace.protocol.ack import Receipt, Revocable
from headrace.protocol.messages import Request


class IsolatedReceipt:
    """The receipt of a request that is to run alone, until it has."""

    __slots__ = ("isolated", "place", "record_receipt")

    def __init__(self, isolated: Isolated, place: int) -> None:
        self.isolated = isolated
        self.place = place
        self.record_receipt: Receipt = isolated.receipt

    @property
    def assignment(self) -> Revocable:
        """See `Receipt`."""
        return self.record_receipt.assignment

    @property
    def void(self) -> bool:
        """See `Receipt`."""
        return self.record_receipt.void

    def settle(self) -> None:
        """See `Receipt`."""
        self.record_receipt.settle()


class Isolated:
    """An accused record that was admitted and waits to run alone.

    Args:
        after: which record goes before it, where answers keep the order of their keys.

    Attributes:
        is_delivered: the first stage has received it again.
        open_places: how many of its requests are still to end their runs.
    """

    __slots__ = ("after", "assignment", "is_delivered", "open_places", "receipt", "record")

    def __init__(
        self, assignment: Assignment, record: Record, receipt: LedgerReceipt, after: int = -1
    ) -> None:
        self.assignment = assignment
        self.record = record
        self.receipt = receipt
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

    def set_aside(self, assignment: Assignment, record: Record) -> None:
        """Admit an accused record and park it."""
        after = -1
        if assignment.chains is not None:  # its place is where it was read
            after = assignment.chains.follow(record.key, record.offset)
        receipt = assignment.admit(record.offset, record_bytes(record))
        self.park(Isolated(assignment, record, receipt, after))

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
                request.receipt = IsolatedReceipt(isolated, place)


def is_isolated(request: Request) -> bool:
    """Whether a request is to run alone."""
    return type(request.receipt) is IsolatedReceipt


def alone_of(request: Request) -> Alone:
    """Return what is marked while an isolated request runs."""
    receipt = request.receipt
    assert isinstance(receipt, IsolatedReceipt)
    isolated = receipt.isolated
    return Alone(isolated.assignment.partition, isolated.record.offset, receipt.place)


def places_of(requests: Iterable[Request]) -> set[tuple[TopicPartition, int]]:
    """Return the records that requests were read from, as far as they are owed for."""
    receipts = [request.receipt for request in requests]
    return {
        (receipt.assignment.partition, receipt.offset)
        for receipt in receipts
        if isinstance(receipt, LedgerReceipt)
    }
