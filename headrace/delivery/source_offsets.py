"""Progress of source partitions, kept by a responder that does not read the source itself.

A responder in its own process reads `results`, whose partition p carries the results of source
partition p only. So the owner of `results/p` keeps the base and the answered ranges of
`requests/p`, in the same place and form as a process with all four stages: committed under the
same group, on the *requests* topic. A result whose source offset is already answered is a
duplicate (a stage crashed after passing it on) and is dropped; unless the topic was deleted and
created again meanwhile, so that other requests have the same offsets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import structlog

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.offset_reset import TopicIdentity, committed_progress, truncate
from headrace.errors import ConfigurationError, Retriable
from headrace.log.errors import UnknownPartition
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.primitives.backoff import Backoff, Pauses
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import PartitionSnapshot
from headrace.tuning import TUNING, DeliveryTuning

log = structlog.get_logger(__name__)


class SourceOffsets:
    """Progress and taken offsets of each source partition whose results are read here.

    Args:
        log_: the log that holds the topic.
        requests_topic: name of the source topic.
    """

    def __init__(
        self, log_: Log, requests_topic: str, tuning: DeliveryTuning = TUNING.delivery
    ) -> None:
        self._tuning = tuning
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)
        self._topic = requests_topic
        self._identity = TopicIdentity(log_, requests_topic)
        self._looked_s = -math.inf
        self._consumer: Consumer | None = None
        self._progress: dict[int, AckedOffsets] = {}
        self._taken: dict[int, set[int]] = {}
        self._committed: dict[TopicPartition, Committed] = {}

    async def on_assigned(self, consumer: Consumer, partitions: Sequence[int]) -> None:
        """Load the commits of the source partitions.

        The base may be below the beginning, and is 0 without a commit: results of requests that
        were deleted after ingest read them are still answered. Ingest sends a marker for those that
        it did not read.

        Raises:
            ConfigurationError: there is no such source partition: the topic of results has more.
            LogUnavailable: no broker answered.
        """
        self._consumer = consumer
        replacement = await self._identity.replacement()
        sources = [TopicPartition(self._topic, partition) for partition in partitions]
        try:
            committed = await consumer.committed(sources)
            beginnings = await consumer.beginning_offsets(sources)
            ends = await consumer.end_offsets(sources)
        except UnknownPartition as missing:
            raise ConfigurationError(
                f"{self._topic}: expected partition {missing.partition.partition}, since the topic "
                f"of results has it, got {missing.partitions or 'no'} partitions; give both topics "
                "the same number of partitions"
            ) from missing
        for source in sources:
            found = None if replacement else committed[source]
            self._progress[source.partition] = committed_progress(source, found, ends[source])
            self._taken[source.partition] = set()
            if found is None and beginnings[source]:
                # A commit of 0 would say that the group has lost all deleted records. Those that
                # were deleted before its first ingest are not its requests.
                self._committed[source] = Committed(0)
        self._identity.known = replacement or self._identity.known

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Forget the partitions; their next owner loads what was committed."""
        for partition in partitions:
            self._progress.pop(partition, None)
            self._taken.pop(partition, None)
            self._committed.pop(TopicPartition(self._topic, partition), None)

    def progress(self, partition: int) -> AckedOffsets | None:
        """Return the progress of a source partition; None if it is not assigned here."""
        return self._progress.get(partition)

    def take(self, partition: int, offset: int) -> bool:
        """Take a source offset; return False if it is answered, taken or not assigned here."""
        progress = self._progress.get(partition)
        taken = self._taken.get(partition)
        if progress is None or taken is None or offset in progress or offset in taken:
            return False
        taken.add(offset)
        return True

    async def has_other_records(self) -> bool:
        """Return True if known offsets now hold other records: the topic was replaced or truncated.

        Their progress is then reset. The log is queried at most once a second; while it is
        unavailable, wait.
        """
        interval_s = self._tuning.source_check_interval_s
        if time.monotonic() - self._looked_s < interval_s or self._consumer is None:
            return False
        pauses = Pauses(self._backoff)
        while True:
            try:
                replacement = await self._identity.replacement()
                self._looked_s = time.monotonic()
                sources = [TopicPartition(self._topic, number) for number in self._progress]
                if not replacement:
                    return self._truncate(await self._consumer.end_offsets(sources))
                self._begin_anew(sources)
                self._identity.known = replacement
            except UnknownPartition:
                return False  # the topic is gone: there is nothing to answer
            except Retriable as error:
                log.warning(Event.ACKED_OFFSETS_UNKNOWN, reason=str(error))
                await pauses.sleep()
            else:
                return True

    def _truncate(self, ends: Mapping[TopicPartition, int]) -> bool:
        found = False
        for source, end in ends.items():
            progress = self._progress.get(source.partition)
            if progress is not None and truncate(source, progress, end):
                taken = self._taken[source.partition]
                taken -= {offset for offset in taken if offset >= end}
                found = True
        return found

    def _begin_anew(self, sources: Iterable[TopicPartition]) -> None:
        self._committed.clear()
        for source in sources:
            if source.partition in self._progress:  # still ours
                self._progress[source.partition] = AckedOffsets(0)
                self._taken[source.partition] = set()

    def mark_acked(self, requests: Iterable[Request]) -> None:
        """Mark requests as answered; consecutive offsets are covered together."""
        partition = first = last = -1
        for request in requests:
            if request.previous != last or request.partition != partition:
                self._mark_range(partition, first, last)
                partition, first = request.partition, request.previous
            last = request.offset
            taken = self._taken.get(partition)
            if taken is not None:
                taken.discard(last)
        self._mark_range(partition, first, last)

    def _mark_range(self, partition: int, previous: int, last: int) -> None:
        progress = self._progress.get(partition)
        if progress is not None:
            progress.mark_acked(previous, last)

    def committable(self) -> dict[TopicPartition, Committed]:
        """Return commits that differ from the last committed ones."""
        limit = self._tuning.metadata_characters
        return {
            source: committable
            for partition, progress in self._progress.items()
            if (committable := progress.committable(limit))
            != self._committed.get(source := TopicPartition(self._topic, partition))
        }

    def note_committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Remember commits that the log has acknowledged."""
        self._committed.update(
            (partition, committed)
            for partition, committed in offsets.items()
            if partition.topic == self._topic and partition.partition in self._progress
        )

    def snapshots(self) -> list[PartitionSnapshot]:
        """Return a snapshot of each source partition."""
        return [
            self._snapshot(partition, progress) for partition, progress in self._progress.items()
        ]

    def _snapshot(self, partition: int, progress: AckedOffsets) -> PartitionSnapshot:
        committed = self._committed.get(TopicPartition(self._topic, partition))
        taken = self._taken[partition]
        answered, ranges = progress.answered_above
        highest = max((*taken, *(stop - 1 for _, stop in progress.ranges[-1:])), default=-1)
        return PartitionSnapshot(
            topic=self._topic,
            partition=partition,
            epoch=0,
            base=progress.base,
            committed=None if committed is None else committed.offset,
            end=None,
            in_flight=len(taken),
            span_records=max(0, highest + 1 - progress.base),
            answered_records=answered,
            answered_ranges=ranges,
            metadata_characters=0 if committed is None else len(committed.metadata),
        )

    def forget_committed(self) -> None:
        """Make `committable` return all partitions again."""
        self._committed.clear()
