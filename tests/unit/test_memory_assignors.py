"""How a group's partitions are shared out."""

from __future__ import annotations

import pytest

from headrace.log.memory.group import Assignor, range_assignor, round_robin_assignor
from headrace.log.port import TopicPartition


def _numbers(assignor: Assignor, members: int, partitions: int) -> list[list[int]]:
    names = [f"m{number}" for number in range(members)]
    shares = assignor(dict.fromkeys(names, ("t",)), {"t": partitions})
    return [[p.partition for p in shares[name]] for name in names]


def test_range_assignor_gives_adjacent_partitions() -> None:
    """Each member has a run of partitions, and the first ones have one more."""
    assert _numbers(range_assignor, 3, 7) == [[0, 1, 2], [3, 4], [5, 6]]


def test_round_robin_assignor_alternates_members() -> None:
    """Partitions go to the members in turn."""
    assert _numbers(round_robin_assignor, 3, 7) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("assignor", [range_assignor, round_robin_assignor])
def test_member_beyond_partitions_gets_empty_assignment(assignor: Assignor) -> None:
    """The surplus member has an empty assignment, not none."""
    assert sorted(map(len, _numbers(assignor, 3, 2))) == [0, 1, 1]


@pytest.mark.parametrize("assignor", [range_assignor, round_robin_assignor])
def test_member_gets_only_what_it_subscribes_to(assignor: Assignor) -> None:
    """Different subscriptions in one group are respected."""
    shares = assignor({"a": ("x",), "b": ("x", "y")}, {"x": 2, "y": 1})
    assert {p.topic for p in shares["a"]} == {"x"}
    assert TopicPartition("y", 0) in shares["b"]


@pytest.mark.parametrize("assignor", [range_assignor, round_robin_assignor])
def test_missing_topic_assigns_no_partition(assignor: Assignor) -> None:
    """A subscription may come before its topic."""
    assert assignor({"a": ("x",)}, {"x": 0}) == {"a": []}


def test_range_assignor_splits_equal_topics_alike() -> None:
    """Partition 3 of one topic goes where partition 3 of the other goes."""
    shares = range_assignor({"a": ("x", "y"), "b": ("x", "y")}, {"x": 4, "y": 4})
    assert shares["b"] == [TopicPartition(topic, number) for topic in "xy" for number in (2, 3)]
