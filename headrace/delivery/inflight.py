"""The in-flight tracker: what was read, what is answered, and what may be committed.

A record that is read is *admitted* and gets an ack handle. The ack handle travels with the
request and is *acknowledged* when the log has everything that came of the record. In between, its
bytes count against the budget; over the budget, reading pauses until enough is acknowledged.

Two rules carry the delivery guarantee:

1. Nothing at or above the lowest unanswered offset is committed as done: the commit is the base
   of `Progress`, and what is answered above it goes into the metadata.
2. An ack handle belongs to one assignment of its partition (its epoch). When the partition is
   revoked the epoch is over and the ack handle is *revoked*: acknowledging it gives its bytes
   back and moves nothing, since the partition's new owner does that work again.

All of it is synchronous and knows no log; `headrace.consumer.source` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from headrace.delivery.acked_offsets import Progress
from headrace.delivery.ages import RecordAges
from headrace.delivery.budget import Budget, Claim
from headrace.delivery.ordering import KeyChains
from headrace.log.port import Committed, Record, TopicPartition
from headrace.protocol.ack import AckHandle
from headrace.protocol.messages import Envelope

RECORD_OVERHEAD_BYTES = 1024
"""Charged for every record or request beside its bytes: the objects that it is made of."""

HEADER_OVERHEAD_BYTES = 128
"""Charged for every header beside its bytes: four bytes on the wire can become this as objects."""

NEVER_COMMITTED = Committed(-1)


def beside_bytes(key: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return what a key and headers are charged."""
    size_bytes = HEADER_OVERHEAD_BYTES * len(headers)
    if key is not None:
        size_bytes += len(key)
    for name, value in headers:
        size_bytes += len(name)
        if value is not None:
            size_bytes += len(value)
    return size_bytes


def record_bytes(record: Record) -> int:
    """Return what a record is charged, from when it is read until it is answered."""
    value, key, headers = record.value, record.key, record.headers
    size_bytes = RECORD_OVERHEAD_BYTES
    if value is not None:
        size_bytes += len(value)
    if key is not None or headers:
        size_bytes += beside_bytes(key, headers)
    return size_bytes


class Deferred:
    """A record that was read, is left in the log, and is read again when its claim has room.

    Its offset is unanswered, so nothing commits past it, and it is not in flight: a drain does
    not wait for it, and the next owner of the partition finds it there.

    Attributes:
        previous: the offset that was delivered before it.
        size_bytes: what it is charged once it is read again.
        rows: of the request.
        envelope: of the request, with its model and version; without what only its answer needs.
        is_reserved: it is being read again, and its bytes are charged already.
    """

    __slots__ = (
        "assignment",
        "claim",
        "envelope",
        "is_reserved",
        "offset",
        "previous",
        "rows",
        "size_bytes",
    )

    def __init__(
        self, ack_handle: InFlightAck, claim: Claim, rows: int, envelope: Envelope
    ) -> None:
        self.assignment = ack_handle.assignment
        self.offset = ack_handle.offset
        self.previous = ack_handle.previous
        self.size_bytes = ack_handle.size_bytes
        self.claim = claim
        self.rows = rows
        self.envelope = envelope
        self.is_reserved = False

    def reserve(self) -> None:
        """Charge its bytes before it is read, so that nothing else takes the room meanwhile."""
        self.is_reserved = True
        self.claim.charge(self.size_bytes)
        self.assignment.budget.used_bytes += self.size_bytes

    def release(self) -> None:
        """Give back what was reserved, if it was."""
        if self.is_reserved:
            self.is_reserved = False
            self.claim.charge(-self.size_bytes)
            self.assignment.budget.used_bytes -= self.size_bytes


