"""The log as Headrace sees it: records in partitions, groups, producers, a little administration.

Two adapters implement these protocols: `headrace.log.kafka.log` and `headrace.log.memory`. The
suite in `tests/contract` runs on both and is the definition of how they behave. What they raise is
in `headrace.log.errors`.

Rules of use, which hold for both:

- One task calls `Consumer.poll`, and nobody cancels it: it ends by its own timeout.
- The listener's calls come from inside a rebalance. No record of an assigned partition is
  returned by `poll` before `on_assigned` has returned, and none of a revoked one afterwards.
- A rebalance revokes all partitions of every member, runs beside `poll` in a task of the
  consumer's, and forgets pauses. An error that the listener raises, `poll` raises.
- `Consumer.close` does not call `on_revoked`: drain and commit before.
- `Producer.send` keeps the order of records within a partition.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, TypeAlias

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
"""Names and values. A name that is not UTF-8 is decoded with `surrogateescape` when it is read, and
the same bytes are written where such a name is sent.
"""

MAX_POLL_BYTES: Final = 16 * 1024 * 1024
"""A poll returns no more than this, and one record, unless it is called with another limit."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Committed(NamedTuple):
    """A consumer group's committed offset (the next to read) and its metadata text."""

    offset: int
    metadata: str = ""


class Record(NamedTuple):
    """A record as read. `timestamp` is in epoch milliseconds, -1 where the log knows none; a null
    value is a tombstone.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Gap(NamedTuple):
    """Offsets that a poll has passed over, because the log holds nothing there that can be read.

    Attributes:
        first, end: from the one up to, and without, the other.
        code: `TOO_LARGE` for a batch that exceeds the bound once decompressed, and otherwise
            `INVALID_REQUEST`.
        reason: what was expected, and what there was.
    """

    partition: TopicPartition
    first: int
    end: int
    code: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.partition}: passed over the offsets from {self.first} to {self.end - 1}, "
            f"{self.code}: {self.reason}"
        )


class NewRecord(NamedTuple):
    """A record to be written. Without `timestamp_ms` the log stamps it on arrival."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None


class Run(NamedTuple):
    """Records that travel together: `size` of them, all acknowledged, or failed, as one.

    Whoever is cancelled while awaiting the acknowledgement leaves the others who share it alone.
    """

    size: int
    acknowledged: Awaitable[None]


class TopicInfo(NamedTuple):
    """A topic: partitions, settings by Kafka's names, and what no other of its name has had."""

    name: str
    partitions: int
    config: Mapping[str, str]
    topic_id: str = ""


class GroupMember(NamedTuple):
    """Who is in a consumer group, as its coordinator knows it."""

    member_id: str
    client_id: str
    host: str


