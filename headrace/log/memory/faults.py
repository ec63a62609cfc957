"""Fault injection for the embedded log: tests switch faults on, without any waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto

from headrace.errors import Code
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable, NoLeader
from headrace.log.memory.broker import Topics
from headrace.log.memory.group import Group
from headrace.log.memory.transactions import Transactions
from headrace.log.port import Committed, TopicPartition


class Faults:
    """The faults of one embedded log, grouped by what is faulted. Each takes effect at once.

    Args:
        topics: the log's topics.
        groups: the log's consumer groups, by name.
        transactions: the log's transactions.
        request_timeout_s: how long a request hangs when the broker does not answer.

    Attributes:
        brokers: an outage of all brokers.
        acknowledgements: those of records sent without a transaction.
        transactions: their outcomes and their offsets.
        groups: members, sessions, and committed offsets.
        topics: access rules, leaders and settings; topics deleted or created again.
        partitions: records lost, offsets skipped, batches that cannot be read.
    """

    def __init__(
        self,
        topics: Topics,
        groups: Mapping[str, Group],
        transactions: Transactions,
        request_timeout_s: float,
    ) -> None:
        self.brokers = BrokerFaults(request_timeout_s)
        self.acknowledgements = AcknowledgementFaults()
        self.transactions = TransactionFaults(transactions, request_timeout_s)
        self.groups = GroupFaults(groups, self.brokers, request_timeout_s)
        self.topics = TopicFaults(topics, groups)
        self.partitions = PartitionFaults(topics)


class BrokerFaults:
    """An outage of all brokers: requests fail or hang, and sends are postponed.

    Args:
        request_timeout_s: how long a request hangs when the broker does not answer.
    """

    def __init__(self, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._hangs = False
        self._to_fail = 0
        self._down_since: float | None = None
        self._up = asyncio.Event()
        self._up.set()
        self._watchers: set[Callable[[], None]] = set()
        self._postponed: dict[asyncio.Future[None], Callable[[], None]] = {}

    def take_down(self, *, hang: bool = False) -> None:
        """Stop all brokers: polls return nothing, and groups do not rebalance.

        Requests fail at once with `LogUnavailable`. With `hang` they fail only at the request
        timeout, and succeed if the broker comes back before.
        """
        self._hangs = hang
        self._up.clear()
        self._down_since = asyncio.get_running_loop().time()

    def bring_back(self) -> None:
        """Restart the broker; hanging sends are written in their order."""
        self._up.set()
        self._down_since = None
        postponed, self._postponed = self._postponed, {}
        for future, write in postponed.items():
            if not future.done():
                write()
                future.set_result(None)
        for wake in self._watchers:
            wake()

    def fail_requests(self, requests: int) -> None:
        """Fail the next requests with `LogUnavailable`, as lost connections do.

        Polls and sends go on: they use connections of their own.
        """
        self._to_fail = requests

    @property
    def requests_to_fail(self) -> int:
        """Number of requests that `fail_requests` will still fail."""
        return self._to_fail

    # Queries of the log's other modules

    @property
    def is_down(self) -> bool:
        return not self._up.is_set()

    def down_for_s(self) -> float:
        """Return for how long no broker has answered; 0.0 if it answers."""
        if self._down_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._down_since

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the broker comes back, until `unwatch`."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        self._watchers.discard(wake)

    async def until_up(self) -> None:
        """Wait for the broker forever, as background tasks of a client do."""
        await self._up.wait()

    async def answered(self, timeout_s: float | None = None) -> None:
        """Wait until the broker answers; every request calls this.

        Raises:
            LogUnavailable: it does not, within the given time or the request timeout.
        """
        if self._to_fail:
            self._to_fail -= 1
            raise LogUnavailable("the connection was lost")
        if not self.is_down:
            return
        if self._hangs:
            within_s = self._request_timeout_s if timeout_s is None else timeout_s
            await _passed(self._up, min(within_s, self._request_timeout_s))
        else:
            raise LogUnavailable("the embedded log was made unavailable")

    def postpone(self, write: Callable[[], None]) -> asyncio.Future[None]:
        """Return the acknowledgement of a run that was sent while no broker answers."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._hangs:
            self._postponed[future] = write
            timer = loop.call_later(self._request_timeout_s, self.give_up, future)
            future.add_done_callback(lambda _: timer.cancel())
        else:
            future.set_exception(LogUnavailable("the embedded log was made unavailable"))
        return future

    def give_up(self, future: asyncio.Future[None]) -> None:
        """Fail a postponed run, which is then not written."""
        self._postponed.pop(future, None)
        if not future.done():
            future.set_exception(LogUnavailable("no acknowledgement within the request timeout"))


