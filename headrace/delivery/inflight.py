"""In-flight tracker: which records were read, which are answered, and what may be committed.

A record that is read is *admitted* and gets an ack handle. The ack handle travels with the
request and is *acknowledged* once the log holds all results of the record. Until then its bytes
count against the budget; over the budget, reading pauses until enough is acknowledged.

Two rules carry the delivery guarantee:

1. Nothing at or above the lowest unanswered offset is committed as done: the commit is the base
   of `AckedOffsets`, and what is answered above it goes into the metadata.
2. An ack handle belongs to one assignment of its partition (its epoch). When the partition is
   revoked the epoch ends and the ack handle is *revoked*: acknowledging it releases its bytes
   but no offset, since the partition's new owner does that work again.

The module is synchronous and does no I/O; `headrace.consumer.source` drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, Share, Usage
from headrace.delivery.ordering import KeyChains
from headrace.log.port import Committed, Record, TopicPartition
from headrace.protocol.ack import AckHandle
from headrace.protocol.headers import NO_HEADERS
from headrace.protocol.messages import Envelope, Request
from headrace.tuning import TUNING, DeliveryTuning

RECORD_OVERHEAD_BYTES = 1024
"""Charged for every record or request besides its bytes: the size of its Python objects."""

HEADER_OVERHEAD_BYTES = 128
"""Charged for every header besides its bytes: four bytes on the wire can take this as objects."""

NEVER_COMMITTED = Committed(-1)


def key_and_header_bytes(key: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return the bytes charged for a key and headers."""
    size_bytes = HEADER_OVERHEAD_BYTES * len(headers)
    if key is not None:
        size_bytes += len(key)
    for name, value in headers:
        size_bytes += len(name)
        if value is not None:
            size_bytes += len(value)
    return size_bytes


def record_bytes(record: Record) -> int:
    """Return the bytes charged for a record while it is in flight."""
    value, key, headers = record.value, record.key, record.headers
    size_bytes = RECORD_OVERHEAD_BYTES
    if value is not None:
        size_bytes += len(value)
    if key is not None or headers:
        size_bytes += key_and_header_bytes(key, headers)
    return size_bytes


class Deferred:
    """A record that was read, left in the log, and is read again when its share has room.

    Its offset is unanswered, so no commit passes it. It is not in flight: a drain does not wait
    for it, and the next owner of the partition reads it.

    Attributes:
        previous: the offset delivered before it.
        size_bytes: bytes charged once it is read again.
        rows: the request's number of rows.
        envelope: the request's, with its model and version; without what only its answer needs.
        is_reserved: True while it is being read again, with its bytes already charged.
        is_noted: True while its deadline is noted.
    """

    __slots__ = (
        "assignment",
        "envelope",
        "is_noted",
        "is_reserved",
        "offset",
        "previous",
        "rows",
        "share",
        "size_bytes",
    )

    def __init__(
        self, ack_handle: InFlightAck, share: Share, rows: int, envelope: Envelope
    ) -> None:
        self.assignment = ack_handle.assignment
        self.offset = ack_handle.offset
        self.previous = ack_handle.previous
        self.size_bytes = ack_handle.size_bytes
        self.share = share
        self.rows = rows
        self.envelope = envelope
        self.is_reserved = False
        self.is_noted = False

    def reserve(self) -> None:
        """Charge its bytes before it is read, so that no other record takes the room."""
        self.is_reserved = True
        self.share.charge(self.size_bytes)
        self.assignment.budget.used_bytes += self.size_bytes

    def release(self) -> None:
        """Release the reserved bytes, if any."""
        if self.is_reserved:
            self.is_reserved = False
            self.share.charge(-self.size_bytes)
            self.assignment.budget.used_bytes -= self.size_bytes


