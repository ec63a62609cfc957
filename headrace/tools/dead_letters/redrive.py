"""Redriving of dead letters: sending them as requests again, each at most once.

A run is the only member of the group that holds the redrive state, so two operators cannot send the
same dead letter. It sends a chunk, waits for the acknowledgements and commits before the next
chunk.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from headrace.client.rpc import topic_partitions
from headrace.config import Settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import ConfigurationError, Rejected, Retriable
from headrace.log.errors import LogUnavailable, OffsetOutOfRange
from headrace.log.partitioner import partition_for_key
from headrace.log.port import (
    Committed,
    Consumer,
    Gap,
    Log,
    NewRecord,
    Producer,
    Record,
    TopicPartition,
)
from headrace.tools.dead_letters.copies import Transform, copy_of, marked
from headrace.tools.dead_letters.dead_letter import (
    DeadLetter,
    DeadLetterSelection,
    RecordIdentity,
    parse_dead_letter,
)
from headrace.tools.dead_letters.reading import (
    POLL_TIMEOUT_S,
    narrowed,
    read_spans,
    spans_of,
)
from headrace.tools.dead_letters.redrive_state import (
    CLOSED,
    OPEN,
    committable,
    recall,
    redrive_group,
    require_room,
)
from headrace.tools.decided import DECIDED_WITHIN_S
from headrace.topics import Topic
from headrace.tuning import Tuning

# --- sending -------------------------------------------------------------------------------------


async def send_once(
    producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
) -> dict[int, str]:
    """Write records to one partition and wait for their acknowledgements.

    If the topic refuses a group of records as a whole, nothing was written, and they are retried
    one by one. After any other failure there is no retry, since they may have been written.

    Returns:
        The indexes of the refused records with the reasons; all others are written.

    Raises:
        LogUnavailable: it is unknown which records were written.
    """
    try:
        batches = await producer.send(partition, records)
    except Rejected as error:
        return await _one_by_one(producer, partition, records, error)
    refused: dict[int, str] = {}
    start = 0
    for sent in batches:
        part = records[start : start + sent.size]
        try:
            await sent.acknowledged
        except Rejected as error:
            of_part = await _one_by_one(producer, partition, part, error)
            refused |= {start + index: reason for index, reason in of_part.items()}
        start += sent.size
    return refused


async def _one_by_one(
    producer: Producer, partition: TopicPartition, records: Sequence[NewRecord], error: Rejected
) -> dict[int, str]:
    if len(records) == 1:
        return {0: str(error)}
    refused: dict[int, str] = {}
    for index, record in enumerate(records):
        if (reason := (await send_once(producer, partition, [record])).get(0)) is not None:
            refused[index] = reason
    return refused


# --- the redrive lock ----------------------------------------------------------------------------


JOIN_TIMEOUT_S = 120.0
"""Timeout of joining the group, long enough for a killed member's session to expire."""


class RedriveUnderWay(Retriable):
    """Another run of the command is a member of the group."""