class AcknowledgementFaults:
    """Acknowledgements that come late or never, of records that are written."""

    def __init__(self) -> None:
        self._held: list[asyncio.Future[None]] | None = None
        self._to_lose = 0

    def hold(self) -> None:
        """Write records, but acknowledge none until `release`."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for future in held:
            if not future.done():
                future.set_result(None)

    def lose(self, runs: int) -> None:
        """Write the next runs, but fail them with `LogUnavailable`."""
        self._to_lose = runs

    # For producers

    def next(self) -> asyncio.Future[None]:
        """Return the acknowledgement of a run that has just been written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._to_lose:
            self._to_lose -= 1
            future.set_exception(LogUnavailable("the acknowledgement was lost"))
        elif self._held is not None:
            self._held.append(future)
        else:
            future.set_result(None)
        return future


class TransactionFault(Enum):
    """The outcome of one transaction, after its records and offsets were written."""

    UNKNOWN_BUT_COMMITTED = auto()
    """It commits, and its caller gets `LogUnavailable`."""
    UNKNOWN_AND_OPEN = auto()
    """It stays open until a successor enters, and its caller gets `LogUnavailable`."""
    TIMED_OUT = auto()
    """The broker aborts it for taking too long, and its caller gets `Fenced`."""


class TransactionFaults:
    """Transactions that fail, hang or time out, and offsets that show late.

    Args:
        transactions: the log's transactions.
        request_timeout_s: how long a held transaction hangs.
    """

    def __init__(self, transactions: Transactions, request_timeout_s: float) -> None:
        self._transactions = transactions
        self._request_timeout_s = request_timeout_s
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._holds_entries = False
        self._entries: list[asyncio.Future[None]] = []
        self._outcomes: deque[TransactionFault] = deque()
        self._limit_bytes: int | None = None

    def fail(self, *faults: TransactionFault) -> None:
        """Give the next transactions these outcomes, in order; later ones succeed."""
        self._outcomes.extend(faults)

    def hold(self) -> None:
        """Keep transactions open, with all records written, until `release`."""
        self._allowed.clear()

    def release_held(self) -> None:
        """Let the transactions end that are held now, and hold those that come after them."""
        held, self._allowed = self._allowed, asyncio.Event()
        held.set()

    def release(self) -> None:
        """Undo `hold`, `hold_writes` and `hold_entries`."""
        self._allowed.set()
        self._writable.set()
        self._holds_entries = False
        while self.waiting_entries:
            self.release_entry()

    def hold_writes(self) -> None:
        """Keep transactions that begin from now on from writing anything, until `release`."""
        self._writable.clear()

    def hold_entries(self) -> None:
        """Let producers wait where they enter, until `release_entry` or `release`."""
        self._holds_entries = True

    @property
    def waiting_entries(self) -> int:
        """Number of producers that wait to enter."""
        return sum(not each.done() for each in self._entries)

    def release_entry(self, *, fails: bool = False) -> None:
        """Let the producer enter that has waited longest, or fail with `LogUnavailable`."""
        entry = next(each for each in self._entries if not each.done())
        if fails:
            entry.set_exception(LogUnavailable("no coordinator"))
        else:
            entry.set_result(None)

    def slow_down(self, limit_bytes: int | None) -> None:
        """Make transactions that write more bytes than this time out, as a producer quota does.

        They stay open until a successor enters, and their callers get `TransactionTimedOut`, at
        once. None undoes it.
        """
        self._limit_bytes = limit_bytes

    def time_out(self, transactional_id: str) -> None:
        """Abort the open transaction of an id, as a broker does after the transaction timeout."""
        self._transactions.time_out(transactional_id)

    def entered_producers(self, transactional_id: str) -> int:
        """Return how many transactional producers of an id have entered, each fencing the last."""
        return self._transactions.entered(transactional_id)

    def open(self) -> Mapping[str, Mapping[TopicPartition, Committed]]:
        """Return the offsets that each open transaction will commit, by transactional id."""
        return self._transactions.open_offsets()

    def let_offsets_lag(self) -> None:
        """Show offsets committed by later transactions only once their producer has a successor.

        Kafka does so for some milliseconds, while it writes the markers.
        """
        self._transactions.offsets_lag = True

    def let_offsets_catch_up(self) -> None:
        """Undo `let_offsets_lag`."""
        self._transactions.offsets_lag = False
        self._transactions.show_all_offsets()

    # For transactional producers

    async def may_enter(self) -> None:
        """Wait while entries are held."""
        if self._holds_entries:
            entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._entries.append(entry)
            await entry

    async def writable(self) -> None:
        """Wait while writes are held, up to the request timeout."""
        await _passed(self._writable, self._request_timeout_s)

    async def allowed(self) -> None:
        """Wait while transactions are held, up to the request timeout."""
        await _passed(self._allowed, self._request_timeout_s)

    def is_too_slow(self, size_bytes: int) -> bool:
        """Return whether a transaction that writes this much does not end in time."""
        return self._limit_bytes is not None and size_bytes > self._limit_bytes

    def next(self) -> TransactionFault | None:
        """Return the fault, if any, of the transaction that is about to commit."""
        return self._outcomes.popleft() if self._outcomes else None


