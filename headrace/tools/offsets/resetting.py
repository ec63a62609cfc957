"""Reset of the base of source partitions while no stage works on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from headrace.client.rpc import topic_partitions
from headrace.config import Settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import ConfigurationError, Fatal
from headrace.log.port import (
    Committed,
    Consumer,
    Log,
    TopicPartition,
    TransactionalProducer,
)
from headrace.tools.offsets.state import PartitionOffsets, read_with
from headrace.topics import STAGES, Topic


class Edge(Enum):
    """Beginning or end of a partition as a target."""

    EARLIEST = auto()
    LATEST = auto()


class Target(NamedTuple):
    """New base; exactly one of these is set.

    Attributes:
        edge: an end of each partition.
        offset: the same offset in each partition.
        timestamp_ms: the first record at or after this time, in epoch milliseconds; the end of a
            partition without one.
    """

    edge: Edge | None = None
    offset: int | None = None
    timestamp_ms: int | None = None


class GroupActive(Fatal):
    """A running stage works on the partitions, and would move the base again."""


class Reset(NamedTuple):
    """Effect of a reset on one partition.

    Attributes:
        before: the previous state.
        after: the base and the answered ranges that are committed instead.
    """

    before: PartitionOffsets
    after: AckedOffsets

    @property
    def repeats(self) -> int:
        """Number of answered offsets, as far as is known, that will be answered again."""
        if self.after.base >= self.before.position:
            return 0
        above = 0 if self.before.progress is None else self.before.progress.answered_above[0]
        return self.before.position - self.after.base + above

    @property
    def skips(self) -> int:
        """Number of unanswered offsets that will never be answered."""
        progress = self.before.progress or AckedOffsets(self.before.position)
        gone = progress.unanswered(self.after.base)
        return sum(stop - max(start, self.before.position) for start, stop in gone)


def moved(progress: AckedOffsets | None, base: int) -> AckedOffsets:
    """Return the answered ranges for a new base.

    When moving forward, the ranges above the new base stay, so that skipping a stuck record does
    not answer the records after it again. When moving backward, everything from the new base on is
    answered again.
    """
    if progress is None or base < progress.base:
        return AckedOffsets(base)
    return AckedOffsets(base, [each for each in progress.ranges if each[1] > base])


async def reset(
    log: Log,
    settings: Settings,
    target: Target,
    numbers: Collection[int] = (),
    *,
    dry_run: bool = False,
) -> list[Reset]:
    """Set the base of all source partitions, or of those with these numbers.

    With exactly once, the producers of all partitions are initialized first: this ends the open
    transactions of former owners, whose offsets might otherwise take effect later.

    Raises:
        GroupActive: a stage of this namespace is running; the text says which, and where.
        ConfigurationError: there is no such topic or partition, or the offset is out of range.
        LogUnavailable: no broker answers.
    """
    await require_idle(log, settings)
    every = await topic_partitions(log, settings.topic(Topic.REQUESTS))
    partitions = _chosen(every, numbers)
    async with log.reader(partitions) as reader:
        if settings.delivery.guarantee == "exactly_once" and not dry_run:
            await _end_transactions(log, settings, every)
            return await _reset_in_transactions(log, settings, target, reader, partitions)
        resets = await _planned(log, settings, target, reader, partitions)
        if not dry_run:
            await log.commit(settings.namespace, _offsets(partitions, resets))
        return resets


async def require_idle(log: Log, settings: Settings) -> None:
    """Raise `GroupActive` if a stage of the namespace is a member of its group."""
    groups = [settings.namespace, *(f"{settings.namespace}.{stage}" for stage in STAGES)]
    found = [(group, member) for group in groups for member in await log.members(group)]
    if found:
        who = "; ".join(
            f"{group}: {member.member_id} at {member.host.lstrip('/') or 'an unknown host'}"
            for group, member in found
        )
        raise GroupActive(f"expected all stages to be stopped, got members of {who}")


async def _end_transactions(log: Log, settings: Settings, every: Sequence[TopicPartition]) -> None:
    """Initialize the producers of all partitions, also of those that are not reset.

    Partitions share transactions, so the producer of one may have left offsets of another open.
    """
    for partition in every:
        async with _producer_of(log, settings, partition):
            pass


def _producer_of(log: Log, settings: Settings, partition: TopicPartition) -> TransactionalProducer:
    group = settings.namespace
    return log.transactional_producer(f"{group}.{partition.topic}.{partition.partition}", group)


async def _reset_in_transactions(
    log: Log,
    settings: Settings,
    target: Target,
    reader: Consumer,
    partitions: Sequence[TopicPartition],
) -> list[Reset]:
    resets: list[Reset] = []
    for partition in partitions:
        async with _producer_of(log, settings, partition) as producer:
            planned = await _planned(log, settings, target, reader, [partition])
            await producer.commit_transaction({}, _offsets([partition], planned))
        # Committed offsets are only guaranteed to be visible once the producer has a successor, so
        # a second producer is initialized before the result is reported.
        async with _producer_of(log, settings, partition):
            resets += planned
    return resets


async def _planned(
    log: Log,
    settings: Settings,
    target: Target,
    reader: Consumer,
    partitions: Sequence[TopicPartition],
) -> list[Reset]:
    states = await read_with(log, settings, reader, partitions)
    bases = await _bases(reader, target, partitions, states)
    return [
        Reset(state, moved(state.progress, base)) for state, base in zip(states, bases, strict=True)
    ]


async def _bases(
    reader: Consumer,
    target: Target,
    partitions: Sequence[TopicPartition],
    states: Sequence[PartitionOffsets],
) -> list[int]:
    if target.timestamp_ms is not None:
        found = await reader.offsets_for_times(dict.fromkeys(partitions, target.timestamp_ms))
        offsets = [found[each] for each in partitions]
        return [
            state.end if offset is None else offset
            for offset, state in zip(offsets, states, strict=True)
        ]
    if target.offset is not None:
        for state in states:
            _require_held(state, target.offset)
        return [target.offset] * len(states)
    return [state.beginning if target.edge is Edge.EARLIEST else state.end for state in states]


def _require_held(state: PartitionOffsets, offset: int) -> None:
    if not state.beginning <= offset <= state.end:
        raise ConfigurationError(
            f"partition {state.partition}: expected an offset from {state.beginning} to "
            f"{state.end}, got {offset}"
        )


def _chosen(partitions: Sequence[TopicPartition], numbers: Collection[int]) -> list[TopicPartition]:
    for number in numbers:
        if not 0 <= number < len(partitions):
            raise ConfigurationError(
                f"expected a partition from 0 to {len(partitions) - 1}, got {number}"
            )
    return [each for each in partitions if not numbers or each.partition in numbers]


def _offsets(
    partitions: Sequence[TopicPartition], resets: Sequence[Reset]
) -> Mapping[TopicPartition, Committed]:
    return {
        each: planned.after.committable() for each, planned in zip(partitions, resets, strict=True)
    }
