"""The rules of a consumer group, with the clock in the test's hands."""

from __future__ import annotations

import pytest

from headrace.log.errors import Fenced
from headrace.log.memory.group import Group
from headrace.log.port import Committed, TopicPartition

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
TIMEOUT_S = 30.0


def _nobody() -> None:
    """A member's notification that goes nowhere."""


def _group() -> Group:
    return Group({"t": 2}.get, TIMEOUT_S)  # type: ignore[arg-type]  # "t" is there


def _join(group: Group, member: str | None = None) -> str:
    return group.join(member, (("t",), ""), _nobody, 0.0)


def _pair() -> tuple[Group, str, str]:
    """A group of two that has acknowledged in generation 2."""
    group = _group()
    first = _join(group)
    second = _join(group)
    _join(group, first)
    return group, first, second


def test_lone_member_gets_all_partitions() -> None:
    """The first to join starts generation 1 at once."""
    group = _group()
    member = _join(group)
    assert group.generation == 1
    assert group.share(member) == {P0, P1}


def test_second_member_waits_for_first() -> None:
    """Nobody gets a share until all have joined again."""
    group = _group()
    first, second = _join(group), _join(group)
    assert group.must_rejoin(first)
    assert group.is_joining(second)
    assert group.generation == 1


def test_complete_rejoin_starts_new_generation() -> None:
    """Once all are there the shares are new, and nobody has to do anything."""
    group, first, second = _pair()
    assert (group.generation, group.deadline) == (2, None)
    assert group.share(first) == {P0}
    assert group.share(second) == {P1}
    assert not group.must_rejoin(first)


def test_members_are_notified_of_rebalance() -> None:
    """A join notifies those who were there, and its completion notifies all."""
    group = _group()
    calls: list[str] = []
    first = group.join(None, (("t",), ""), lambda: calls.append("first"), 0.0)
    calls.clear()
    group.join(None, (("t",), ""), lambda: calls.append("second"), 0.0)
    assert calls == ["first"]
    group.join(first, (("t",), ""), _nobody, 0.0)
    assert calls == ["first", "first", "second"]


def test_member_not_rejoining_in_time_is_evicted() -> None:
    """The other members continue without it at the rebalance timeout."""
    group = _group()
    first, second = _join(group), _join(group)
    group.expire(TIMEOUT_S - 0.1)
    assert first in group.members
    group.expire(TIMEOUT_S)
    assert group.members == (second,)
    assert group.share(second) == {P0, P1}


def test_evicted_member_rejoins_under_new_id() -> None:
    """Its old membership is over for good."""
    group, first, _ = _pair()
    group.evict(first, 0.0)
    assert group.must_rejoin(first)
    assert _join(group, first) != first


def test_leaving_member_triggers_rebalance() -> None:
    """The remaining member gets all partitions."""
    group, first, second = _pair()
    group.leave(first, 0.0)
    assert group.must_rejoin(second)
    _join(group, second)
    assert group.share(second) == {P0, P1}


def test_member_leaving_during_rebalance_completes_it() -> None:
    """The other members do not wait for the one that left."""
    group = _group()
    first, second = _join(group), _join(group)
    group.leave(first, 0.0)
    assert group.share(second) == {P0, P1}


def test_empty_group_keeps_its_commits() -> None:
    """The last one to leave takes nothing away."""
    group = _group()
    member = _join(group)
    group.commit(member, 1, {P0: Committed(7)}, 0.0)
    group.leave(member, 0.0)
    assert (group.members, group.committed) == ((), {P0: Committed(7)})


def test_commit_during_revocation_counts() -> None:
    """A rebalance has begun, and the member has not joined it yet."""
    group = _group()
    first = _join(group)
    _join(group)
    group.commit(first, 1, {P1: Committed(3)}, 0.0)
    assert group.committed == {P1: Committed(3)}


def test_commit_after_joining_again_is_fenced() -> None:
    """A member cannot commit a partition that it gave up."""
    group, first, _ = _pair()
    group.rebalance(0.0)
    _join(group, first)
    with pytest.raises(Fenced, match="generation 2"):
        group.commit(first, 2, {P0: Committed(1)}, 0.0)


def test_commit_of_old_generation_is_fenced() -> None:
    """The commit fails even if the partition returned to the same member."""
    group = _group()
    member = _join(group)
    group.rebalance(0.0)
    _join(group, member)
    with pytest.raises(Fenced, match="generation 1"):
        group.commit(member, 1, {P0: Committed(1)}, 0.0)


def test_commit_of_evicted_member_is_fenced() -> None:
    """Its session is lost, and the error says so."""
    group, first, _ = _pair()
    group.evict(first, 0.0)
    with pytest.raises(Fenced, match="no member"):
        group.commit(first, 2, {P0: Committed(1)}, 0.0)


def test_commit_after_rebalance_timeout_is_fenced() -> None:
    """A drain that takes too long is too late, although nobody has noticed yet."""
    group = _group()
    first = _join(group)
    _join(group)
    with pytest.raises(Fenced):
        group.commit(first, 1, {P0: Committed(1)}, TIMEOUT_S)


def test_commit_of_another_members_partition_is_fenced() -> None:
    """Nothing of the commit is kept, the member's own partitions included."""
    group, first, _ = _pair()
    with pytest.raises(Fenced, match="t/1"):
        group.commit(first, 2, {P0: Committed(1), P1: Committed(1)}, 0.0)
    assert group.committed == {}


def test_new_topic_rebalances_its_subscribers() -> None:
    """A subscription to a topic that did not exist comes true when it does."""
    counts: dict[str, int] = {}
    group = Group(lambda topic: counts.get(topic, 0), TIMEOUT_S)
    member = _join(group)
    assert group.share(member) == frozenset()
    counts["t"] = 2
    group.topic_created("t", 0.0)
    _join(group, member)
    assert group.share(member) == {P0, P1}


def test_unsubscribed_topic_causes_no_rebalance() -> None:
    """Only a topic that a member subscribes to matters."""
    group, first, _ = _pair()
    group.topic_created("other", 0.0)
    assert not group.must_rejoin(first)