class GroupFaults:
    """Members evicted, rebalances forced, and commits held or forgotten.

    Args:
        groups: the log's consumer groups, by name.
        brokers: the brokers that answer commits.
        request_timeout_s: how long a held commit hangs.
    """

    def __init__(
        self, groups: Mapping[str, Group], brokers: BrokerFaults, request_timeout_s: float
    ) -> None:
        self._groups = groups
        self._brokers = brokers
        self._request_timeout_s = request_timeout_s
        self._held_commits = 0
        self._commits_flow = asyncio.Event()
        self._commits_flow.set()

    def members(self, group: str) -> Sequence[str]:
        """Return the member ids of a group, in the order in which they joined."""
        return self._groups[group].members if group in self._groups else ()

    def expire_session(self, group: str, member_id: str, *, noticed: bool = True) -> None:
        """Evict a member, as the coordinator does when its heartbeats have stopped.

        Unless `noticed`, the member continues with its partitions, as a stalled process does, until
        one of its commits is refused.
        """
        now = asyncio.get_running_loop().time()
        self._groups[group].evict(member_id, now, noticed=noticed)

    def force_rebalance(self, group: str) -> None:
        """Make every member give up its partitions and join again."""
        self._groups[group].rebalance(asyncio.get_running_loop().time())

    def is_rebalancing(self, group: str) -> bool:
        """Return whether the group waits for a member to give up its partitions and rejoin."""
        return group in self._groups and self._groups[group].deadline is not None

    def hold_commits(self) -> None:
        """Answer no commit until `release_commits`; commits are checked only then."""
        self._commits_flow.clear()

    def release_commits(self) -> None:
        self._commits_flow.set()

    @property
    def held_commits(self) -> int:
        """Number of commits that wait for `release_commits`."""
        return self._held_commits

    def forget_commits(self, group: str) -> None:
        """Forget a group's committed offsets, as a broker does when they expire."""
        self._groups[group].committed.clear()

    # For members

    async def commit_answered(self) -> None:
        """Wait as `BrokerFaults.answered` does, for a commit."""
        self._held_commits += 1
        try:
            await _passed(self._commits_flow, self._request_timeout_s)
        finally:
            self._held_commits -= 1
        await self._brokers.answered()


