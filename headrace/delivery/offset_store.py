"""Offset store: the answered offsets of source partitions, whichever topic is read.

With all four stages in one process, the in-flight tracker of the source holds them. If results are
read instead of the source, `SourceOffsets` holds them, and the offset in `results` is committed
together with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightAck, InFlightTracker, ack_all
from headrace.delivery.source_offsets import SourceOffsets
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.messages import Request
from headrace.tuning import TUNING, DeliveryTuning

PendingAnswer = tuple[Request, TopicPartition]
"""A request that has ended, and the partition that its answer is written to."""

Offsets = dict[TopicPartition, Committed]


class OffsetStore:
    """Answered offsets, and the offsets to commit with the next answers.

    Args:
        tracker: in-flight tracker of the topic that this process reads.
        source_offsets: set if that topic is `results`; None if it is the source.
        requests: the source topic.
        reading: the topic that this process reads.
    """

    def __init__(
        self,
        tracker: InFlightTracker,
        source_offsets: SourceOffsets | None,
        requests: str,
        reading: str,
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._max_characters = tuning.metadata_characters
        self._tracker = tracker
        self._source_offsets = source_offsets
        self._requests = requests
        self._reading = reading

    def source(self, number: int) -> TopicPartition:
        """Return the source partition of this number."""
        return TopicPartition(self._requests, number)

    def progress(self, number: int) -> AckedOffsets | None:
        """Return the progress of a source partition; None if it is not assigned here."""
        if self._source_offsets is not None:
            return self._source_offsets.progress(number)
        assignment = self.assignment(number)
        return None if assignment is None else assignment.progress

    def assignment(self, number: int) -> AssignedPartition | None:
        """Return the assignment of a source partition; None if it is not read here."""
        return self._tracker.get(self.source(number))

    def same_assignment(self, number: int) -> Callable[[], bool]:
        """Return a function: whether a source partition still has the assignment that it has now.

        It ends when the partition is revoked, and when it is assigned anew, also without a
        rebalance: because its topic, or `results`, was deleted and created again. What a separate
        responder has read of `results` before that stays current.
        """
        read = TopicPartition(self._reading, number)
        progress, assignment = self.progress(number), self._tracker.get(read)
        return lambda: self.progress(number) is progress and self._tracker.get(read) is assignment

    def ack(self, requests: Sequence[Request]) -> None:
        """Acknowledge requests whose answers the log has acknowledged, or that need none."""
        source_offsets = self._source_offsets
        if source_offsets is not None:
            source_offsets.mark_acked(requests)
        ack_all([request.ack_handle for request in requests])

    def fit_commit_metadata(
        self, number: int, pending: Sequence[PendingAnswer]
    ) -> tuple[Sequence[PendingAnswer], Committed | None]:
        """Select as many answers, lowest offset first, as fit in the commit metadata.

        The lowest unanswered offset always fits, since it moves the base up.

        Args:
            number: an assigned source partition.
            pending: unanswered requests, by rising offset.

        Returns:
            the selected answers, and the source commit for them; None if none is selected.
        """
        progress = self.progress(number)
        assert progress is not None
        committable = self._commit_with(progress, pending)
        if committable is not None:
            return pending, committable
        fits, fails = 0, len(pending)
        best: Committed | None = None
        while fails - fits > 1:
            middle = (fits + fails) // 2
            committable = self._commit_with(progress, pending[:middle])
            if committable is None:
                fails = middle
            else:
                fits, best = middle, committable
        return pending[:fits], best

    def _commit_with(
        self, progress: AckedOffsets, pending: Sequence[PendingAnswer]
    ) -> Committed | None:
        """Return the commit with these requests answered; None if its ranges would not all fit."""
        draft = progress.copy()
        previous = last = -1
        for request, _ in pending:
            # Thousands of consecutive offsets, as nearly always, are one range: marked at once.
            if request.previous != last:
                draft.mark_acked(previous, last)
                previous = request.previous
            last = request.offset
        draft.mark_acked(previous, last)
        return draft.committable_whole(self._max_characters)

    def offsets(self, number: int, source: Committed, pending: Sequence[PendingAnswer]) -> Offsets:
        """Return all offsets to commit with these answers; two if `results` is read."""
        offsets = {self.source(number): source}
        if self._source_offsets is None:
            return offsets
        read = TopicPartition(self._reading, number)
        assignment = self._tracker.get(read)
        if assignment is not None:
            progress = assignment.progress.copy()
            # A record of `results` is done only with the last of its requests: those still open
            # are read again from it if this process ends.
            for ack_handle, parts in Counter(
                [request.ack_handle for request, _ in pending]
            ).items():
                assert isinstance(ack_handle, InFlightAck)  # of a record of `results`
                if ack_handle.parts == parts:
                    progress.mark_acked(ack_handle.previous, ack_handle.offset)
            offsets[read] = progress.committable(self._max_characters)
        return offsets

    def uncommitted(self, number: int) -> Offsets:
        """Return this partition's commits that differ from the last committed ones."""
        offsets = self._tracker.committable()
        if self._source_offsets is not None:
            offsets |= self._source_offsets.committable()
        return {each: offsets[each] for each in offsets if each.partition == number}

    def note_committed(self, offsets: Offsets) -> None:
        """Remember that these offsets are committed."""
        self._tracker.note_committed(offsets)
        if self._source_offsets is not None:
            self._source_offsets.note_committed(offsets)

    def merge(self, number: int, committed: Committed | None) -> None:
        """Merge answered offsets committed in the log; raises `UnknownMetadata`."""
        progress = self.progress(number)
        if progress is not None and committed is not None:
            progress.merge(AckedOffsets.from_committed(committed))


def by_offset(pending: Sequence[PendingAnswer]) -> list[PendingAnswer]:
    """Sort answers of one partition by source offset."""
    offsets = [request.offset for request, _ in pending]
    if offsets == sorted(offsets):  # as nearly always
        return list(pending)
    return sorted(pending, key=_offset)


def _offset(pending: PendingAnswer) -> int:
    return pending[0].offset


def requests_of(pending: Iterable[PendingAnswer]) -> list[Request]:
    """Return the requests, without the target partitions."""
    return list(map(_request, pending))


_request = itemgetter(0)