class Entered(Protocol):
    """What works between entering and leaving an `async with`, which closes it."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class RebalanceListener(Protocol):
    """Told of assignments. Both calls are awaited inside the rebalance: keep them short."""

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Set up the partitions; `Consumer.seek` may be called here."""
        ...

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish or drop what is in flight of the partitions; `Consumer.commit` may be called."""
        ...


class Consumer(Entered, Protocol):
    """A member of a consumer group (with a listener), or a free reader of given partitions."""

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Records in offset order per partition; empty when none came within the timeout.

        The limit of bytes is for keys, values and headers; the last record may exceed it. Never
        raises because a broker is away: that shows as silence (see `last_contact_s`). Nor because
        records cannot be read: see `gaps`.

        Raises:
            OffsetOutOfRange: a position is below what retention has kept, or beyond the end.
            LogAuthenticationFailed: the broker refuses us.
        """
        ...

    def gaps(self) -> Sequence[Gap]:
        """Return what the last `poll` has passed over, in offset order per partition."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that are ours now."""
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Return nothing of these partitions until resumed; polling goes on.

        Raises:
            Fenced: one of them is not assigned, or no longer; so do `resume` and `seek`.
        """
        ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo `pause`; the next poll goes on where reading stood."""
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to be read of an assigned partition."""
        ...

    async def position(self, partition: TopicPartition) -> int:
        """The offset at which reading of an assigned partition stands.

        It is past every record that was returned, and past what never is (transaction markers,
        aborted records, gaps) once a poll has met it.

        Raises:
            Fenced: the partition is not assigned.
            LogUnavailable: not known within the deadline.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for the group, in the current generation.

        Raises:
            LogUnavailable: no answer within the deadline; the outcome is unknown.
            Fenced: the group has moved on; the partitions are no longer ours.
            LogRefused: a metadata text is longer than the broker takes (4,096 characters unless
                configured); or this is a reader, which has no group to commit for.
        """
        ...

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """What the group has committed, with metadata; None where nothing was, as for a reader.

        Raises:
            LogUnavailable: see `commit`.
        """
        ...

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """The first offset still held, per partition."""
        ...

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """The offset that the next record will get (the last stable one when read committed)."""
        ...

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        """The first offset whose timestamp is at or after the given one; None when none is."""
        ...

    def last_contact_s(self) -> float:
        """Seconds since the log last answered this consumer; 0.0 for the embedded log."""
        ...

    @property
    def member_id(self) -> str:
        """Who we are in the group, by its coordinator's name for us; empty while we are nobody."""
        ...

    async def is_member(self) -> bool:
        """Ask the group whether it still counts us in, in our generation (a Heartbeat).

        False: we are a zombie, and all that we hold is revoked. It is what tells, after a producer
        was fenced, whether the broker ended our transaction or another owner took over.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    async def close(self) -> None:
        """Leave the group and let go of all sockets, within a few seconds even with no broker."""
        ...


class Producer(Entered, Protocol):
    """Writes records; acknowledged by all in-sync replicas, idempotent."""

    async def send(self, partition: TopicPartition, records: Sequence[NewRecord]) -> Sequence[Run]:
        """Hand over records of one partition, in order.

        Returns as soon as the records are queued, which may wait for room. The runs are the
        batches that the records travel in: together they are all the records, in order.

        Raises (a run's `acknowledged` does, and for what never left, this call):
            RecordTooLarge: one of the records, or the batch that they made, is too large.
            LogUnavailable: no acknowledgement in time; the records may or may not be there.
            Fenced: see there.
            UnknownPartition: this call, before anything is sent.
            RecordRefused: a record without a key, for a topic that is compacted.
            TopicForbidden: the broker's access rules; nothing is written.
            TypeError: this call: a key, a value or a header's value is neither bytes nor None.
        """
        ...

    async def batch_limit_bytes(self, partition: TopicPartition) -> int:
        """How large a batch the topic takes, as far as is known. Raises as `send` itself does."""
        ...

    async def partitions_for(self, topic: str) -> int | None:
        """The number of partitions of a topic; None when the topic does not exist.

        Answers from cached metadata where it can; a topic not seen before costs one question
        to a broker, and never more than a second.

        Raises:
            LogUnavailable: nobody answered within that second.
            TopicForbidden: the broker does not let us know; where we may know, but not write,
                only `send` tells.
        """
        ...

    async def close(self) -> None:
        """Flush, within a few seconds, and close."""
        ...


class TransactionalProducer(Entered, Protocol):
    """Seals records and offsets together: a `read_committed` reader sees all of them, or none.

    Entering fences: a former producer of the same id is refused from then on, and the
    transaction that it left open has ended before entering returns, so that the group's
    committed offsets, read afterwards, are the last that it sealed.

    Raises (on entering):
        LogUnavailable: see the port's other calls.
        LogRefused: the broker's access rules, or a broker without transactions.
    """

    @property
    def is_usable(self) -> bool:
        """Whether it was entered, and has neither failed nor been closed since."""
        ...

    async def seal(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        """One transaction: the records, each acknowledged, then the offsets, then the end.

        Either may be empty. One call at a time.

        What is known to fail is refused before the transaction begins, and the producer stays
        usable. One that does not is to be closed: nothing of its transaction will be visible,
        unless the outcome is unknown. A successor with its id ends what is open; the committed
        offsets then say what became of it.

        Raises:
            RecordsRefused, NoLeader: before anything was begun.
            RecordTooLarge, RecordRefused: the broker refuses a record, or a batch that they made.
            UnknownPartition: a topic was deleted, or never had the partition.
            TopicForbidden: the broker's access rules.
            TransactionTimedOut: not ended within `transaction_timeout_ms`.
            Fenced: another producer with this id was entered, or the broker ended the
                transaction for taking too long; `Consumer.is_member` tells which.
            LogUnavailable: no answer in time; the outcome is unknown.
            LogRefused: the group may not be committed for, or a metadata text is too long.
        """
        ...

    async def partitions_for(self, topic: str) -> int | None:
        """See `Producer`."""
        ...

    async def close(self) -> None:
        """Let go of the sockets; an open transaction is left to the successor to end."""
        ...


class Log(Entered, Protocol):
    """Where consumers and producers come from. The parts it gives are not yet started:
    enter them with `async with`.
    """

    def member(
        self, group: str, topics: Sequence[str], listener: RebalanceListener, *, kind: str = ""
    ) -> Consumer:
        """A member of a consumer group; reads `read_committed`, from what the group has
        committed, or from the beginning.

        The group takes members of one kind at a time: `poll` raises `LogRefused` in others.
        """
        ...

    def reader(self, partitions: Sequence[TopicPartition]) -> Consumer:
        """A reader of given partitions, in no group, from their ends unless it seeks.

        The ends are those at the moment it is entered: what is sent afterwards is read.
        """
        ...

    def producer(self) -> Producer:
        """An idempotent producer."""
        ...

    def transactional_producer(self, transactional_id: str, group: str) -> TransactionalProducer:
        """A producer that seals records together with offsets of one consumer group."""
        ...

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        """What exists of these topics. Raises `LogUnavailable`."""
        ...

    async def create_topics(
        self, topics: Sequence[TopicInfo], *, replication_factor: int
    ) -> Mapping[str, bool]:
        """Create topics; False where one was there before. Raises `LogUnavailable`."""
        ...

    async def committed(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """What any group has committed, without being a member of it."""
        ...

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for a group that has no members.

        Raises:
            LogUnavailable: no answer within the deadline; the outcome is unknown.
            Fenced: the group has members, and only they may commit.
            LogRefused: a metadata text is too long.
        """
        ...

    async def members(self, group: str) -> Sequence[GroupMember]:
        """Who is in a group now; nobody where there is no such group. Raises `LogUnavailable`."""
        ...

    async def remove_member(self, group: str, member_id: str) -> bool:
        """Take a member out of a group, so that nobody waits for its session to end.

        A member that is alive all the same loses what it has, and joins again.

        Returns:
            False when the group did not count it in any more.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    async def close(self) -> None:
        """Let go of the connections used for administration."""
        ...