class TopicFaults:
    """Topics that are forbidden, without leaders, deleted, or created again.

    Args:
        topics: the log's topics.
        groups: the log's consumer groups, by name, whose offsets go with a topic.
    """

    def __init__(self, topics: Topics, groups: Mapping[str, Group]) -> None:
        self._topics = topics
        self._groups = groups
        self._forbidden: dict[str, bool] = {}
        self._unreadable: set[str] = set()
        self._held_descriptions: dict[str, asyncio.Event] = {}
        self._leaderless: set[str] = set()
        self._unannounced: set[str] = set()

    def forbid(self, topic: str, *, hidden: bool = False) -> None:
        """Forbid producers to write to a topic, as access rules do, until `allow`.

        If `hidden`, they cannot see its partitions either.
        """
        self._forbidden[topic] = hidden

    def allow(self, topic: str) -> None:
        """Undo `forbid` and `forbid_reading`."""
        self._forbidden.pop(topic, None)
        self._unreadable.discard(topic)

    def forbid_reading(self, topic: str) -> None:
        """Forbid consumers to read a topic, as revoked access rules do.

        Polls of those that read it, pending ones included, raise `LogAuthenticationFailed`,
        until `allow`.
        """
        self._unreadable.add(topic)
        stored = self._topics.find(topic)
        for partition in stored.partitions if stored is not None else ():
            partition.wake()

    def hold_descriptions(self, topic: str) -> None:
        """Answer no producer that asks for a topic's partitions, until `release_descriptions`."""
        self._held_descriptions[topic] = asyncio.Event()

    def release_descriptions(self, topic: str) -> None:
        """Answer those that asked meanwhile."""
        self._held_descriptions.pop(topic).set()

    def take_leaders(self, topic: str) -> None:
        """Remove the leaders of a topic's partitions: sends to them fail, until `elect`."""
        self._leaderless.add(topic)

    def elect(self, topic: str) -> None:
        """Undo `take_leaders`."""
        self._leaderless.discard(topic)

    def keep_limits_from_producers(self, topic: str) -> None:
        """Refuse unacceptable records of a topic only when a transaction writes them.

        The same happens if a topic's settings were changed a moment ago.
        """
        self._unannounced.add(topic)

    def delete(self, topic: str) -> None:
        """Delete a topic and the offsets that groups have committed for it."""
        self._topics.delete(topic)
        self._forget_commits_for(topic)

    def replace(self, topic: str) -> None:
        """Delete a topic and create it again, before any of its readers notices."""
        self._topics.replace(topic)
        self._forget_commits_for(topic)

    def _forget_commits_for(self, topic: str) -> None:
        for group in self._groups.values():
            for partition in [each for each in group.committed if each.topic == topic]:
                del group.committed[partition]

    # For consumers

    def require_readable(self, partitions: Iterable[TopicPartition]) -> None:
        """Raise `LogAuthenticationFailed` if one of the partitions may not be read."""
        for partition in partitions:
            if partition.topic in self._unreadable:
                raise LogAuthenticationFailed(f"not allowed to read {partition.topic}")

    # For producers

    async def described(self, topic: str, timeout_s: float) -> None:
        """Wait while descriptions of the topic are held. Raises `LogUnavailable`."""
        held = self._held_descriptions.get(topic)
        if held is not None:
            await _passed(held, timeout_s)

    def is_forbidden(self, topic: str) -> bool:
        """Return whether producers may not write to the topic."""
        return topic in self._forbidden

    def is_hidden(self, topic: str) -> bool:
        """Return whether producers may not describe the topic."""
        return self._forbidden.get(topic, False)

    def require_leader(self, partition: TopicPartition) -> None:
        """Raise `NoLeader` if the partition has none."""
        if partition.topic in self._leaderless:
            raise NoLeader(partition)

    def knows_limits(self, topic: str) -> bool:
        """Return whether producers know the topic's limits before they write to it."""
        return topic not in self._unannounced


class PartitionFaults:
    """Records that are lost, offsets that are skipped, and batches that cannot be read.

    Args:
        topics: the log's topics.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Drop the records below an offset, as retention does."""
        self._topics.partition(partition).trim(before_offset)

    def truncate(self, partition: TopicPartition, end_offset: int) -> None:
        """Lose the records from an offset on, as an unclean leader election does."""
        self._topics.partition(partition).truncate(end_offset)

    def end_offset(self, partition: TopicPartition) -> int:
        """Return the offset that the partition's next record gets, open transactions included."""
        return self._topics.partition(partition).end

    def skip_offsets(self, partition: TopicPartition, offsets: int) -> None:
        """Leave a gap at the end of a partition, as transaction markers and compaction do."""
        self._topics.partition(partition).skip(offsets)

    def write_unreadable(
        self,
        partition: TopicPartition,
        offsets: int,
        *,
        code: str = Code.INVALID_REQUEST,
        reason: str = "made unreadable",
    ) -> None:
        """Append a batch that cannot be read to a partition, as a client may on Kafka."""
        self._topics.partition(partition).write_unreadable(offsets, code, reason)


async def _passed(gate: asyncio.Event, timeout_s: float) -> None:
    if gate.is_set():
        return
    try:
        async with asyncio.timeout(timeout_s):
            await gate.wait()
    except TimeoutError:
        raise LogUnavailable(f"no answer within {timeout_s} s") from None
