"""The port to the log: records in partitions, groups, producers, a little administration.

Two adapters implement these protocols: `headrace.log.kafka.log` and `headrace.log.memory`. The
suite in `tests/contract` runs on both and defines their behaviour. Their errors are in
`headrace.log.errors`.

Rules of use, which hold for both:

- One task calls `Consumer.poll`, and it must not be cancelled: it ends by its own timeout.
- The listener is called from inside a rebalance. `poll` returns no record of an assigned partition
  before `on_assigned` has returned, and none of a revoked one afterwards.
- A rebalance revokes all partitions of every member, runs beside `poll` in a task of the
  consumer's, and clears pauses. `poll` raises any error that the listener raises.
- `Consumer.close` does not call `on_revoked`: drain and commit before.
- `Producer.send` keeps the order of records within a partition.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, TypeAlias

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
"""Names and values. A name that is not UTF-8 is decoded with `surrogateescape`, and sending such a
name writes the same bytes.
"""

MAX_POLL_BYTES: Final = 16 * 1024 * 1024
"""Default limit on the bytes of one poll; the last record may exceed it."""


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
    """A record as read. `timestamp` is in epoch milliseconds, -1 if the log has none; a null value
    is a tombstone.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Gap(NamedTuple):
    """Offsets that a poll skipped, because the log holds nothing readable there.

    Attributes:
        first, end: the first offset, and the one after the last.
        code: `TOO_LARGE` for a batch that exceeds the bound once decompressed, and otherwise
            `INVALID_REQUEST`.
        reason: what was expected, and what was found.
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
    """A record to write. Without `timestamp_ms` the log stamps it on arrival."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None


class SentBatch(NamedTuple):
    """Records that are sent together: `size` of them, which are acknowledged or fail as one.

    Cancelling one caller's wait for the acknowledgement does not affect the others that share it.
    """

    size: int
    acknowledged: Awaitable[None]


class TopicInfo(NamedTuple):
    """A topic: partitions, settings by Kafka's names, and an id that is never reused."""

    name: str
    partitions: int
    config: Mapping[str, str]
    topic_id: str = ""


class GroupMember(NamedTuple):
    """A member of a consumer group, as its coordinator describes it."""

    member_id: str
    host: str


class Membership(NamedTuple):
    """A member's id in a consumer group, and the generation in which it has its partitions."""

    generation: int
    member_id: str


class Entered(Protocol):
    """An async context manager that works inside its `async with` block, which closes it."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class RebalanceListener(Protocol):
    """Notified of assignments. Both calls are awaited inside the rebalance: keep them short."""

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Set up the partitions; `Consumer.seek` may be called here."""
        ...

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish or drop the requests in flight; `Consumer.commit` may be called here."""
        ...


class Consumer(Entered, Protocol):
    """A member of a consumer group (with a listener), or a free reader of given partitions."""

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return records in offset order per partition; empty if none arrived within the timeout.

        The limit of bytes counts keys, values and headers; the last record may exceed it. An
        unreachable broker raises no error, but shows as silence (see `last_contact_s`). Unreadable
        records raise none either: see `gaps`.

        Raises:
            OffsetOutOfRange: a position is below what retention has kept, or beyond the end.
            LogAuthenticationFailed: the broker refuses us.
        """
        ...

    def gaps(self) -> Sequence[Gap]:
        """Return the gaps that the last `poll` skipped, in offset order per partition."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions currently assigned."""
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Return no records of these partitions until they are resumed; polling continues.

        Raises:
            Fenced: one of them is not, or no longer, assigned; `resume` and `seek` raise it too.
        """
        ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo `pause`; the next poll continues at the same position."""
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Set the next offset to read from an assigned partition."""
        ...

    async def position(self, partition: TopicPartition) -> int:
        """Return the next offset to read from an assigned partition.

        It is past every record that was returned, and past skipped offsets (transaction markers,
        aborted records, gaps) once a poll has met them.

        Raises:
            Fenced: the partition is not assigned.
            LogUnavailable: not known within the deadline.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for the group, in the current generation.

        Raises:
            LogUnavailable: no answer within the deadline; the outcome is unknown.
            Fenced: the generation is over; the partitions are no longer ours.
            LogRefused: a metadata text is longer than the broker accepts (4,096 characters unless
                configured); or this is a free reader, which has no group.
        """
        ...

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """Return the group's committed offsets with metadata; None where there is none, as for a
        reader.

        Waits for the end of a transaction that commits one of them.

        Raises:
            LogUnavailable: see `commit`; or such a transaction has not ended within seconds.
        """
        ...

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the first offset still held, per partition."""
        ...

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the next offset to be written (the last stable one when read committed)."""
        ...

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        """Return the first offset at or after each timestamp; None if there is none."""
        ...

    def last_contact_s(self) -> float:
        """Return the seconds since the log last answered us; 0.0 for the embedded log."""
        ...

    @property
    def member_id(self) -> str:
        """The id that the group's coordinator gave us; empty while we are not a member."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Our membership as we know it, without a request; None while we are not a member.

        From `on_assigned` until `on_revoked` it is that of the assignment, or None.
        """
        ...

    async def is_member(self) -> bool:
        """Ask the group whether we are still a member in our generation (a Heartbeat).

        If False, we are a zombie, and all our partitions are revoked. After a producer was fenced
        this tells whether the broker aborted our transaction or another owner took over.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    async def close(self) -> None:
        """Leave the group and close all sockets, within a few seconds even without a broker."""
        ...


