"""How far a partition is answered, whatever the order of the answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.acked_offsets import (
    AckedOffsets,
    Range,
    UnknownMetadata,
    decode_ranges,
    encode_ranges,
)
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.messages import Request
from headrace.tuning import TUNING
from tests.support.work import make_request

OFFSETS = st.integers(0, 200)


class Partition(NamedTuple):
    """A partition as its reader sees it: where reading began, and what was delivered."""

    base: int
    delivered: list[int]

    def covers(self) -> list[tuple[int, int]]:
        """Each delivered offset with the one delivered before it."""
        return list(zip([self.base - 1, *self.delivered], self.delivered, strict=False))


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Delivered offsets rise from the base, with gaps where nothing ever was."""
    base = draw(OFFSETS)
    steps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=60))
    delivered: list[int] = []
    position = base - 1
    for step in steps:
        position += step
        delivered.append(position)
    return Partition(base, delivered)


@st.composite
def ranges_above(draw: st.DrawFn) -> tuple[int, list[Range]]:
    """A base and ranges above it, in order, none touching another."""
    base = draw(st.integers(0, 2**40))
    position = base
    ranges: list[Range] = []
    for gap, run in draw(
        st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=60)
    ):
        ranges.append((position + gap, position + gap + run))
        position += gap + run
    return base, ranges


def answered_offsets(progress: AckedOffsets, stop: int) -> set[int]:
    """All offsets below `stop` that count as answered."""
    return {offset for offset in range(stop) if offset in progress}


@given(partitions(), st.data())
def test_base_never_passes_unanswered_offset(partition: Partition, data: st.DataObject) -> None:
    """Answers in any order, with repeats, leave the base at the first one missing."""
    covers = data.draw(st.lists(st.sampled_from(partition.covers())))
    progress = AckedOffsets(partition.base)

    for previous, offset in covers:
        progress.mark_acked(previous, offset)

    answered = {offset for _, offset in covers}
    missing = [offset for offset in partition.delivered if offset not in answered]
    assert progress.base <= min(missing, default=partition.delivered[-1] + 1)
    assert [offset for offset in missing if offset in progress] == []
    assert [offset for offset in answered if offset not in progress] == []


@given(partitions(), st.data())
def test_base_is_behind_last_record_when_all_are_answered(
    partition: Partition, data: st.DataObject
) -> None:
    """Answers in any order close all gaps, and leave nothing above the base."""
    progress = AckedOffsets(partition.base)

    for previous, offset in data.draw(st.permutations(partition.covers())):
        progress.mark_acked(previous, offset)

    assert progress == AckedOffsets(partition.delivered[-1] + 1)


@given(partitions(), st.data())
def test_answers_of_several_epochs_add_up(partition: Partition, data: st.DataObject) -> None:
    """A later epoch skips what was answered, so that its intervals overlap the first one's."""
    covers = data.draw(st.permutations(partition.covers()))
    progress = AckedOffsets(partition.base)
    early, late = covers[: len(covers) // 2], covers[len(covers) // 2 :]
    for previous, offset in early:
        progress.mark_acked(previous, offset)

    # The successor knows only what was committed, and reads everything again from the base.
    successor = AckedOffsets.from_committed(progress.committable())
    last = successor.base - 1
    for offset in partition.delivered:
        if offset >= successor.base:
            if offset not in successor:
                successor.mark_acked(last, offset)
            last = offset
    for previous, offset in late:  # stragglers of the first epoch
        successor.mark_acked(previous, offset)

    assert successor == AckedOffsets(partition.delivered[-1] + 1)


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(-1, 150), st.integers(1, 20)), max_size=40),
)
def test_acked_ranges_equal_set_of_offsets(base: int, intervals: list[tuple[int, int]]) -> None:
    """Overlapping, touching and nested ranges equal the set of the offsets they cover."""
    progress = AckedOffsets(base)
    expected = set(range(base))

    for previous, length in intervals:
        progress.mark_acked(previous, previous + length)
        expected |= set(range(previous + 1, previous + length + 1))

    assert answered_offsets(progress, 200) == expected
    assert progress.base == min(set(range(201)) - expected)
    assert all(stop < start for (_, stop), (start, _) in zip(progress.ranges, progress.ranges[1:]))  # noqa: B905


