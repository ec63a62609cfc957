"""Read through aiokafka's consumer: members of consumer groups, and free readers.

Two of aiokafka's own states implement the port's rule that no record is returned before
`on_assigned` has returned: a rebalance in progress blocks reading, and a paused partition is not
fetched. aiokafka activates an assignment before it calls its listener, but none of its partitions
has a position by then; so a member pauses all of them first, lets the listener seek, and resumes
them when it has returned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Self

import aiokafka
import aiokafka.errors as kafka_errors
from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.client import AIOKafkaClient
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError

from headrace.errors import HeadraceError
from headrace.log.errors import (
    Fenced,
    LogAuthenticationFailed,
    LogRefused,
    OffsetOutOfRange,
    UnknownPartition,
)
from headrace.log.kafka._aiokafka import (
    FetchBuffer,
    client_of,
    close_consumer,
    commit_once,
    count_as_polling,
    fetching_task,
    find_coordinator,
    last_response_s,
    membership_of,
    raise_coordination_error,
    reset_polling,
    seek_by_policy,
    set_fetch_wait,
)
from headrace.log.kafka.admin import AdminClient
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, in_port_words
from headrace.log.kafka.fetch_buffer import ReadState, take_records
from headrace.log.port import (
    MAX_POLL_BYTES,
    Committed,
    Gap,
    Membership,
    RebalanceListener,
    Record,
    TopicPartition,
)
from headrace.tuning import KafkaTuning

_LATEST_MS: Final = 2**63 - 1


class FetchWait:
    """Rule for how long brokers may hold a consumer's fetches for records to arrive; no I/O.

    A fetch in progress delays partitions that are resumed or sought meanwhile, since a broker
    answers the requests of a connection one after another. So brokers may hold a fetch longer only
    if the consumer reads all of its partitions and nothing has happened for a while
    (docs/decisions/0028-idle-fetches.md).
    """

    def __init__(self, tuning: KafkaTuning, now_s: float) -> None:
        self._tuning = tuning
        self._active_s = now_s

    def note_activity(self, now_s: float) -> None:
        """Note that a record was read, or that partitions were assigned, sought or resumed."""
        self._active_s = now_s

    def wait_s(self, now_s: float, *, is_any_paused: bool) -> float:
        """Return the seconds for the next fetch."""
        tuning = self._tuning
        if is_any_paused or now_s - self._active_s < tuning.idle_after_s:
            return tuning.fetch_max_wait_s
        return max(tuning.fetch_max_wait_s, tuning.idle_fetch_max_wait_s)


class ContactMonitor:
    """Knows when a broker last answered, and finds out after a silence whether they refuse us.

    Attributes:
        client: the client whose connections count; None before the consumer has started.
    """

    def __init__(self, connection: Connection) -> None:
        self.client: AIOKafkaClient | None = None
        self._connection = connection
        self._last_s = self._checked_s = time.monotonic()
        self._check: asyncio.Task[None] | None = None
        self._refusal: HeadraceError | None = None

    def silent_for_s(self) -> float:
        """Return the seconds since the last response of any kind (fetch, heartbeat, request)."""
        if self.client is not None:
            self._last_s = max(self._last_s, last_response_s(self.client))
        return time.monotonic() - self._last_s

    def check(self) -> None:
        """Connect once more, in a task, if no broker has answered for a while."""
        after_s, now_s = self._connection.tuning.contact_check_after_s, time.monotonic()
        if self.silent_for_s() < after_s or now_s - self._checked_s < after_s:
            return
        if self._check is None or self._check.done():
            self._checked_s = now_s
            self._check = asyncio.create_task(self._find_refusal(), name="kafka-contact-check")

    async def _find_refusal(self) -> None:
        self._refusal = await self._connection.refusal() or self._refusal

    def take_refusal(self) -> HeadraceError | None:
        """Return the error that a check has found, once; None if brokers do not refuse us."""
        refusal, self._refusal = self._refusal, None
        return refusal

    async def close(self) -> None:
        """End a check in progress."""
        self.client = None
        check, self._check = self._check, None
        if check is not None:
            check.cancel()
            await asyncio.wait([check])


class KafkaConsumer:
    """The common part of members and readers; see `headrace.log.port.Consumer`."""

    _buffer: FetchBuffer  # set once the consumer has started

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: AIOKafkaConsumer | None = None
        self._owned: frozenset[TopicPartition] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._open = asyncio.Event()
        self._failure: Exception | None = None
        self._contact = ContactMonitor(connection)
        self._closed = False
        self._read_state = ReadState(
            connection.decompressed_bytes,
            connection.tuning,
            reads_followers=bool(connection.settings.client_rack),
        )
        self._fetch_wait = FetchWait(connection.tuning, time.monotonic())

    # Starting and closing

    async def __aenter__(self) -> Self:
        settings, tuning = self._connection.settings, self._connection.tuning
        self._started = AIOKafkaConsumer(
            **self._connection.client_options(
                # JoinGroup is answered only when every member has joined.
                max(
                    settings.request_timeout_ms,
                    int((tuning.rebalance_timeout_s + tuning.join_margin_s) * 1000),
                )
            ),
            **self._group_options(),
            client_rack=settings.client_rack or None,
            isolation_level="read_committed",
            auto_offset_reset="none",  # an offset that is gone must be reported, not skipped
            enable_auto_commit=False,
            fetch_min_bytes=1,
            fetch_max_wait_ms=int(tuning.fetch_max_wait_s * 1000),
            fetch_max_bytes=tuning.fetch_max_bytes,
            max_partition_fetch_bytes=tuning.partition_fetch_max_bytes,
            check_crcs=True,
        )
        try:
            self._connection.take_over_connecting(client_of(self._started))
            await self._start(self._started)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the group and close all sockets in a few seconds; the listener is not called."""
        self._open.clear()
        consumer, self._started, self._closed = self._started, None, True
        await self._contact.close()
        if consumer is not None:
            tuning = self._connection.tuning
            await close_consumer(consumer, tuning.leave_timeout_s, tuning.close_timeout_s)
        self._owned = frozenset()

    def _group_options(self) -> dict[str, Any]:
        return {"group_id": None}

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        async with self._request("connect"):
            await consumer.start()
        self._buffer = FetchBuffer(consumer)
        self._contact.client = client_of(consumer)

    @property
    def _consumer(self) -> AIOKafkaConsumer:
        if self._started is None:
            raise RuntimeError("the consumer is closed" if self._closed else "enter it first")
        return self._started

    # Reading

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """See the port. If a rebalance begins within a poll, the poll lasts until the rebalance
        ends.
        """
        consumer = self._consumer
        self._read_state.gaps = []
        self._raise_failure()
        try:
            if not self._open.is_set() and not await self._wait_for_assignment(consumer, timeout_s):
                self._check_health(consumer)
                return {}
            self._raise_failure()
            raise_coordination_error(consumer)
            self._set_fetch_wait(consumer)
            with count_as_polling(consumer):
                found = await take_records(
                    self._buffer, timeout_s, max_records, max_bytes, self._read_state
                )
        except KafkaError as error:
            self._handle_poll_error(consumer, error)
            return {}
        if found:
            self._note_change(consumer)  # before the next fetch, which may have been asked for
        else:
            self._check_health(consumer)
        return found

    def _set_fetch_wait(self, consumer: AIOKafkaConsumer) -> None:
        wait_s = self._fetch_wait.wait_s(time.monotonic(), is_any_paused=bool(self._paused))
        set_fetch_wait(consumer, wait_s)

    def _note_change(self, consumer: AIOKafkaConsumer) -> None:
        """Let no fetch that begins now wait long, since what is read changes."""
        self._fetch_wait.note_activity(time.monotonic())
        self._set_fetch_wait(consumer)

    def gaps(self) -> Sequence[Gap]:
        """See the port."""
        return self._read_state.gaps

    async def _wait_for_assignment(self, consumer: AIOKafkaConsumer, timeout_s: float) -> bool:
        """Wait until an assignment's listener has returned; False if the timeout passes first."""
        raise_coordination_error(consumer)  # joining may have failed for good
        # aiokafka does not rejoin unless a poll is in progress, so count this wait as polling.
        with count_as_polling(consumer):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._open.wait()
            except TimeoutError:
                return False
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure or self._contact.take_refusal(), None
        if failure is not None:
            raise failure

    def _handle_poll_error(self, consumer: AIOKafkaConsumer, error: KafkaError) -> None:
        """Handle an error of reading, or raise the port's error for it."""
        reset_polling(consumer)
        if isinstance(error, kafka_errors.NoOffsetForPartitionError):
            # Nothing is committed and the listener did not seek.
            seek_by_policy(consumer, error.args[0])
        elif isinstance(error, kafka_errors.OffsetOutOfRangeError):
            positions = {TopicPartition(*each): at for each, at in error.args[0].items()}
            text = ", ".join(f"{each} at {at}" for each, at in positions.items())
            raise OffsetOutOfRange(f"the log does not hold {text}", positions) from error
        elif not error.retriable:
            translated = in_port_words(error, "poll")
            if isinstance(translated, LogAuthenticationFailed):
                raise translated from error
            if isinstance(error, kafka_errors.InconsistentGroupProtocolError):
                raise LogRefused(
                    "the consumer group has members of another kind, and takes only those: "
                    "processes of another form, guarantee or release"
                ) from error
            # aiokafka's coordination has ended for good; only a new consumer can continue.
            raise LogRefused(str(translated)) from error

    def _check_health(self, consumer: AIOKafkaConsumer) -> None:
        """Check the state behind an empty poll, which is all that aiokafka shows of its problems.

        After a long silence, check in a task beside the polling whether the brokers refuse us.
        """
        fetching = fetching_task(consumer)
        if fetching.done():
            raise LogRefused(f"reading has ended: {fetching!r}")
        self._contact.check()

    def last_contact_s(self) -> float:
        """Return the seconds since a broker's last response of any kind (fetch, heartbeat,
        request).
        """
        return self._contact.silent_for_s()

    # Positions

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions owned, from their assignment until `on_revoked` has returned."""
        return self._owned

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port. Records already fetched from these partitions are fetched again later."""
        self._check_owned(partitions)
        self._paused.update(partitions)
        self._note_change(self._consumer)
        self._consumer.pause(*_to_aiokafka(partitions))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port."""
        self._check_owned(partitions)
        self._paused.difference_update(partitions)
        self._note_change(self._consumer)
        if self._open.is_set():
            self._consumer.resume(*_to_aiokafka(partitions))

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """See the port."""
        self._check_owned([partition])
        self._note_change(self._consumer)
        self._buffer.seek(aiokafka.TopicPartition(*partition), offset)

    async def position(self, partition: TopicPartition) -> int:
        """See the port."""
        self._check_owned([partition])
        async with self._request(f"position in {partition}"):
            position: int = await self._consumer.position(aiokafka.TopicPartition(*partition))
        return position

    def _check_owned(self, partitions: Iterable[TopicPartition]) -> None:
        not_owned = sorted(set(partitions) - self._owned)
        if not_owned:
            raise Fenced(f"not assigned: {', '.join(map(str, not_owned))}")

    # Offsets of the log

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """See the port."""
        async with self._request("beginning offsets"):
            await self._check_exist(partitions)
            found = await self._consumer.beginning_offsets(_to_aiokafka(partitions))
        return {TopicPartition(*each): offset for each, offset in found.items()}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the last stable offsets, since consumers here are `read_committed`."""
        async with self._request("end offsets"):
            await self._check_exist(partitions)
            found = await self._consumer.end_offsets(_to_aiokafka(partitions))
        return {TopicPartition(*each): offset for each, offset in found.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        """See the port."""
        # Kafka gives negative numbers a meaning of their own, and all are of 64 bits.
        wanted = {
            aiokafka.TopicPartition(*each): min(max(at, 0), _LATEST_MS)
            for each, at in timestamps_ms.items()
        }
        async with self._request("offsets for times"):
            await self._check_exist(timestamps_ms)
            found = await self._consumer.offsets_for_times(wanted)
        return {
            TopicPartition(*each): None if answer is None else answer.offset
            for each, answer in found.items()
        }

    def _request(self, what: str) -> AbstractAsyncContextManager[None]:
        return answered(what, self._connection.request_timeout_s)

    def _admin(self) -> AdminClient:
        return AdminClient(client_of(self._consumer), self._connection.tuning.request_retry_s)

    async def _check_exist(self, partitions: Collection[TopicPartition]) -> None:
        """Raise for missing partitions at once; aiokafka would look for them until its timeout."""
        known = client_of(self._consumer).cluster.partitions_for_topic
        # Topics grow: the member that assigns their partitions may have heard of it before us.
        unknown = {
            each.topic for each in partitions if each.partition not in (known(each.topic) or ())
        }
        counts = await self._admin().partition_counts(sorted(unknown))
        for each in partitions:
            if each.topic in unknown and not 0 <= each.partition < (counts[each.topic] or 0):
                raise UnknownPartition(each, counts[each.topic] or 0)


class KafkaReader(KafkaConsumer):
    """A reader of given partitions, in no group, from their ends unless it seeks."""

    def __init__(self, connection: Connection, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(connection)
        self._partitions = tuple(partitions)

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        await super()._start(consumer)
        # "The end" is the end now, not at the time of the first fetch.
        ends = await self.end_offsets(self._partitions)
        consumer.assign(_to_aiokafka(self._partitions))
        self._owned = frozenset(self._partitions)
        for partition, end in ends.items():
            self.seek(partition, end)
        self._open.set()

    @property
    def member_id(self) -> str:
        """Empty: a free reader is in no group."""
        return ""

    @property
    def membership(self) -> Membership | None:
        """None: a free reader is in no group."""
        return None

    async def is_member(self) -> bool:
        """Return False: a free reader is in no group."""
        return False

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Raise `LogRefused`: a free reader has no group to commit for."""
        raise LogRefused(f"a reader without a group cannot commit {dict(offsets)}")

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """Return None for each partition: a free reader has no group, so nothing is committed."""
        return dict.fromkeys(partitions)


class KafkaMember(KafkaConsumer):
    """A member of a consumer group that reports assignments to its listener."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        kind: str = "",
    ) -> None:
        super().__init__(connection)
        self._kind = kind
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener

    async def close(self) -> None:
        """See the base class."""
        consumer = self._started
        await super().close()
        # aiokafka forgets the id when it leaves, but not while it waits for the end of a rebalance.
        if consumer is not None and (member_id := membership_of(consumer).member_id):
            with suppress(HeadraceError):  # the group waits for the session to expire
                await self._leave(member_id)

    async def _leave(self, member_id: str) -> None:
        """Leave the group during a rebalance, which would give this member partitions: for those
        the group would wait until its session expires.
        """
        # On a connection of its own: a broker reads no further request on one that waits to join.
        tuning = self._connection.tuning
        async with answered(f"leave group {self._group}", tuning.leave_timeout_s):
            client = await self._connection.open_client()
            try:
                admin = AdminClient(client, tuning.request_retry_s)
                await admin.remove_member(self._group, member_id)
            finally:
                await self._connection.close_client(client)

    def _group_options(self) -> dict[str, Any]:
        tuning = self._connection.tuning
        session_timeout_ms = self._connection.settings.session_timeout_ms
        return {
            "group_id": self._group,
            "session_timeout_ms": session_timeout_ms,
            "heartbeat_interval_ms": session_timeout_ms // 10,
            "rebalance_timeout_ms": int(tuning.rebalance_timeout_s * 1000),
            "max_poll_interval_ms": int(tuning.max_poll_interval_s * 1000),
            "partition_assignment_strategy": (_make_assignor(self._kind),),
        }

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        await super()._start(consumer)
        # Subscribe only now: a consumer that starts with topics waits for the whole rebalance.
        consumer.subscribe(self._topics, listener=_ListenerAdapter(self))

    async def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Called by aiokafka when the partitions are ours, before any of them has a position."""
        if self._closed:
            return
        consumer = self._consumer
        self._note_change(consumer)
        # Pause first: nothing may be read before the listener has returned.
        consumer.pause(*_to_aiokafka(partitions))
        self._paused.clear()
        self._owned = frozenset(partitions)
        try:
            await self._listener.on_assigned(partitions)
        except Exception as error:  # noqa: BLE001  # aiokafka would log it; poll raises it instead
            self._failure = error
        else:
            # A newer rebalance cannot have started: aiokafka awaits this call.
            consumer.resume(*_to_aiokafka(set(partitions) - self._paused))
        self._open.set()

    async def revoked(self) -> None:
        """Called by aiokafka before it rejoins; all our partitions are revoked."""
        # Close the gate before the listener runs: polls return none of these partitions any more.
        self._open.clear()
        try:
            if self._owned and not self._closed:
                await self._listener.on_revoked(sorted(self._owned))
        except Exception as error:  # noqa: BLE001  # aiokafka would log it; poll raises it instead
            self._failure = error
        finally:
            self._owned = frozenset()

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit in the current generation, within the deadline.

        Partitions of topics that the member does not subscribe to can be committed as well: the
        broker checks only the membership.
        """
        if not offsets:
            return
        consumer = self._consumer
        generation = membership_of(consumer).generation
        what = f"commit for group {self._group}"
        lost = sorted(each for each in offsets if self._is_lost(each))
        if lost:
            raise Fenced(f"{what}: not assigned: {', '.join(map(str, lost))}")
        async with self._request(what):
            while True:
                await find_coordinator(consumer)
                # After it lost its membership, aiokafka commits as if it were in no group, which a
                # broker accepts once the group is empty.
                if generation < 0 or membership_of(consumer).generation != generation:
                    raise Fenced(f"{what}: no longer a member of this generation")
                try:
                    await commit_once(consumer, offsets)
                except KafkaError as error:
                    if not error.retriable:
                        raise
                else:
                    return
                await asyncio.sleep(self._connection.tuning.request_retry_s)

    def _is_lost(self, partition: TopicPartition) -> bool:
        return partition.topic in self._topics and partition not in self._owned

    @property
    def member_id(self) -> str:
        """See the port."""
        return membership_of(self._consumer).member_id

    @property
    def membership(self) -> Membership | None:
        """See the port."""
        membership = membership_of(self._consumer)
        return membership if membership.generation >= 0 else None

    async def is_member(self) -> bool:
        """See the port. Returns False without a request if aiokafka already knows that we are no
        member.
        """
        consumer = self._consumer
        generation, member_id = membership_of(consumer)
        if generation < 0:
            return False
        async with self._request(f"membership in group {self._group}"):
            is_member = await self._admin().is_member(self._group, generation, member_id)
        return is_member and membership_of(consumer).generation == generation

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """See the port."""
        # Shorter than the request's deadline, so that its error says what was waited for.
        stable_timeout_s = min(
            self._connection.tuning.stable_offsets_timeout_s,
            self._connection.request_timeout_s / 2,
        )
        async with self._request(f"committed offsets of group {self._group}"):
            return await self._admin().fetch_committed(self._group, partitions, stable_timeout_s)


def _make_assignor(kind: str) -> Any:
    """Return the assignor for a kind of member; a kind of its own keeps it apart from other kinds.

    A coordinator refuses a member that supports none of the protocols common to the others. Every
    rebalance revokes everything, so a sticky assignment would save nothing.
    """
    if not kind:
        return RoundRobinPartitionAssignor

    class Assignor(RoundRobinPartitionAssignor):  # type: ignore[misc]  # aiokafka publishes no types
        name = kind

    return Assignor


class _ListenerAdapter(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka publishes no types
    def __init__(self, member: KafkaMember) -> None:
        self._member = member

    async def on_partitions_assigned(self, assigned: Iterable[aiokafka.TopicPartition]) -> None:
        await self._member.assigned(sorted(TopicPartition(*each) for each in assigned))

    async def on_partitions_revoked(self, revoked: Iterable[aiokafka.TopicPartition]) -> None:
        await self._member.revoked()


def _to_aiokafka(partitions: Iterable[TopicPartition]) -> list[aiokafka.TopicPartition]:
    """Convert to aiokafka's own type, which it requires although both are the same tuple."""
    return [aiokafka.TopicPartition(*each) for each in partitions]