class Producer(Entered, Protocol):
    """An idempotent producer of records, which all in-sync replicas acknowledge."""

    async def send(
        self,
        partition: TopicPartition,
        records: Sequence[NewRecord],
        *,
        first_batch_only: bool = False,
    ) -> Sequence[SentBatch]:
        """Queue records of one partition, in order.

        Returns as soon as the records are queued, which may wait for room. The returned
        batches together contain all the records, in order.

        A batch may be written although one before it is not. A caller that must keep the order
        sends `first_batch_only`: the first records, as many as go into one batch.

        Raises (from a batch's `acknowledged`, or from this call for records that were never sent):
            RecordTooLarge: one of the records is too large.
            LogUnavailable: no acknowledgement in time; the records may or may not be written. Or
                the batch that they shared with others was too large; the next ones are smaller.
            Fenced: see there.
            UnknownPartition: from this call, before anything is sent.
            RecordRefused: a record without a key, for a topic that is compacted.
            TopicForbidden: the broker's access rules; nothing is written.
            TypeError: from this call: a key, a value or a header's value is neither bytes nor None.
        """
        ...

    async def partitions_for(self, topic: str) -> int | None:
        """Return the number of partitions of a topic; None if the topic does not exist.

        Uses cached metadata if possible; a new topic costs one request to a broker, which takes at
        most a second.

        Raises:
            LogUnavailable: no broker answered within that second.
            TopicForbidden: the broker does not allow us to describe it; if we may describe the
                topic, but not write to it, only `send` raises this.
        """
        ...

    async def finish(self, timeout_s: float) -> None:
        """Accept no more records, and wait until those that were sent are acknowledged.

        From then on `send` raises `LogUnavailable`, and `close` does not wait for acknowledgements.
        """
        ...

    async def close(self) -> None:
        """Flush, within a few seconds, and close."""
        ...


class TransactionalProducer(Entered, Protocol):
    """Commits records and offsets atomically: a `read_committed` reader sees all of them, or none.

    Entering fences: a former producer with the same id is refused from then on, and the transaction
    that it left open has ended before entering returns, so that the group's committed offsets, read
    afterwards, are the last that it committed.

    Raises (on entering):
        LogUnavailable: see the port's other calls.
        LogRefused: the broker's access rules, or a broker without transactions.
    """

    @property
    def is_usable(self) -> bool:
        """Return whether it was entered, and has neither failed nor been closed since."""
        ...

    async def commit_transaction(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None = None,
    ) -> None:
        """Run one transaction: write the records, each acknowledged, then the offsets, then commit.

        Either may be empty. One call at a time.

        With a membership the group's coordinator refuses the offsets once its generation is over
        (KIP-447). Offsets that it has taken before are pending until the transaction ends:
        `Consumer.committed` waits for that, so that the next owner of a partition reads the last
        ones, whichever producer has written them.

        Errors that are known beforehand are raised before the transaction begins, and the producer
        stays usable. A producer that is no longer usable must be closed: nothing of its transaction
        will be visible, unless the outcome is unknown. A successor with its id ends an open
        transaction; the committed offsets then show its outcome.

        Raises:
            RecordsRefused, NoLeader: before the transaction was begun.
            RecordTooLarge, RecordRefused: the broker refuses a record, or the batch that holds it.
            UnknownPartition: a topic was deleted, or never had the partition.
            TopicForbidden: the broker's access rules.
            TransactionTimedOut: not ended within `transaction_timeout_ms`.
            Fenced: another producer with this id was entered, the broker aborted the transaction
                for taking too long, or the generation is over; `Consumer.is_member` tells whether
                we still own our partitions.
            LogUnavailable: no answer in time; the outcome is unknown.
            LogRefused: we may not commit for the group, or a metadata text is too long.
        """
        ...

    async def close(self) -> None:
        """Close the sockets; the successor ends an open transaction."""
        ...


