"""Assign a group's partitions to its members: Kafka's range and round-robin assignors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Literal, TypeAlias

from headrace.log.port import TopicPartition

FairQueue: TypeAlias = dict[str, list[TopicPartition]]
Assignor: TypeAlias = Callable[[Mapping[str, Sequence[str]], Mapping[str, int]], FairQueue]
AssignorName: TypeAlias = Literal["range", "roundrobin"]


def range_assignor(members: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> FairQueue:
    """Assign neighbouring partitions to each member, topic by topic.

    Topics with the same number of partitions are assigned alike (`RangeAssignor` in Kafka).

    Args:
        members: the topics that each member subscribes to.
        counts: the number of partitions of each topic.
    """
    shares: FairQueue = {member: [] for member in members}
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


def round_robin_assignor(
    members: Mapping[str, Sequence[str]], counts: Mapping[str, int]
) -> FairQueue:
    """Assign the partitions of all topics one by one (`RoundRobinAssignor` in Kafka)."""
    shares: FairQueue = {member: [] for member in members}
    turns = cycle(sorted(members))
    for topic in sorted(counts):
        if not any(topic in topics for topics in members.values()):
            continue
        for number in range(counts[topic]):
            taker = next(member for member in turns if topic in members[member])
            shares[taker].append(TopicPartition(topic, number))
    return shares


ASSIGNORS: dict[AssignorName, Assignor] = {
    "range": range_assignor,
    "roundrobin": round_robin_assignor,
}