class RecordAges:
    """First timestamp of each chunk read, kept until the chunk is answered.

    A partly answered chunk counts as old as its first record: the age is too high by at most the
    span of one poll, and never too low. Beyond `max_marks` chunks, neighbours are merged in pairs.
    """

    __slots__ = ("_marks", "_max_marks")

    def __init__(self, max_marks: int = TUNING.delivery.max_age_marks) -> None:
        self._max_marks = max_marks
        self._marks: deque[tuple[int, int]] = deque()

    def note(self, last_offset: int, first_timestamp_ms: int) -> None:
        """Record that a chunk was read, up to and including `last_offset`."""
        marks = self._marks
        marks.append((last_offset, first_timestamp_ms))
        if len(marks) > self._max_marks:
            lasts = list(marks)[1::2]
            firsts = list(marks)[::2]
            newest = [firsts[-1]] if len(firsts) > len(lasts) else []
            merged = [(last, first) for (last, _), (_, first) in zip(lasts, firsts, strict=False)]
            self._marks = deque(merged + newest)

    def oldest_ms(self, base: int) -> int | None:
        """Return the first timestamp of the oldest unanswered chunk; None if all are answered.

        Args:
            base: the lowest unanswered offset; it never decreases.
        """
        marks = self._marks
        while marks and marks[0][0] < base:
            marks.popleft()
        return marks[0][1] if marks else None