class Wanted(NamedTuple):
    """Records that a fetch is made for. What lies between them may be much larger.

    Attributes:
        offsets: their offsets.
        others_bytes: most bytes, in values, of other records that are returned.
    """

    offsets: Collection[int]
    others_bytes: int


class Fetched:
    """Records that a fetch returns.

    Args:
        wanted: see `Log.fetch`.

    Attributes:
        records: those found up to now, in order.
    """

    def __init__(self, wanted: Wanted | None) -> None:
        self.records: list[Record] = []
        self._wanted = wanted
        self._left_bytes = 0 if wanted is None else wanted.others_bytes

    def add(self, records: Iterable[Record]) -> None:
        """Add records that were found, except others for which there is no room."""
        if self._wanted is None:
            self.records += records
            return
        for record in records:
            if record.offset not in self._wanted.offsets:
                size_bytes = len(record.value or b"")
                if size_bytes > self._left_bytes:
                    continue
                self._left_bytes -= size_bytes
            self.records.append(record)

    def next_offset(self, position: int, last: int) -> int:
        """Return the next offset to read from; the one behind `last` if none is wanted any more."""
        if self._wanted is None:
            return position
        return min((each for each in self._wanted.offsets if each >= position), default=last + 1)


class Log(Entered, Protocol):
    """Factory of consumers and producers, which `async with` starts."""

    def member(
        self, group: str, topics: Sequence[str], listener: RebalanceListener, *, kind: str = ""
    ) -> Consumer:
        """Return a member of a consumer group; it reads `read_committed`, from the group's
        committed offsets, or from the beginning.

        The group accepts members of one kind at a time: `poll` raises `LogRefused` in others.
        """
        ...

    def reader(self, partitions: Sequence[TopicPartition]) -> Consumer:
        """Return a reader of given partitions, in no group, from their ends unless it seeks.

        The ends are those at the moment it is entered: records sent afterwards are read.
        """
        ...

    def producer(self) -> Producer:
        """Return an idempotent producer."""
        ...

    def transactional_producer(self, transactional_id: str, group: str) -> TransactionalProducer:
        """Return a producer that commits records together with offsets of one consumer group."""
        ...

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        """Describe topics; None for those that do not exist. Raises `LogUnavailable`."""
        ...

    async def create_topics(
        self, topics: Sequence[TopicInfo], *, replication_factor: int
    ) -> Mapping[str, bool]:
        """Create topics; False for those that existed before. Raises `LogUnavailable`."""
        ...

    async def committed(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """Return the committed offsets of any group, without being a member of it."""
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
        """Return a group's members; empty if there is no such group. Raises `LogUnavailable`."""
        ...

    async def remove_member(self, group: str, member_id: str) -> bool:
        """Remove a member from a group, so that the group need not wait for its session to expire.

        A member that is still alive loses its partitions, and joins again.

        Returns:
            False when the group no longer counted it as a member.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    async def fetch(
        self,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        wanted: Wanted | None = None,
    ) -> Sequence[Record]:
        """Return the records from offset `first` to `last` that the log still holds, in order, and
        those after `last` that came with them.

        Name offsets of records that were read: those of open and aborted transactions may be
        returned as well. A record that cannot be read is left out, like one that is gone, or one
        that does not appear within a few seconds.

        Args:
            partition: the partition.
            first: the first offset.
            last: the last offset.
            max_bytes: the size of one response, which its first batch may exceed; several follow
                each other if needed.
            wanted: offsets that are needed, and how much may come with them; None: all are needed.

        Raises:
            LogUnavailable: no answer within the deadline.
            UnknownPartition: there is no such topic, or it has fewer partitions.
            LogAuthenticationFailed: we may not read the topic.
        """
        ...

    async def written_ends(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition, whether its transaction has
        ended or not; `Consumer.end_offsets` has the last stable offset instead.

        Raises:
            LogUnavailable: no answer within the deadline.
            UnknownPartition: there is no such topic, or it has fewer partitions.
            LogAuthenticationFailed: we may not read the topic.
        """
        ...

    async def close(self) -> None:
        """Release the connections used for administration, by `fetch` and by `written_ends`."""
        ...
