"""One consumer group: members, generations, committed offsets, and those of open transactions.

The rules of Kafka's classic protocol with eager rebalances. Whenever members or topics change,
every member must give up all its partitions and join again; once all have, or the rebalance timeout
has evicted the others, a new generation starts with a new assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.log.errors import Fenced, LogRefused
from headrace.log.port import Committed, Membership, TopicPartition

MAX_METADATA_CHARACTERS = 4096  # Kafka's offset.metadata.max.bytes, which counts characters

Shares: TypeAlias = dict[str, list[TopicPartition]]


@dataclass(slots=True)
class _Member:
    topics: tuple[str, ...]
    kind: str
    notify: Callable[[], None]
    joined: bool = False  # in the rebalance that is under way
    share: frozenset[TopicPartition] = field(default_factory=frozenset)


class Group:
    """The state of one group.

    `notify` wakes a member when something may have changed for it; the member then queries the
    group.

    Args:
        count: the number of partitions of a topic; 0 if there is none.
        rebalance_timeout_s: how long members have to join again. `now` and deadlines are on one
            monotonic clock, in seconds.
    """

    def __init__(self, count: Callable[[str], int], rebalance_timeout_s: float) -> None:
        self.generation = 0
        self.deadline: float | None = None  # of the rebalance in progress; None if there is none
        self.committed: dict[TopicPartition, Committed] = {}
        self._writes = 0
        self._written: dict[TopicPartition, int] = {}  # the number of the write that is committed
        self._pending: dict[Hashable, list[tuple[int, Mapping[TopicPartition, Committed]]]] = {}
        self._stable_watchers: set[Callable[[], None]] = set()
        self._count = count
        self._rebalance_timeout_s = rebalance_timeout_s
        self._members: dict[str, _Member] = {}
        self._joins = 0

    @property
    def members(self) -> Sequence[str]:
        """The ids of the members, in the order in which they joined."""
        return tuple(self._members)

    def join(
        self,
        member_id: str | None,
        subscription: tuple[Sequence[str], str],
        notify: Callable[[], None],
        now: float,
    ) -> str:
        """Join, or rejoin in a rebalance; an evicted member gets a new id.

        Args:
            member_id: None at first.
            subscription: the topics that it reads, and its kind.
            notify: see above.
            now: see above.

        Raises:
            LogRefused: the group has members of another kind.
        """
        self.expire(now)
        topics, kind = subscription
        if any(each.kind != kind for each in self._members.values()):
            raise LogRefused(
                "the consumer group has members of another kind, and takes only those: "
                "processes of another form, guarantee or release"
            )
        self._begin(now)
        if member_id is None or member_id not in self._members:
            self._joins += 1
            member_id = f"member-{self._joins:06d}"
            self._members[member_id] = _Member(tuple(topics), kind, notify)
        self._members[member_id].joined = True
        self._complete_when_all_joined()
        return member_id

    def leave(self, member_id: str, now: float) -> None:
        """Leave for good: the others rebalance. Does nothing if it is no longer a member."""
        if self._members.pop(member_id, None) is None:
            return
        self.rebalance(now)

    def evict(self, member_id: str, now: float, *, noticed: bool = True) -> None:
        """End a member's session; unless `noticed`, the member is not notified."""
        member = self._members.get(member_id)
        self.leave(member_id, now)
        if member is not None and noticed:
            member.notify()

    def rebalance(self, now: float) -> None:
        """Require every member to rejoin."""
        self._begin(now)
        self._complete_when_all_joined()

    def topic_created(self, name: str, now: float) -> None:
        """Rebalance if a member subscribes to it."""
        if any(name in member.topics for member in self._members.values()):
            self.rebalance(now)

    def expire(self, now: float) -> None:
        """Evict the members that have not rejoined, if the rebalance timeout has passed."""
        if self.deadline is None or now < self.deadline:
            return
        late = [name for name, member in self._members.items() if not member.joined]
        evicted = [self._members.pop(name) for name in late]
        self._complete_when_all_joined()
        for member in evicted:
            member.notify()

    def is_joining(self, member_id: str) -> bool:
        """Return whether a member has joined a rebalance and waits for the others."""
        member = self._members.get(member_id)
        return member is not None and member.joined

    def must_rejoin(self, member_id: str) -> bool:
        """Return whether a member has to give up its partitions and rejoin."""
        member = self._members.get(member_id)
        return member is None or (self.deadline is not None and not member.joined)

    def counts_in(self, member_id: str, generation: int, now: float) -> bool:
        """Return whether a member belongs to the group, in the generation that it believes
        current.
        """
        self.expire(now)
        return member_id in self._members and generation == self.generation

    def share(self, member_id: str) -> frozenset[TopicPartition]:
        """Return the partitions that the current generation assigns to a member."""
        return self._members[member_id].share

    def commit(
        self,
        member_id: str,
        generation: int,
        offsets: Mapping[TopicPartition, Committed],
        now: float,
    ) -> None:
        """Commit for a member; allowed until it has joined the next rebalance.

        As on Kafka, a member may commit for topics that it does not subscribe to: only the
        membership is checked.

        Raises:
            Fenced: it is no longer a member, its generation is over, or a partition of a topic that
                it subscribes to is not assigned to it.
            LogRefused: an offset's metadata is longer than Kafka accepts.
        """
        self.expire(now)
        require_short_metadata(offsets)
        member = self._members.get(member_id)
        if member is None:
            raise Fenced(f"{member_id} is no member any more: its session was lost")
        if generation != self.generation or member.joined:
            raise Fenced(f"generation {generation} of {member_id} is over")
        strangers = sorted(
            each for each in offsets.keys() - member.share if each.topic in member.topics
        )
        if strangers:
            raise Fenced(f"not assigned to {member_id}: {', '.join(map(str, strangers))}")
        self._commit(offsets, self._next_write())

    def commit_without_members(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for a group without members; raises as `commit` does."""
        require_short_metadata(offsets)
        if self._members:
            raise Fenced("the group has members, and only they may commit")
        self._commit(offsets, self._next_write())

    # Offsets of transactions

    def stage(
        self,
        transaction: Hashable,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None,
        now: float,
    ) -> None:
        """Add offsets to a transaction; they are pending until it ends.

        Raises:
            Fenced: the membership's generation is over.
            LogRefused: an offset's metadata is longer than Kafka accepts.
        """
        require_short_metadata(offsets)
        if membership is not None and not self.counts_in(
            membership.member_id, membership.generation, now
        ):
            raise Fenced(f"generation {membership.generation} of {membership.member_id} is over")
        self._pending.setdefault(transaction, []).append((self._next_write(), offsets))

    def end_transaction(self, transaction: Hashable, *, commit: bool) -> None:
        """Commit a transaction's offsets, or drop them."""
        for write, offsets in self._pending.pop(transaction, ()):
            if commit:
                self._commit(offsets, write)
        for wake in self._stable_watchers:
            wake()

    def is_stable(self, partitions: Iterable[TopicPartition]) -> bool:
        """Return whether no open transaction commits one of these offsets."""
        wanted = set(partitions)
        return all(
            wanted.isdisjoint(offsets) for writes in self._pending.values() for _, offsets in writes
        )

    def watch_stable(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each end of a transaction, until `unwatch_stable`."""
        self._stable_watchers.add(wake)

    def unwatch_stable(self, wake: Callable[[], None]) -> None:
        self._stable_watchers.discard(wake)

    def _next_write(self) -> int:
        self._writes += 1
        return self._writes

    def _commit(self, offsets: Mapping[TopicPartition, Committed], write: int) -> None:
        """Commit offsets, except those that were written before the committed ones.

        Transactions of two producers can end in another order than their offsets were written.
        """
        for partition, committed in offsets.items():
            if write > self._written.get(partition, 0):
                self._written[partition] = write
                self.committed[partition] = committed

    # Rebalances

    def _begin(self, now: float) -> None:
        if self.deadline is not None:
            return
        self.deadline = now + self._rebalance_timeout_s
        for member in self._members.values():
            member.joined = False
            member.notify()

    def _complete_when_all_joined(self) -> None:
        if not all(member.joined for member in self._members.values()):
            return
        subscriptions = {name: member.topics for name, member in self._members.items()}
        topics = {topic for subscribed in subscriptions.values() for topic in subscribed}
        shares = assign_ranges(subscriptions, {topic: self._count(topic) for topic in topics})
        self.generation += 1
        self.deadline = None
        for name, member in self._members.items():
            member.share = frozenset(shares[name])
            member.joined = False
            member.notify()


def require_short_metadata(offsets: Mapping[TopicPartition, Committed]) -> None:
    """Raise `LogRefused` if an offset's metadata is longer than Kafka accepts."""
    for partition, committed in offsets.items():
        if len(committed.metadata) > MAX_METADATA_CHARACTERS:
            raise LogRefused(
                f"{partition}: metadata: expected up to {MAX_METADATA_CHARACTERS} "
                f"characters, got {len(committed.metadata)}"
            )


def assign_ranges(members: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> Shares:
    """Assign neighbouring partitions to each member, topic by topic.

    Topics with the same number of partitions are assigned alike (`RangeAssignor` in Kafka).

    Args:
        members: the topics that each member subscribes to.
        counts: the number of partitions of each topic.
    """
    shares: Shares = {member: [] for member in members}
    for topic in sorted(counts):
        takers = sorted(member for member, topics in members.items() if topic in topics)
        if not takers:
            continue
        each, more = divmod(counts[topic], len(takers))  # the first members get one more
        stop = 0
        for index, member in enumerate(takers):
            start, stop = stop, stop + each + (index < more)
            shares[member] += [TopicPartition(topic, number) for number in range(start, stop)]
    return shares
