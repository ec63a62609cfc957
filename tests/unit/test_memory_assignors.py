"""How a group's partitions are shared out."""

from __future__ import annotations

from headrace.log.memory.group import assign_ranges
from headrace.log.port import TopicPartition


def _numbers(members: int, partitions: int) -> list[list[int]]:
    names = [f"m{number}" for number in range(members)]
    shares = assign_ranges(dict.fromkeys(names, ("t",)), {"t": partitions})
    return [[p.partition for p in shares[name]] for name in names]


def test_assignment_gives_adjacent_partitions() -> None:
    """Each member has a run of partitions, and the first ones have one more."""
    assert _numbers(3, 7) == [[0, 1, 2], [3, 4], [5, 6]]


def test_member_beyond_partitions_gets_empty_assignment() -> None:
    """The surplus member has an empty assignment, not none."""
    assert sorted(map(len, _numbers(3, 2))) == [0, 1, 1]


def test_member_gets_only_what_it_subscribes_to() -> None:
    """Different subscriptions in one group are respected."""
    shares = assign_ranges({"a": ("x",), "b": ("x", "y")}, {"x": 2, "y": 1})
    assert {p.topic for p in shares["a"]} == {"x"}
    assert TopicPartition("y", 0) in shares["b"]


def test_missing_topic_assigns_no_partition() -> None:
    """A subscription may come before its topic."""
    assert assign_ranges({"a": ("x",)}, {"x": 0}) == {"a": []}


def test_equal_topics_are_assigned_alike() -> None:
    """Partition 3 of one topic goes where partition 3 of the other goes."""
    shares = assign_ranges({"a": ("x", "y"), "b": ("x", "y")}, {"x": 4, "y": 4})
    assert shares["b"] == [TopicPartition(topic, number) for topic in "xy" for number in (2, 3)]
