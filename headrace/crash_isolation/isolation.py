"""Suspects: the first stage parks them when it reads them, and runs them alone later.

A record cannot be left in the log and read later, since a gap between admitted offsets counts as
absent records. So a suspect is admitted in order, *parked* undecoded, and delivered again
on its own when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.crash_isolation.poison_search import Alone, Unit
from headrace.delivery.inflight import AssignedPartition, InFlightAck, record_bytes
from headrace.log.port import Record, TopicPartition
from headrace.protocol.ack import AckHandle, Revocable
from headrace.protocol.messages import Request


class IsolatedAck:
    """Ack handle of a request that must run alone, until it has run."""

    __slots__ = ("index", "isolated", "record_ack")

    def __init__(self, isolated: Isolated, index: int) -> None:
        self.isolated = isolated
        self.index = index
        self.record_ack: AckHandle = isolated.ack_handle

    @property
    def assignment(self) -> Revocable:
        """See `AckHandle`."""
        return self.record_ack.assignment

    @property
    def revoked(self) -> bool:
        """See `AckHandle`."""
        return self.record_ack.revoked

    def ack(self) -> None:
        """See `AckHandle`."""
        self.record_ack.ack()

    def leave(self) -> None:
        """Note that the request was left in the log, so that its record stays a suspect."""
        self.isolated.is_left = True
        self.isolated.open_requests -= 1


class Isolated:
    """Suspect that was admitted and waits to run alone.

    Args:
        after: offset of its predecessor, if answers are ordered by key.

    Attributes:
        is_delivered: True once the first stage has received it again.
        is_left: True if it was left in the log then, and has not run.
        open_requests: number of its requests that have not finished running.
    """

    __slots__ = (
        "ack_handle",
        "after",
        "assignment",
        "is_delivered",
        "is_left",
        "open_requests",
        "record",
    )

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
        self.is_left = False
        self.open_requests = 0


class Isolation(NamedTuple):
    """Crash-isolation state that the first stage needs after an unclean end.

    Attributes:
        poisoned: requests to answer without running them.
        suspects: offsets of records to park.
        park: receives each parked record.
        isolated: set if the delivery holds only this record, which is now to run alone.
        runs: True if models run in this process, so that isolated requests run alone here.
    """

    poisoned: frozenset[Unit]
    suspects: frozenset[int]
    park: Callable[[Isolated], None]
    isolated: Isolated | None = None
    runs: bool = False

    def is_suspect(self, offset: int) -> bool:
        """Return True if a record must be parked; a poisoned one is not run again."""
        return offset in self.suspects and (offset, 0) not in self.poisoned

    def park_record(self, assignment: AssignedPartition, record: Record) -> None:
        """Admit a suspect and park it."""
        after = -1
        if assignment.chains is not None:  # keep its position in the order of its key
            after = assignment.chains.follow(record.key, record.offset)
        ack_handle = assignment.admit(record.offset, record_bytes(record))
        self.park(Isolated(assignment, record, ack_handle, after))

    def leave(self) -> None:
        """Note that the isolated record was left in the log, so that it stays a suspect."""
        assert self.isolated is not None
        self.isolated.is_left = True

    def isolate(self, requests: Iterable[Request]) -> None:
        """Make the requests of the isolated record run alone, one at a time. Nothing runs for one
        that cancels another.

        Args:
            requests: the requests to run, in the order of their indexes in the record.
        """
        isolated = self.isolated
        if isolated is None or not self.runs:
            return
        for index, request in enumerate(requests):
            if request.failure is None and request.envelope.cancels is None:
                isolated.open_requests += 1
                request.ack_handle = IsolatedAck(isolated, index)


def is_isolated(request: Request) -> bool:
    """Return True if a request must run alone."""
    return type(request.ack_handle) is IsolatedAck


def alone_of(request: Request) -> Alone:
    """Return the marker content for the run of an isolated request."""
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, IsolatedAck)
    isolated = ack_handle.isolated
    return Alone(isolated.assignment.partition, isolated.record.offset, ack_handle.index)


def records_of(requests: Iterable[Request]) -> set[tuple[TopicPartition, int]]:
    """Return the records of requests that have an ack handle of the in-flight tracker."""
    ack_handles = [request.ack_handle for request in requests]
    return {
        (ack_handle.assignment.partition, ack_handle.offset)
        for ack_handle in ack_handles
        if isinstance(ack_handle, InFlightAck)
    }