class AssignedPartition:
    """One partition while it is ours, from being assigned to being revoked.

    Attributes:
        epoch: counts the assignments of this process.
        last_delivered: the offset of the record admitted last, or the base less one.
        last_read: likewise, of the record read last.
        in_flight: records read and not acknowledged.
        ages: of what was read.
        chains: which record goes before which, where answers keep the order of their keys.
        deferred: records that are left in the log, by offset.
        revoked: the partition was revoked.
    """

    __slots__ = (
        "ages",
        "budget",
        "chains",
        "committed",
        "deferred",
        "epoch",
        "in_flight",
        "last_delivered",
        "last_read",
        "notify",
        "partition",
        "progress",
        "revoked",
    )

    def __init__(
        self,
        partition: TopicPartition,
        epoch: int,
        progress: Progress,
        budget: Budget,
        notify: Callable[[], None],
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self.progress = progress
        self.budget = budget
        self.notify = notify
        self.last_delivered = progress.base - 1
        self.last_read = progress.base - 1
        self.in_flight = 0
        self.ages = RecordAges()
        self.committed = NEVER_COMMITTED
        self.chains: KeyChains | None = None
        self.deferred: dict[int, Deferred] = {}
        self.revoked = False

    def admit(self, offset: int, size_bytes: int) -> InFlightAck:
        """Take a record in and charge its bytes. Offsets come in rising order, except those that
        were deferred.
        """
        previous = self.last_delivered
        if offset > previous:
            self.last_delivered = offset
        else:
            # The gap before it is its own: what was delivered in between has covered no more
            # than the offsets from after it.
            deferred = self.deferred.pop(offset)
            deferred.release()
            previous = deferred.previous
        self.in_flight += 1
        self.budget.used_bytes += size_bytes
        return InFlightAck(self, previous, offset, size_bytes)

    def admitted(self, last: int, records: int, size_bytes: int) -> None:
        """Count records in, up to the last one, whose ack handles were made without `admit`."""
        self.last_delivered = last
        self.in_flight += records
        self.budget.used_bytes += size_bytes

    def acked(self, previous: int, last: int, records: int, size_bytes: int) -> None:
        """So many records are answered that follow one another, from after `previous` to `last`."""
        self.in_flight -= records
        self.budget.used_bytes -= size_bytes
        if not self.revoked:
            self.budget.acked += records
            self.progress.cover(previous, last)
        self.notify()

    def skip(self, offset: int) -> None:
        """Pass over a record that was answered before this assignment."""
        self.last_delivered = offset

    def pass_over(self, offset: int) -> None:
        """Count a record as absent that is no request: nobody answers it, at no stage."""
        self.progress.cover(self.last_delivered, offset)
        self.notify()


class InFlightAck(Struct, eq=False, gc=False):
    """What is owed for one record. `parts` settlements acknowledge it: a batch record has many.

    A struct for speed, and never encoded. An assignment knows none of its ack handles, so they are
    in no cycle, and the garbage collector need not look at them.
    """

    assignment: AssignedPartition
    previous: int
    offset: int
    size_bytes: int
    parts: int = 1
    claim: Claim | None = None

    @property
    def revoked(self) -> bool:
        """The partition was revoked: work on the record is for nothing."""
        return self.assignment.revoked

    def resize(self, size_bytes: int) -> None:
        """Charge another number of bytes, once it is known what is really kept."""
        self.assignment.budget.used_bytes += size_bytes - self.size_bytes
        if self.claim is not None:
            self.claim.charge(size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def defer(self, claim: Claim, rows: int, envelope: Envelope) -> Deferred:
        """Leave the record in the log: it is not in flight any more, and not answered."""
        assignment = self.assignment
        assignment.in_flight -= 1
        assignment.budget.used_bytes -= self.size_bytes
        deferred = Deferred(self, claim, rows, envelope)
        assignment.deferred[self.offset] = deferred
        assignment.notify()
        return deferred

    def ack(self) -> None:
        """One part is acknowledged; the last one acknowledges the record."""
        self.parts -= 1
        if self.parts:
            return
        if self.claim is not None:
            self.claim.charge(-self.size_bytes)
        self.assignment.acked(self.previous, self.offset, 1, self.size_bytes)


def ack_all(ack_handles: Iterable[AckHandle]) -> None:
    """Acknowledge many. What follows one another in a partition is acknowledged, and told of, at
    once.
    """
    assignment: AssignedPartition | None = None
    previous = last = -1
    count = size_bytes = 0
    for ack_handle in ack_handles:
        if type(ack_handle) is not InFlightAck or ack_handle.parts != 1:
            ack_handle.ack()
            continue
        ack_handle.parts = 0
        if ack_handle.claim is not None:
            ack_handle.claim.charge(-ack_handle.size_bytes)
        if ack_handle.previous != last or ack_handle.assignment is not assignment:
            if assignment is not None:
                assignment.acked(previous, last, count, size_bytes)
            assignment, previous = ack_handle.assignment, ack_handle.previous
            count = size_bytes = 0
        last = ack_handle.offset
        count += 1
        size_bytes += ack_handle.size_bytes
    if assignment is not None:
        assignment.acked(previous, last, count, size_bytes)


class InFlightTracker:
    """All partitions of one consumer.

    Args:
        budget: shared by the partitions.
        notify: called whenever something was acknowledged.
    """

    def __init__(self, budget: Budget, notify: Callable[[], None]) -> None:
        self.budget = budget
        self._notify = notify
        self._epoch = 0
        self._assigned: dict[TopicPartition, AssignedPartition] = {}

    def assign(self, partition: TopicPartition, progress: Progress) -> AssignedPartition:
        """Begin an epoch of a partition; one that was not revoked properly ends here."""
        self.revoke(partition)
        self._epoch += 1
        assignment = AssignedPartition(partition, self._epoch, progress, self.budget, self._notify)
        self._assigned[partition] = assignment
        return assignment

    def revoke(self, partition: TopicPartition) -> None:
        """End the epoch of a partition: its ack handles are revoked from now on."""
        assignment = self._assigned.pop(partition, None)
        if assignment is not None:
            assignment.revoked = True
            for deferred in assignment.deferred.values():
                deferred.release()
            assignment.deferred.clear()

    def get(self, partition: TopicPartition) -> AssignedPartition | None:
        """The present assignment of a partition, if it is ours."""
        return self._assigned.get(partition)

    @property
    def assignments(self) -> list[AssignedPartition]:
        """All that is ours now."""
        return list(self._assigned.values())

    def in_flight(self, partitions: Iterable[TopicPartition] | None = None) -> int:
        """Records read and not acknowledged, of these partitions or of all."""
        if partitions is None:
            return sum(assignment.in_flight for assignment in self._assigned.values())
        return sum(
            assignment.in_flight
            for partition in partitions
            if (assignment := self._assigned.get(partition)) is not None
        )

    def committable(self) -> dict[TopicPartition, Committed]:
        """What may be committed now and differs from what `was_committed` last heard of."""
        return {
            partition: committable
            for partition, assignment in self._assigned.items()
            if (committable := assignment.progress.committable()) != assignment.committed
        }

    def was_committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Remember what the log has acknowledged."""
        for partition, committed in offsets.items():
            assignment = self._assigned.get(partition)
            if assignment is not None:
                assignment.committed = committed

    def forget_committed(self) -> None:
        """Commit all again, be it changed or not."""
        for assignment in self._assigned.values():
            assignment.committed = NEVER_COMMITTED