class AssignedPartition:
    """One assignment of a partition to this process, until it is revoked.

    Attributes:
        epoch: number of this assignment, counted per process.
        last_delivered: the offset of the record admitted last, or the base minus one.
        last_read: the offset of the record read last, or the base minus one.
        in_flight: number of records read and not acknowledged.
        held: number of these whose answers all wait for earlier ones.
        answering: at most so many of these have ended, and are in a step of `services.responder`
            or will be in the next one.
        ages: ages of the chunks read.
        chains: predecessor of each record, where answers are ordered by key.
        last_commit: the last commit in the log; at first, what the assignment began with.
        committed: the commit that need not be written again: `last_commit`, or `NEVER_COMMITTED`
            before the first one and after `InFlightTracker.forget_committed`.
        deferred: records left in the log, by offset.
        leaving: True once it is about to be revoked, or the process stops: what waits long is left
            in the log.
        revoked: True once the partition was revoked.
    """

    __slots__ = (
        "ages",
        "answering",
        "budget",
        "chains",
        "committed",
        "deferred",
        "epoch",
        "held",
        "in_flight",
        "last_commit",
        "last_delivered",
        "last_read",
        "leaving",
        "notify",
        "partition",
        "progress",
        "revoked",
    )

    def __init__(
        self,
        partition: TopicPartition,
        epoch: int,
        progress: AckedOffsets,
        budget: Budget,
        notify: Callable[[], None],
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self.progress = progress
        self.budget = budget
        self.notify = notify
        self.last_delivered = progress.base - 1
        self.last_read = progress.base - 1
        self.in_flight = 0
        self.held = 0
        self.answering = 0
        self.ages = RecordAges(tuning.max_age_marks)
        self.committed = NEVER_COMMITTED
        self.last_commit = progress.committable(tuning.metadata_characters)
        self.chains: KeyChains | None = None
        self.deferred: dict[int, Deferred] = {}
        self.leaving = False
        self.revoked = False

    def admit(self, offset: int, size_bytes: int) -> InFlightAck:
        """Track a record and charge its bytes. Offsets must rise, except those of deferred
        records.
        """
        # Keep the offset delivered before, because a log has gaps (transaction markers, compacted
        # records): acknowledging this record also covers the gap, so that the base can pass it.
        previous = self.last_delivered
        if offset > previous:
            self.last_delivered = offset
        else:
            # Acknowledging this record covers the gap before it: records delivered after it
            # cover only higher offsets.
            deferred = self.deferred.pop(offset)
            deferred.release()
            previous = deferred.previous
        self.in_flight += 1
        self.budget.used_bytes += size_bytes
        return InFlightAck(self, previous, offset, size_bytes)

    def count_admitted(self, last: int, records: int, size_bytes: int) -> None:
        """Count consecutive records up to `last` whose ack handles were made without `admit`."""
        self.last_delivered = last
        self.in_flight += records
        self.budget.used_bytes += size_bytes

    def mark_acked(self, previous: int, last: int, records: int, size_bytes: int) -> None:
        """Mark consecutive records as answered, from after `previous` up to `last`."""
        # The bytes are free in any case, but only the current owner may mark offsets: the next one
        # has read the commits, and does the work of a revoked record again.
        self.in_flight -= records
        self.budget.used_bytes -= size_bytes
        if not self.revoked:
            self.budget.acked += records
            self.progress.mark_acked(previous, last)
        # Last, since the committer reads the offsets that are marked by now.
        self.notify()

    def skip_answered(self, offset: int) -> None:
        """Skip a record that was answered before this assignment."""
        self.last_delivered = offset

    def ignore(self, offset: int) -> None:
        """Mark the offset of a record that is not a request as absent: no stage answers it."""
        self.progress.mark_acked(self.last_delivered, offset)
        self.notify()


class InFlightAck(Struct, eq=False, gc=False):
    """Ack handle of one record. It takes `parts` acks: a batch record has one per request. None are
    left once the record was left in the log.

    A struct for speed; it is never encoded. An assignment has no reference to its ack handles, so
    they form no cycle, and the garbage collector need not track them.
    """

    assignment: AssignedPartition
    previous: int
    offset: int
    size_bytes: int
    parts: int = 1
    share: Share | None = None
    held_parts: int = 0

    @property
    def revoked(self) -> bool:
        """True if the partition was revoked: work on the record is wasted."""
        return self.assignment.revoked

    @property
    def is_in_flight(self) -> bool:
        """True until the record is acknowledged, or left in the log."""
        return self.parts > 0

    @property
    def leaving(self) -> bool:
        """True if a request that waits long is left in the log: its partition is about to be
        revoked, or was, or the process stops.
        """
        return self.assignment.leaving or self.assignment.revoked

    def resize(self, size_bytes: int) -> None:
        """Correct the charge once the size really kept is known."""
        self.assignment.budget.used_bytes += size_bytes - self.size_bytes
        if self.share is not None:
            self.share.charge(size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def defer(self, share: Share, rows: int, envelope: Envelope) -> Deferred:
        """Leave the record in the log, unanswered and no longer in flight."""
        # No offset is marked, so that no commit passes the record: if this process ends now, the
        # next owner reads it.
        assignment = self.assignment
        assignment.in_flight -= 1
        assignment.budget.used_bytes -= self.size_bytes
        deferred = Deferred(self, share, rows, envelope)
        assignment.deferred[self.offset] = deferred
        self.parts = 0
        assignment.notify()
        return deferred

    def leave(self, envelope: Envelope) -> None:
        """Leave the record in the log, unanswered, for the next owner of its partition."""
        if self.revoked:
            self.ack()
            return
        if self.share is not None:
            self.share.charge(-self.size_bytes)
        # Nothing reads it again here, so it waits for no room.
        self.defer(Share(Usage(), None), 0, envelope)

    def hold(self) -> None:
        """Note that the answer to one part waits for an earlier answer."""
        self.held_parts += 1
        if self.held_parts == self.parts:
            self._hold_record()

    def release(self) -> None:
        """Note that the answer to a held part may be written now."""
        if self.held_parts == self.parts:
            self.assignment.held -= 1
        self.held_parts -= 1

    def ack(self, parts: int = 1) -> None:
        """Acknowledge a part, or several; the last part acknowledges the record."""
        # One commit stands for the whole record, so the last answer of its batch decides.
        self.parts -= parts
        if self.parts:
            if self.parts == self.held_parts:
                self._hold_record()
            return
        if self.share is not None:
            self.share.charge(-self.size_bytes)
        self.assignment.mark_acked(self.previous, self.offset, 1, self.size_bytes)

    def _hold_record(self) -> None:
        self.assignment.held += 1
        if self.assignment.leaving:
            # A drain may wait for this record alone.
            self.assignment.notify()


def ack_all(ack_handles: Iterable[AckHandle]) -> None:
    """Acknowledge many records; consecutive ones of a partition with one update and one notify,
    consecutive parts of a record with one update, and consecutive ones of a share with one charge.
    """
    assignment: AssignedPartition | None = None
    share: Share | None = None
    share_bytes = 0
    previous = last = -1
    count = size_bytes = 0
    divided: AckHandle | None = None
    parts = 0
    for ack_handle in ack_handles:
        if ack_handle is divided:
            parts += 1
            continue
        if type(ack_handle) is not InFlightAck or ack_handle.parts != 1:
            _ack_parts(divided, parts)
            divided, parts = ack_handle, 1
            continue
        ack_handle.parts = 0
        if ack_handle.share is not share:
            if share is not None:
                share.charge(-share_bytes)
            share, share_bytes = ack_handle.share, 0
        share_bytes += ack_handle.size_bytes
        if ack_handle.previous != last or ack_handle.assignment is not assignment:
            if assignment is not None:
                assignment.mark_acked(previous, last, count, size_bytes)
            assignment, previous = ack_handle.assignment, ack_handle.previous
            count = size_bytes = 0
        last = ack_handle.offset
        count += 1
        size_bytes += ack_handle.size_bytes
    _ack_parts(divided, parts)
    if share is not None:
        share.charge(-share_bytes)
    if assignment is not None:
        assignment.mark_acked(previous, last, count, size_bytes)


def _ack_parts(ack_handle: AckHandle | None, parts: int) -> None:
    """Acknowledge so many parts of a record."""
    if isinstance(ack_handle, InFlightAck):
        ack_handle.ack(parts)
    elif ack_handle is not None:
        for _ in range(parts):
            ack_handle.ack()


class InFlightTracker:
    """In-flight records of all partitions of one consumer.

    Args:
        budget: byte budget that all partitions share.
        notify: called after every acknowledgement.
    """

    def __init__(
        self,
        budget: Budget,
        notify: Callable[[], None],
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tuning = tuning
        self.budget = budget
        self._notify = notify
        self._epoch = 0
        self._assigned: dict[TopicPartition, AssignedPartition] = {}

    def assign(self, partition: TopicPartition, progress: AckedOffsets) -> AssignedPartition:
        """Begin a new epoch of a partition; an epoch still open is revoked first."""
        # First revoke: ack handles of the last epoch must not mark offsets in the new one, where
        # the same offset may hold another record.
        self.revoke(partition)
        self._epoch += 1
        assignment = AssignedPartition(
            partition, self._epoch, progress, self.budget, self._notify, self._tuning
        )
        self._assigned[partition] = assignment
        return assignment

    def revoke(self, partition: TopicPartition) -> None:
        """End the epoch of a partition: its ack handles are revoked from now on."""
        assignment = self._assigned.pop(partition, None)
        if assignment is not None:
            assignment.revoked = True
            # Deferred records have no ack handle that would return their bytes later.
            for deferred in assignment.deferred.values():
                deferred.release()
            assignment.deferred.clear()

    def get(self, partition: TopicPartition) -> AssignedPartition | None:
        """Return the current assignment of a partition; None if it is not assigned."""
        return self._assigned.get(partition)

    @property
    def assignments(self) -> list[AssignedPartition]:
        """All current assignments."""
        return list(self._assigned.values())

    def in_flight(self, partitions: Iterable[TopicPartition] | None = None) -> int:
        """Return the number of records read and not acknowledged, in `partitions` or in all."""
        if partitions is None:
            return sum(assignment.in_flight for assignment in self._assigned.values())
        return sum(
            assignment.in_flight
            for partition in partitions
            if (assignment := self._assigned.get(partition)) is not None
        )

    def unfinished(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Return the number of records in flight whose answers do not only wait for earlier ones.

        When it is 0, an earlier one is no longer in flight here, so that no held answer can be
        written before the partition has its next owner.
        """
        return self.in_flight(partitions) - sum(
            assignment.held
            for partition, assignment in self._assigned.items()
            if partitions is None or partition in partitions
        )

    def uncommitted(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Return the number of answered offsets that no commit holds, in `partitions` or in all."""
        return sum(
            assignment.progress.answered_beyond(assignment.last_commit)
            for partition, assignment in self._assigned.items()
            if partitions is None or partition in partitions
        )

    def committable(self) -> dict[TopicPartition, Committed]:
        """Return commits that differ from those last passed to `note_committed`."""
        limit = self._tuning.metadata_characters
        return {
            partition: committable
            for partition, assignment in self._assigned.items()
            if (committable := assignment.progress.committable(limit)) != assignment.committed
        }

    def note_committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Remember commits that the log has acknowledged."""
        for partition, committed in offsets.items():
            assignment = self._assigned.get(partition)
            if assignment is not None:
                assignment.committed = assignment.last_commit = committed

    def forget_committed(self) -> None:
        """Make `committable` return all partitions again, changed or not."""
        for assignment in self._assigned.values():
            assignment.committed = NEVER_COMMITTED


def skipped_range(assignment: AssignedPartition, last: int) -> Request:
    """Return the marker for all offsets after the record admitted last, up to `last`."""
    ack_handle = assignment.admit(last, 0)
    origin = (assignment.partition.partition, last, ack_handle.previous, 0)
    return Request(ack_handle, *origin, None, None, [], NO_HEADERS)
