"""What tests make the embedded log suffer, on demand and without any waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from headrace.errors import Code
from headrace.log.errors import LogUnavailable, NoLeader
from headrace.log.memory.group import Group
from headrace.log.memory.topics import Topics
from headrace.log.memory.transactions import Transactions
from headrace.log.port import TopicPartition


class SealFault(Enum):
    """How one seal ends, after its records and offsets were written."""

    UNKNOWN_BUT_COMMITTED = auto()
    """It commits, and its caller is told `LogUnavailable`."""
    UNKNOWN_AND_OPEN = auto()
    """It stays open until a successor enters, and its caller is told `LogUnavailable`."""
    TIMED_OUT = auto()
    """The broker aborts it for taking too long, and its caller is told `Fenced`."""


class Faults:
    """The switches of one embedded log. All of them take effect at once.

    Args:
        topics: the log's topics.
        groups: the log's consumer groups, by name.
        transactions: the log's transactions.
        request_timeout_s: how long a request hangs when the broker does not answer.
    """

    def __init__(
        self,
        topics: Topics,
        groups: Mapping[str, Group],
        transactions: Transactions,
        request_timeout_s: float,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._transactions = transactions
        self._request_timeout_s = request_timeout_s
        self._hangs = False
        self._down_since: float | None = None
        self._up = asyncio.Event()
        self._up.set()
        self._watchers: set[Callable[[], None]] = set()
        self._postponed: dict[asyncio.Future[None], Callable[[], None]] = {}
        self._commits_flow = asyncio.Event()
        self._commits_flow.set()
        self._seals_flow = asyncio.Event()
        self._seals_flow.set()
        self._seal_faults: deque[SealFault] = deque()
        self._held: list[asyncio.Future[None]] | None = None
        self._acknowledgements_to_lose = 0
        self._forbidden: dict[str, bool] = {}
        self._leaderless: set[str] = set()
        self._unannounced: set[str] = set()
        self._transaction_bytes: int | None = None

    # The switches.

    def take_down(self, *, hang: bool = False) -> None:
        """No broker answers any more: readers see silence, groups stand still.

        What is asked fails at once with `LogUnavailable`. With `hang` it does so at the request
        timeout only, and what is sent or asked until then succeeds if the broker comes back.
        """
        self._hangs = hang
        self._up.clear()
        self._down_since = asyncio.get_running_loop().time()

    def bring_back(self) -> None:
        """The broker answers again; what was sent and hung is written, in its order."""
        self._up.set()
        self._down_since = None
        postponed, self._postponed = self._postponed, {}
        for future, write in postponed.items():
            if not future.done():
                write()
                future.set_result(None)
        for wake in self._watchers:
            wake()

    def forbid(self, topic: str, *, hidden: bool = False) -> None:
        """Let producers write no more to a topic, as access rules do, until `allow`.

        Where it is `hidden` they are not told of its partitions either.
        """
        self._forbidden[topic] = hidden

    def allow(self, topic: str) -> None:
        """Undo `forbid`."""
        self._forbidden.pop(topic, None)

    def take_leaders(self, topic: str) -> None:
        """Leave a topic's partitions without leaders: what is sent there fails, until `elect`."""
        self._leaderless.add(topic)

    def elect(self, topic: str) -> None:
        """Undo `take_leaders`."""
        self._leaderless.discard(topic)

    def hold_acknowledgements(self) -> None:
        """Write what is sent, but tell nobody until `release_acknowledgements`."""
        self._held = []

    def release_acknowledgements(self) -> None:
        held, self._held = self._held or [], None
        for future in held:
            if not future.done():
                future.set_result(None)

    def lose_acknowledgements(self, runs: int) -> None:
        """Write the next runs, and tell their senders `LogUnavailable`."""
        self._acknowledgements_to_lose = runs

    def hold_commits(self) -> None:
        """Answer no commit until `release_commits`; what it says is judged then."""
        self._commits_flow.clear()

    def release_commits(self) -> None:
        self._commits_flow.set()

    def spoil_seals(self, *faults: SealFault) -> None:
        """Let the next seals end like this, one after the other; those after them end well."""
        self._seal_faults.extend(faults)

    def hold_seals(self) -> None:
        """Keep transactions open, with all that they wrote, until `release_seals`."""
        self._seals_flow.clear()

    def release_seals(self) -> None:
        self._seals_flow.set()

    def slow_down_transactions(self, limit_bytes: int | None) -> None:
        """Let transactions that write more bytes than this time out, as a producer quota does.

        They stay open until a successor enters, and their callers get `TransactionTimedOut`, at
        once. None undoes it.
        """
        self._transaction_bytes = limit_bytes

    def keep_limits_from_producers(self, topic: str) -> None:
        """Refuse what a topic does not take only once it is written in a transaction.

        So it is when a topic's settings were changed a moment ago.
        """
        self._unannounced.add(topic)

    def entered_producers(self, transactional_id: str) -> int:
        """How many transactional producers of an id have been entered, and so fenced the last."""
        return self._transactions.entered(transactional_id)

    def time_out_transaction(self, transactional_id: str) -> None:
        """Abort the open transaction of an id, as a broker does after the transaction timeout."""
        self._transactions.time_out(transactional_id)

    def let_offsets_lag(self) -> None:
        """Show what is sealed from now on as committed only once its producer has a successor.

        Kafka does so for some milliseconds, while it writes the markers.
        """
        self._transactions.offsets_lag = True

    def let_offsets_catch_up(self) -> None:
        """Undo `let_offsets_lag`."""
        self._transactions.offsets_lag = False
        self._transactions.show_all_offsets()

    def members(self, group: str) -> Sequence[str]:
        """The member ids of a group, in the order in which they joined."""
        return self._groups[group].members if group in self._groups else ()

    def expire_session(self, group: str, member_id: str, *, noticed: bool = True) -> None:
        """The coordinator evicts a member, as one whose heartbeats have stopped.

        Unless `noticed`, the member goes on with what it had, as a stalled process does, until
        a commit of its is refused.
        """
        now = asyncio.get_running_loop().time()
        self._groups[group].evict(member_id, now, noticed=noticed)

    def force_rebalance(self, group: str) -> None:
        """Make every member give up its partitions and join again."""
        self._groups[group].rebalance(asyncio.get_running_loop().time())

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Drop the records below an offset, as retention does."""
        self._topics.partition(partition).trim(before_offset)

    def truncate(self, partition: TopicPartition, end_offset: int) -> None:
        """Lose the records from an offset on, as the election of a leader not in sync does."""
        self._topics.partition(partition).truncate(end_offset)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, and what groups have committed for it."""
        self._topics.delete(topic)
        self._forget_commits_for(topic)

    def replace_topic(self, topic: str) -> None:
        """Delete a topic and make it anew, quicker than any of its readers looks."""
        self._topics.replace(topic)
        self._forget_commits_for(topic)

    def _forget_commits_for(self, topic: str) -> None:
        for group in self._groups.values():
            for partition in [each for each in group.committed if each.topic == topic]:
                del group.committed[partition]

    def forget_commits(self, group: str) -> None:
        """Forget what a group has committed, as a broker does of what it no longer retains."""
        self._groups[group].committed.clear()

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
        """Put a batch that cannot be read at the end of a partition, as a client may on Kafka."""
        self._topics.partition(partition).write_unreadable(offsets, code, reason)

    # What the faces ask.

    @property
    def is_down(self) -> bool:
        return not self._up.is_set()

    def is_forbidden(self, topic: str) -> bool:
        """Whether producers may not write to the topic."""
        return topic in self._forbidden

    def is_hidden(self, topic: str) -> bool:
        """Whether producers may not even know of the topic."""
        return self._forbidden.get(topic, False)

    def require_leader(self, partition: TopicPartition) -> None:
        """Raises `NoLeader` where the partition has none."""
        if partition.topic in self._leaderless:
            raise NoLeader(partition)

    def is_too_slow(self, size_bytes: int) -> bool:
        """Whether a transaction that writes so much does not end in time."""
        return self._transaction_bytes is not None and size_bytes > self._transaction_bytes

    def knows_limits(self, topic: str) -> bool:
        """Whether producers know what the topic takes before they write to it."""
        return topic not in self._unannounced

    def down_for_s(self) -> float:
        """For how long no broker has answered; 0.0 when it does."""
        if self._down_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._down_since

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the broker comes back, until `unwatch`."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        self._watchers.discard(wake)

    async def until_up(self) -> None:
        """Wait for the broker for ever, as background tasks of a client do."""
        await self._up.wait()

    async def answered(self, timeout_s: float | None = None) -> None:
        """What every request goes through: returns once the broker answers.

        Raises:
            LogUnavailable: it does not, within the given time or the request timeout.
        """
        if not self.is_down:
            return
        if self._hangs:
            within_s = self._request_timeout_s if timeout_s is None else timeout_s
            await _passed(self._up, min(within_s, self._request_timeout_s))
        else:
            raise LogUnavailable("the embedded log was made unavailable")

    async def commit_answered(self) -> None:
        """`answered`, for a commit."""
        await _passed(self._commits_flow, self._request_timeout_s)
        await self.answered()

    async def seals_flow(self) -> None:
        """Wait as long as seals are held, up to the request timeout."""
        await _passed(self._seals_flow, self._request_timeout_s)

    def next_seal_fault(self) -> SealFault | None:
        """What is to go wrong with the seal that is about to commit."""
        return self._seal_faults.popleft() if self._seal_faults else None

    def postpone(self, write: Callable[[], None]) -> asyncio.Future[None]:
        """The acknowledgement of a run that was sent while no broker answers."""
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
        """Fail a postponed run, which is not written then."""
        self._postponed.pop(future, None)
        if not future.done():
            future.set_exception(LogUnavailable("no acknowledgement within the request timeout"))

    def acknowledgement(self) -> asyncio.Future[None]:
        """The acknowledgement of a run that has just been written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._acknowledgements_to_lose:
            self._acknowledgements_to_lose -= 1
            future.set_exception(LogUnavailable("the acknowledgement was lost"))
        elif self._held is not None:
            self._held.append(future)
        else:
            future.set_result(None)
        return future


async def _passed(gate: asyncio.Event, timeout_s: float) -> None:
    if gate.is_set():
        return
    try:
        async with asyncio.timeout(timeout_s):
            await gate.wait()
    except TimeoutError:
        raise LogUnavailable(f"no answer within {timeout_s} s") from None
