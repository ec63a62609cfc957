"""Merging partitions into one order of time."""

from __future__ import annotations

from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.topic_recording import Timeline
from tests.support.recordings import recorded

P0, P1 = TopicPartition("recorded", 0), TopicPartition("recorded", 1)


def of(partition: TopicPartition, *timestamps: int) -> list[Record]:
    """Records of a partition, with these timestamps."""
    return [
        recorded(0, partition=partition.partition, offset=offset, timestamp=timestamp)
        for offset, timestamp in enumerate(timestamps)
    ]


def taken(timeline: Timeline, most: int = 100) -> list[tuple[int, int]]:
    """The partition and the timestamp of each record that is known to be next."""
    return [(record.partition, record.timestamp) for record in timeline.take(most)]


def test_timeline_returns_lowest_timestamp_first() -> None:
    """Two partitions become one order of time; equal times go by partition."""
    timeline = Timeline([P0, P1])
    timeline.add(P0, of(P0, 10, 30, 40))
    timeline.add(P1, of(P1, 20, 30))
    timeline.finish(P0)
    timeline.finish(P1)
    assert taken(timeline) == [(0, 10), (1, 20), (0, 30), (1, 30), (0, 40)]
    assert timeline.finished


def test_timeline_waits_for_every_partition() -> None:
    """A partition that may still have an earlier record holds the others back."""
    timeline = Timeline([P0, P1])
    timeline.add(P0, of(P0, 10, 30))
    assert taken(timeline) == []
    timeline.add(P1, of(P1, 20))
    assert taken(timeline) == [(0, 10), (1, 20)]
    assert (timeline.is_waiting_for(P0), timeline.is_waiting_for(P1)) == (False, True)


def test_finished_partition_holds_no_other_back() -> None:
    """Whether it had records or not."""
    timeline = Timeline([P0, P1])
    timeline.add(P0, of(P0, 10))
    timeline.finish(P1)
    assert taken(timeline) == [(0, 10)]
    assert not timeline.finished
    timeline.finish(P0)
    assert timeline.finished


def test_timeline_counts_waiting_bytes() -> None:
    """Added requests add their bytes to a partition, and taken requests remove theirs."""
    timeline = Timeline([P0])
    timeline.add(P0, of(P0, 1, 2))
    both = timeline.held_bytes(P0)
    taken(timeline, 1)
    assert timeline.held_bytes(P0) == both / 2
    taken(timeline)
    assert timeline.held_bytes(P0) == 0


def test_timeline_without_partitions_is_finished() -> None:
    """A recording of nothing ends at once."""
    assert Timeline([]).finished