@given(ranges_above(), st.integers(0, 400))
def test_truncation_forgets_answered_offsets_above(
    known: tuple[int, list[Range]], end: int
) -> None:
    """Truncation keeps the answered offsets below."""
    progress = AckedOffsets(*known)
    answered = [offset for offset in range(1000) if offset in progress]

    progress.truncate(end)

    assert [offset for offset in range(1000) if offset in progress] == [
        offset for offset in answered if offset < end
    ]
    assert progress.highest <= end


@given(ranges_above())
def test_acked_offsets_survive_commit_metadata(committed: tuple[int, list[Range]]) -> None:
    """Base and ranges survive the round trip through the commit's metadata."""
    base, ranges = committed
    progress = AckedOffsets(base, ranges)

    assert AckedOffsets.from_committed(progress.committable()) == progress


@given(ranges_above(), st.integers(1, 40))
def test_ranges_beyond_metadata_limit_are_cut_from_above(
    committed: tuple[int, list[Range]], times: int
) -> None:
    """Ranges beyond the limit are a prefix short, and none is longer than it was."""
    base, ranges = committed
    width = (ranges[-1][1] - base) if ranges else 0
    many = [
        (start + turn * width, stop + turn * width)
        for turn in range(times)
        for start, stop in ranges
    ]

    text = encode_ranges(base, many)

    kept = decode_ranges(base, text)
    assert len(text) <= TUNING.delivery.metadata_characters
    assert kept == many[: len(kept)]


@pytest.mark.parametrize("step", [2, 3, 1000, 10**9])
@pytest.mark.parametrize("count", [1_000, 20_000, 200_000])
def test_acked_ranges_fill_commit_metadata(step: int, count: int) -> None:
    """The metadata keeps as many ranges as the better of its two forms can hold."""
    ranges = [(start, start + 1) for start in range(step, step * count, step)]

    text = encode_ranges(0, ranges)

    kept = decode_ranges(0, text)
    body_bytes = (TUNING.delivery.metadata_characters - 2) * 6 // 8
    in_bitmap = body_bytes * 8 // step
    in_runs = body_bytes // (1 + max(1, -(-(step - 1).bit_length() // 7)))
    assert len(text) <= TUNING.delivery.metadata_characters
    assert len(kept) >= min(len(ranges), max(in_bitmap, in_runs)) * 0.95


@given(st.text(max_size=80))
def test_foreign_metadata_is_refused_or_read(text: str) -> None:
    """Text that is no metadata of ours never passes for some, and raises nothing else."""
    try:
        ranges = decode_ranges(10, text)
    except UnknownMetadata:
        return
    assert text[:2] in ("", "1r", "1b")
    assert all(10 <= start <= stop for start, stop in ranges)


@pytest.mark.parametrize(
    "text", ["x", "1", "1x", "2rAAAA", "offset manager", "1r!", "1rgA", "1rAQ"]
)
def test_metadata_of_another_version_is_refused(text: str) -> None:
    """Ignoring it would repeat answers, so that the process ends and says why."""
    with pytest.raises(UnknownMetadata, match="another version of Headrace"):
        AckedOffsets.from_committed(Committed(5, text))


@given(partitions(), st.data())
def test_commit_with_answers_equals_commit_after_each_of_them(
    partition: Partition, data: st.DataObject
) -> None:
    """A transaction commits the offsets as its acknowledgements leave them."""
    tracker = InFlightTracker(Budget(1 << 20), lambda: None)
    source = TopicPartition("requests", 0)
    assignment = tracker.assign(source, AckedOffsets(partition.base))
    requests: list[Request] = []
    for offset in partition.delivered:
        request = make_request()
        request.ack_handle = assignment.admit(offset, 10)
        request.offset, request.previous = offset, request.ack_handle.previous
        requests.append(request)
    is_answered = st.lists(st.booleans(), min_size=len(requests), max_size=len(requests))
    answered = [each for each, is_in in zip(requests, data.draw(is_answered), strict=True) if is_in]
    store = OffsetStore(tracker, None, "requests", "requests")

    _, committed = store.fit_commit_metadata(0, [(each, source) for each in answered])
    store.ack(answered)

    assert committed == assignment.progress.committable()
