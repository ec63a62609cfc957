"""The source partitions' progress, kept by a responder that does not read the source itself.

Where the responder is a process of its own it reads `results`, whose partition p carries the
results of source partition p and of no other. So the owner of `results/p` keeps the base and the
answered set of `requests/p`, in the same place and form as a process with all four stages:
committed under the one group, on the *requests* topic. A result whose origin is answered already
is a duplicate (a stage died after passing it on) and goes no further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.flow.answered import Progress
from headrace.flow.positions import starting_progress
from headrace.log.port import Committed, Consumer, TopicPartition
from headrace.telemetry.snapshots import PartitionSnapshot


class Origins:
    """Progress and claims for each source partition whose results we read."""

    def __init__(self, requests_topic: str) -> None:
        self._topic = requests_topic
        self._progress: dict[int, Progress] = {}
        self._claimed: dict[int, set[int]] = {}
        self._committed: dict[TopicPartition, Committed] = {}

    async def assigned(self, consumer: Consumer, partitions: Sequence[int]) -> None:
        """Load what is committed for the source partitions."""
        sources = [TopicPartition(self._topic, partition) for partition in partitions]
        committed = await consumer.committed(sources)
        beginnings = await consumer.beginning_offsets(sources)
        for source in sources:
            self._progress[source.partition] = starting_progress(
                committed[source], beginnings[source]
            )
            self._claimed[source.partition] = set()

    def revoked(self, partitions: Sequence[int]) -> None:
        """Forget the partitions; their next owner loads what was committed."""
        for partition in partitions:
            self._progress.pop(partition, None)
            self._claimed.pop(partition, None)
            self._committed.pop(TopicPartition(self._topic, partition), None)

    def progress(self, partition: int) -> Progress | None:
        """What is answered of a source partition; None when it is not ours."""
        return self._progress.get(partition)

    def claim(self, partition: int, offset: int) -> bool:
        """True for the one who may answer this origin now; False: it is answered, or being so."""
        progress = self._progress.get(partition)
        claimed = self._claimed.get(partition)
        if progress is None or claimed is None or offset in progress or offset in claimed:
            return False
        claimed.add(offset)
        return True

    def answered(self, partition: int, previous: int, offset: int) -> None:
        """The answer is acknowledged."""
        progress = self._progress.get(partition)
        if progress is not None:
            progress.cover(previous, offset)
            self._claimed[partition].discard(offset)

    def committable(self) -> dict[TopicPartition, Committed]:
        """What may be committed now and differs from what was committed last."""
        return {
            source: committable
            for partition, progress in self._progress.items()
            if (committable := progress.committable())
            != self._committed.get(source := TopicPartition(self._topic, partition))
        }

    def was_committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Remember what the log has acknowledged."""
        self._committed.update(
            (partition, committed)
            for partition, committed in offsets.items()
            if partition.topic == self._topic and partition.partition in self._progress
        )

    def snapshots(self) -> list[PartitionSnapshot]:
        """What there is to see of the source partitions."""
        return [
            self._snapshot(partition, progress) for partition, progress in self._progress.items()
        ]

    def _snapshot(self, partition: int, progress: Progress) -> PartitionSnapshot:
        committed = self._committed.get(TopicPartition(self._topic, partition))
        claimed = self._claimed[partition]
        answered, ranges = progress.answered_above
        highest = max((*claimed, *(stop - 1 for _, stop in progress.ranges[-1:])), default=-1)
        return PartitionSnapshot(
            topic=self._topic,
            partition=partition,
            epoch=0,
            base=progress.base,
            committed=None if committed is None else committed.offset,
            end=None,
            in_flight=len(claimed),
            span_records=max(0, highest + 1 - progress.base),
            answered_records=answered,
            answered_ranges=ranges,
            metadata_characters=0 if committed is None else len(committed.metadata),
        )

    def forget_committed(self) -> None:
        """Commit all again."""
        self._committed.clear()
