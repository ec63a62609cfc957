"""The books of the source partitions: what is answered of each, wherever its records are read.

With all four stages in a process the in-flight tracker of the source has them. Where results are
read in the source's place, `SourceOffsets` does, and the place in `results` is committed beside
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from headrace.delivery.acked_offsets import Progress
from headrace.delivery.inflight import InFlightAck, InFlightTracker, ack_all
from headrace.delivery.source_offsets import SourceOffsets
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.messages import Request

Outgoing = tuple[Request, TopicPartition]
"""A request that has ended, and where its answer goes."""

Offsets = dict[TopicPartition, Committed]


class OffsetStore:
    """What is answered, and what may be committed with the next answers.

    Args:
        in-flight tracker: of what this process reads.
        origins: where that is `results`; None where it is the source.
        requests: the topic of the source.
        reading: the topic that is read.
    """

    def __init__(
        self, tracker: InFlightTracker, origins: SourceOffsets | None, requests: str, reading: str
    ) -> None:
        self._tracker = tracker
        self._origins = origins
        self._requests = requests
        self._reading = reading

    def source(self, number: int) -> TopicPartition:
        """The source partition of this number."""
        return TopicPartition(self._requests, number)

    def progress(self, number: int) -> Progress | None:
        """Of a source partition; None when it is not ours."""
        if self._origins is not None:
            return self._origins.progress(number)
        assignment = self._tracker.get(self.source(number))
        return None if assignment is None else assignment.progress

    def ack(self, requests: Sequence[Request]) -> None:
        """Their answers are acknowledged."""
        origins = self._origins
        if origins is not None:
            origins.answered(requests)
        ack_all([request.ack_handle for request in requests])

    def fit(
        self, number: int, outgoing: Sequence[Outgoing]
    ) -> tuple[Sequence[Outgoing], Committed | None]:
        """As many answers, from the lowest offset on, as the commit's metadata can tell of.

        The lowest unanswered offset always fits: with it, the base moves up.

        Args:
            number: of a source partition that is ours.
            outgoing: unanswered, by rising offset.

        Returns:
            them, and what is to be committed for the source with them; None with none.
        """
        progress = self.progress(number)
        assert progress is not None
        committable = _with(progress, outgoing)
        if committable is not None:
            return outgoing, committable
        fits, fails = 0, len(outgoing)
        best: Committed | None = None
        while fails - fits > 1:
            middle = (fits + fails) // 2
            committable = _with(progress, outgoing[:middle])
            if committable is None:
                fails = middle
            else:
                fits, best = middle, committable
        return outgoing[:fits], best

    def offsets(self, number: int, source: Committed, outgoing: Sequence[Outgoing]) -> Offsets:
        """All that is to be committed with these answers: where results are read, two offsets."""
        offsets = {self.source(number): source}
        if self._origins is None:
            return offsets
        read = TopicPartition(self._reading, number)
        assignment = self._tracker.get(read)
        if assignment is not None:
            progress = assignment.progress.copy()
            for request, _ in outgoing:
                ack_handle = request.ack_handle
                assert isinstance(ack_handle, InFlightAck)  # of a record of `results`
                progress.cover(ack_handle.previous, ack_handle.offset)
            offsets[read] = progress.committable()
        return offsets

    def unsealed(self, number: int) -> Offsets:
        """What may be committed now for this partition and differs from what was."""
        offsets = self._tracker.committable()
        if self._origins is not None:
            offsets |= self._origins.committable()
        return {each: offsets[each] for each in offsets if each.partition == number}

    def sealed(self, offsets: Offsets) -> None:
        """These are committed."""
        self._tracker.was_committed(offsets)
        if self._origins is not None:
            self._origins.was_committed(offsets)

    def unite(self, number: int, committed: Committed | None) -> None:
        """Count as answered what the log says was; raises `UnknownMetadata`."""
        progress = self.progress(number)
        if progress is not None and committed is not None:
            progress.unite(Progress.from_committed(committed))


def by_offset(outgoing: Iterable[Outgoing]) -> list[Outgoing]:
    """In the order of their source offsets; all are of one partition."""
    return sorted(outgoing, key=_offset)


def _offset(outgoing: Outgoing) -> int:
    return outgoing[0].offset


def requests_of(outgoing: Iterable[Outgoing]) -> list[Request]:
    """Without their targets."""
    return list(map(_request, outgoing))


_request = itemgetter(0)


def _with(progress: Progress, outgoing: Sequence[Outgoing]) -> Committed | None:
    """What would be committed if these were answered; None where that would not fit."""
    draft = progress.copy()
    for request, _ in outgoing:
        draft.cover(request.previous, request.offset)
    return draft.committable_whole()
