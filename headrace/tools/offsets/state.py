"""Committed state of each source partition, together with its contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.client.rpc import topic_partitions
from headrace.config import Settings
from headrace.delivery.acked_offsets import AckedOffsets, UnknownMetadata
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.topics import Topic

_FORMS = {"": "none", "1r": "runs", "1b": "bitmap"}


class PartitionOffsets(NamedTuple):
    """One source partition: its committed state and its contents.

    Attributes:
        partition: its number.
        beginning: the first offset that the log still holds.
        end: the offset of the next record; with transactions, the last stable offset.
        committed: the base and the metadata text; None if nothing is committed.
        progress: decoded from `committed`; None if nothing is committed, or the text is unreadable.
        hidden: number of offsets from `end` on that no service can read yet: the first of them has
            a record of an open transaction. Neither the lag nor `unanswered` includes them.
    """

    partition: int
    beginning: int
    end: int
    committed: Committed | None
    progress: AckedOffsets | None
    hidden: int = 0

    @property
    def position(self) -> int:
        """Offset at which a new owner would start to read."""
        base = self.beginning if self.committed is None else self.committed.offset
        return max(base, self.beginning)

    @property
    def lag(self) -> int:
        """Number of offsets between the position and the end."""
        return max(0, self.end - self.position)

    @property
    def unanswered(self) -> int:
        """Number of offsets in the lag that are in no answered range."""
        ranges = [] if self.progress is None else self.progress.ranges
        above = sum(max(0, stop - max(start, self.position)) for start, stop in ranges)
        return max(0, self.lag - above)

    @property
    def form(self) -> str:
        """Encoding of the answered ranges: `none`, `runs`, `bitmap`; or `unreadable`."""
        if self.committed is None:
            return "none"
        if self.progress is None:
            return "unreadable"
        return _FORMS[self.committed.metadata[:2]]


async def read_offsets(log: Log, settings: Settings) -> list[PartitionOffsets]:
    """Return the state of every source partition, in order.

    Raises:
        LogUnavailable: no broker answers.
        ConfigurationError: there is no such topic.
    """
    partitions = await topic_partitions(log, settings.topic(Topic.REQUESTS))
    async with log.reader(partitions) as reader:
        return await read_with(log, settings, reader, partitions)


async def read_with(
    log: Log, settings: Settings, reader: Consumer, partitions: Sequence[TopicPartition]
) -> list[PartitionOffsets]:
    """Read the state of some partitions with an existing reader."""
    committed = await log.committed(settings.namespace, partitions)
    beginnings = await reader.beginning_offsets(partitions)
    written = await log.written_ends(partitions)  # before the ends, which may go on meanwhile
    ends = await reader.end_offsets(partitions)
    return [
        PartitionOffsets(
            each.partition,
            beginnings[each],
            ends[each],
            committed[each],
            readable_progress(committed[each]),
            max(0, written[each] - ends[each]),
        )
        for each in partitions
    ]


def readable_progress(committed: Committed | None) -> AckedOffsets | None:
    """Decode a commit; None if there is none, or if its metadata has an unknown form."""
    if committed is None:
        return None
    try:
        return AckedOffsets.from_committed(committed)
    except UnknownMetadata:
        return None
