"""Merging records by time, which does not depend on the portions in which they come."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.topic_recording import Timeline
from tests.support.recordings import recorded

partitions = st.lists(st.lists(st.integers(-1, 20), max_size=12), min_size=1, max_size=4)


def expected(timestamps: list[list[int]]) -> list[tuple[int, int]]:
    """Partition and offset in the order in which the records are due, by a plain heap."""
    heads = [(each[0], number, 0) for number, each in enumerate(timestamps) if each]
    heapq.heapify(heads)
    order = []
    while heads:
        _, number, offset = heapq.heappop(heads)
        order.append((number, offset))
        if offset + 1 < len(timestamps[number]):
            heapq.heappush(heads, (timestamps[number][offset + 1], number, offset + 1))
    return order


@given(timestamps=partitions, script=st.data())
def test_timeline_order_does_not_depend_on_arrival(
    timestamps: list[list[int]], script: st.DataObject
) -> None:
    """It is that of a heap that knows everything, in portions of any size, taken at any time."""
    names = [TopicPartition("recorded", number) for number in range(len(timestamps))]
    waiting: list[list[Record]] = [
        [
            recorded(0, partition=number, offset=offset, timestamp=timestamp)
            for offset, timestamp in enumerate(each)
        ]
        for number, each in enumerate(timestamps)
    ]
    timeline = Timeline(names)
    order: list[Record] = []
    unfinished = list(range(len(names)))
    while unfinished:
        number = script.draw(st.sampled_from(unfinished))
        portion = script.draw(st.integers(1, 5))
        timeline.add(names[number], waiting[number][:portion])
        del waiting[number][:portion]
        if not waiting[number]:
            timeline.finish(names[number])
            unfinished.remove(number)
        order += timeline.take(script.draw(st.integers(0, 6)))
    order += timeline.take(1000)

    assert [(record.partition, record.offset) for record in order] == expected(timestamps)
    assert timeline.finished