class SoleOwner:
    """Rebalance listener of the group's only member.

    Attributes:
        working: held while dead letters are sent and committed, so that a rebalance waits for them.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._assigned = False
        self._revoked = False
        self.working = asyncio.Lock()

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port."""
        self._assigned = True

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port. The chunk being sent is committed in the old generation."""
        async with self.working:
            self._revoked = True

    async def own(self, member: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Join the group and wait for all partitions.

        Raises:
            RedriveUnderWay: there is another member.
            LogUnavailable: the group did not form within two minutes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + JOIN_TIMEOUT_S
        while not self._assigned:
            if loop.time() > deadline:
                raise LogUnavailable(f"group {self._group}: no assignment in {JOIN_TIMEOUT_S:g} s")
            # It begins where the group has committed, which the log may no longer hold. Where to
            # read is sought afterwards.
            with suppress(OffsetOutOfRange):
                await member.poll(POLL_TIMEOUT_S, 1)
        if member.assignment() != frozenset(partitions):
            raise self._under_way()

    def require(self) -> None:
        """Raise `RedriveUnderWay` if a rebalance has revoked the partitions."""
        if self._revoked:
            raise self._under_way()

    def _under_way(self) -> RedriveUnderWay:
        return RedriveUnderWay(
            f"group {self._group}: expected no other member, but another redrive has joined; what "
            "was sent is remembered: run it again when the other one has ended"
        )


# --- the redrive ---------------------------------------------------------------------------------


def patient(tuning: Tuning) -> Tuning:
    """Return tuning values of a log whose members may poll seldom.

    One poll returns many dead letters, and a low rate or a slow transform may spread them over any
    time, during which the member still sends heartbeats.
    """
    return replace(tuning, kafka=replace(tuning.kafka, max_poll_interval_s=LONGEST_S))


LONGEST_S = 7 * 24 * 3600.0
"""Longest time that a redrive may take for the dead letters of one poll."""

CHUNK = 100
CHUNKS_PER_S = 5


@dataclass(frozen=True, slots=True)
class RedriveJob:
    """Parameters of a redrive.

    Attributes:
        limit: maximum number of dead letters, without those that the transform leaves; None for
            all.
        rate: requests per second; None for as fast as they are acknowledged.
        dry_run: count the dead letters without sending them.
        discard: mark the dead letters as done without sending them.
        transform: applied to each request before it is sent.
    """

    selection: DeadLetterSelection = field(default_factory=DeadLetterSelection)
    limit: int | None = None
    rate: float | None = None
    dry_run: bool = False
    discard: bool = False
    transform: Transform | None = None


@dataclass(slots=True)
class RedriveResult:
    """Result of a run.

    Attributes:
        sent: requests written (or discarded, or that a dry run would write), by code.
        done_before: dead letters that an earlier run redrove or discarded.
        left: dead letters for which the transform returned None.
        deadlines_dropped: requests whose expired deadline was removed.
        refused: dead letters that the request topic refused, with the reasons.
        gaps: unreadable ranges of the dead letters.
    """

    sent: Counter[str] = field(default_factory=Counter)
    done_before: int = 0
    left: int = 0
    deadlines_dropped: int = 0
    refused: list[tuple[RecordIdentity, str]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


class _Chosen(NamedTuple):
    """A dead letter to process, and the previously read offset."""

    dead_letter: DeadLetter
    previous: int


class _Outgoing(NamedTuple):
    chosen: _Chosen
    record: NewRecord
    deadline_dropped: bool


class Redrive:
    """One run of `headrace dlq redrive`.

    Args:
        log: an open log.
        advanced: called after each chunk with the share read so far, 0 to 1, and the tally.
        decided_within_s: how long a run after a killed one waits for open transactions among the
            requests.

    Attributes:
        tally: the result so far.
    """

    def __init__(
        self,
        log: Log,
        settings: Settings,
        order: RedriveJob,
        *,
        advanced: Callable[[float, RedriveResult], None] = lambda *_: None,
        decided_within_s: float = DECIDED_WITHIN_S,
    ) -> None:
        self._decided_within_s = decided_within_s
        self.tally = RedriveResult()
        self._log = log
        self._settings = settings
        self._order = order
        self._advanced = advanced
        self._run_id = f"redrive-{secrets.token_hex(4)}"
        self._owner = SoleOwner(redrive_group(settings))
        self._done: dict[TopicPartition, AckedOffsets] = {}
        self._last_read: dict[TopicPartition, int] = {}
        self._requests: list[TopicPartition] = []
        self._begun_s = 0.0
        self._paced = 0
        self._taken = 0

    async def run(self) -> RedriveResult:
        """Redrive the selected dead letters that are not done yet, up to the topic's current end.

        Raises:
            ConfigurationError: a topic is missing, or the transform is wrong.
            RedriveUnderWay: another run has joined the group; what was sent is recorded.
            MemoryFull: no more dead letters can be recorded; those that were sent are.
            LogUnavailable: no broker answered; the next run determines what was written.
        """
        topic = self._settings.topic(Topic.DEAD_LETTERS)
        partitions = await topic_partitions(self._log, topic)
        self._requests = await topic_partitions(self._log, self._settings.topic(Topic.REQUESTS))
        if self._order.dry_run:
            async with self._log.reader(partitions) as reader:
                await self._work(reader, partitions, None)
            return self.tally
        group = redrive_group(self._settings)
        async with (
            self._log.producer() as producer,
            self._log.member(group, [topic], self._owner) as member,
        ):
            await self._owner.own(member, partitions)
            await self._work(member, partitions, producer)
        return self.tally

    async def _work(
        self, consumer: Consumer, partitions: Sequence[TopicPartition], producer: Producer | None
    ) -> None:
        held = await spans_of(consumer, partitions)
        self._done = await recall(self._log, self._settings, held, self._decided_within_s)
        selection = self._order.selection
        since = await spans_of(consumer, partitions, selection.since_ms)
        spans = {name: narrowed(span, name, selection) for name, span in since.items()}
        self._last_read = {name: span.start - 1 for name, span in spans.items()}
        if producer is not None:
            # The result of `recall` is committed together with the new mark: without it, the new
            # mark would hide the requests that the old mark made it read.
            await self._commit(consumer, committable(self._done) | await self._marks(OPEN))
        self._begun_s = time.monotonic()
        offsets = sum(span.end - span.start for span in spans.values())
        async with aclosing(read_spans(consumer, spans, self.tally.gaps.append)) as chunks:
            async for records in chunks:
                for chunk in self._chunks(self._choose(records)):
                    await self._redrive(consumer, producer, chunk)
                    read = sum(
                        last + 1 - spans[name].start for name, last in self._last_read.items()
                    )
                    self._advanced(read / offsets, self.tally)
                if self._taken == self._order.limit:
                    break
        if producer is not None:
            await self._commit(consumer, committable(self._done) | await self._marks(CLOSED))

    def _choose(self, records: Sequence[Record]) -> Iterator[_Chosen]:
        """Yield the selected dead letters that are not done; the records are of one partition."""
        for record in records:
            dead_letter = parse_dead_letter(record)
            previous = self._last_read[dead_letter.partition]
            self._last_read[dead_letter.partition] = record.offset
            if not self._order.selection.takes(dead_letter):
                continue
            if record.offset in self._done[dead_letter.partition]:
                self.tally.done_before += 1
                continue
            yield _Chosen(dead_letter, previous)

    def _chunks(self, chosen: Iterator[_Chosen]) -> Iterator[list[_Chosen]]:
        """Split the dead letters into chunks small enough for the rate, up to the limit."""
        size = CHUNK
        if self._order.rate is not None:
            size = min(CHUNK, max(1, int(self._order.rate / CHUNKS_PER_S)))
        while chunk := list(islice(chosen, self._left_of_limit(size))):
            yield chunk

    def _left_of_limit(self, size: int) -> int:
        """Return how many dead letters may be in the next chunk of this size."""
        limit = self._order.limit
        return size if limit is None else min(size, limit - self._taken)

    async def _redrive(
        self, consumer: Consumer, producer: Producer | None, chunk: list[_Chosen]
    ) -> None:
        """Send one chunk and commit it."""
        # User code may take long, and the group member must continue its heartbeats.
        outgoing = await asyncio.to_thread(self._outgoing, chunk)
        self._taken += len(outgoing)
        if producer is None:
            self._count(outgoing, {})
            return
        await self._pace(len(outgoing))
        async with self._owner.working:
            self._owner.require()
            self._require_room(outgoing)
            refused: dict[int, str] = {}
            if not self._order.discard:
                refused = await self._send(producer, outgoing)
            self._count(outgoing, refused)
            written = [each.chosen for index, each in enumerate(outgoing) if index not in refused]
            for dead_letter, previous in written:
                self._done[dead_letter.partition].mark_acked(previous, dead_letter.record.offset)
            touched = {
                dead_letter.partition: self._done[dead_letter.partition]
                for dead_letter, _ in written
            }
            await self._commit(consumer, committable(touched))

    def _outgoing(self, chunk: Sequence[_Chosen]) -> list[_Outgoing]:
        now_ms, transform = time.time_ns() // 1_000_000, self._order.transform
        outgoing = []
        for each in chunk:
            record, dropped = copy_of(each.dead_letter, now_ms)
            try:
                changed = record if transform is None else transform(record)
            except ConfigurationError as error:
                raise ConfigurationError(f"{each.dead_letter.identity}: {error}") from error
            if changed is None:
                self.tally.left += 1
                continue
            outgoing.append(
                _Outgoing(each, marked(changed, each.dead_letter, self._run_id), dropped)
            )
        return outgoing

    async def _pace(self, count: int) -> None:
        if self._order.rate is not None:
            due_s = self._begun_s + self._paced / self._order.rate
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
        self._paced += count

    def _require_room(self, outgoing: Sequence[_Outgoing]) -> None:
        offsets_read: dict[TopicPartition, list[tuple[int, int]]] = {}
        for dead_letter, previous in (each.chosen for each in outgoing):
            offsets_read.setdefault(dead_letter.partition, []).append(
                (previous, dead_letter.record.offset)
            )
        for partition, offsets in offsets_read.items():
            require_room(self._done[partition], partition, offsets)

    async def _send(self, producer: Producer, outgoing: Sequence[_Outgoing]) -> dict[int, str]:
        """Send the requests; return the indexes of refused ones with the reasons."""
        targets: dict[TopicPartition, list[int]] = {}
        for index, each in enumerate(outgoing):
            targets.setdefault(self._target(each.chosen.dead_letter), []).append(index)
        refused: dict[int, str] = {}
        for target, indexes in targets.items():
            records = [outgoing[index].record for index in indexes]
            of_target = await send_once(producer, target, records)
            refused |= {indexes[index]: reason for index, reason in of_target.items()}
        return refused

    def _target(self, dead_letter: DeadLetter) -> TopicPartition:
        """Return the original partition of the request, if it still exists."""
        count, origin = len(self._requests), dead_letter.origin
        topic = self._requests[0].topic
        if origin is not None and origin.topic == topic and 0 <= origin.partition < count:
            return TopicPartition(topic, origin.partition)
        if dead_letter.record.key is not None:
            return TopicPartition(topic, partition_for_key(dead_letter.record.key, count))
        return TopicPartition(topic, dead_letter.record.partition % count)

    def _count(self, outgoing: Sequence[_Outgoing], refused: Mapping[int, str]) -> None:
        for index, (chosen, _, dropped) in enumerate(outgoing):
            if index in refused:
                self.tally.refused.append((chosen.dead_letter.identity, refused[index]))
                continue
            self.tally.sent[chosen.dead_letter.code] += 1
            self.tally.deadlines_dropped += dropped

    async def _marks(self, state: str) -> dict[TopicPartition, Committed]:
        async with self._log.reader(self._requests) as reader:
            ends = await reader.end_offsets(self._requests)
        return {partition: Committed(end, state) for partition, end in ends.items()}

    async def _commit(
        self, consumer: Consumer, offsets: Mapping[TopicPartition, Committed]
    ) -> None:
        await consumer.commit(offsets)
