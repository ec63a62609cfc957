"""Answers leave in the order of their source offsets, whatever order they end in."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.ordering import AnswerOrder, KeyChains


class Work(NamedTuple):
    """Records of one partition: delivered offsets with keys, and the order in which they end."""

    keys: dict[int, bytes]
    ends: list[int]


@st.composite
def work(draw: st.DrawFn) -> Work:
    """Offsets rise, with gaps; few keys, so that they repeat; any order of ends."""
    steps = draw(st.lists(st.integers(1, 3), max_size=40))
    offsets: list[int] = []
    for step in steps:
        offsets.append((offsets[-1] if offsets else -1) + step)
    keys = {offset: draw(st.sampled_from([b"a", b"b", b"c"])) for offset in offsets}
    return Work(keys, draw(st.permutations(offsets)))


def previous_of(offsets: list[int]) -> dict[int, int]:
    """Return, for each offset, the one delivered before it."""
    return dict(zip(offsets, [-1, *offsets], strict=False))


@given(work())
def test_answers_in_partition_order_leave_after_all_before_them(one: Work) -> None:
    """Neither earlier, which would overtake, nor later, which would hold up."""
    offsets = sorted(one.keys)
    previous = previous_of(offsets)
    order: AnswerOrder[int] = AnswerOrder(AckedOffsets(0))
    ended: set[int] = set()
    left: list[int] = []
    for offset in one.ends:
        ended.add(offset)
        left += order.add(offset, previous[offset], offset)
        stuck = next((each for each in offsets if each not in ended), None)
        assert left == [each for each in offsets if stuck is None or each < stuck]
    assert order.held == 0


@given(work())
def test_answers_in_key_order_leave_after_all_of_their_key(one: Work) -> None:
    """A stuck record holds up its own key alone."""
    chains = KeyChains(lambda _: False)
    after = {offset: chains.follow(key, offset) for offset, key in sorted(one.keys.items())}
    order: AnswerOrder[int] = AnswerOrder(AckedOffsets(0))
    ended: set[int] = set()
    left: list[int] = []
    for offset in one.ends:
        ended.add(offset)
        before = after[offset]
        left += order.add(offset, before if before >= 0 else None, offset)
        by_key: dict[bytes, list[int]] = defaultdict(list)
        for each in left:
            by_key[one.keys[each]].append(each)
        for key in set(one.keys.values()):
            of_key = [each for each in sorted(one.keys) if one.keys[each] == key]
            stuck = next((each for each in of_key if each not in ended), None)
            assert by_key[key] == [each for each in of_key if stuck is None or each < stuck]


@given(work(), st.sets(st.integers(0, 120)))
def test_answered_record_holds_no_later_one(one: Work, before: set[int]) -> None:
    """An earlier owner of the partition answered some; the others leave in order all the same."""
    offsets = sorted(one.keys)
    previous = previous_of(offsets)
    answered = AckedOffsets(0, [(offset, offset + 1) for offset in offsets if offset in before])
    order: AnswerOrder[int] = AnswerOrder(answered)
    left: list[int] = []
    for offset in one.ends:
        if offset not in before:
            left += order.add(offset, previous[offset], offset)

    segments: list[list[int]] = [[]]
    for offset in offsets:
        if offset in before:
            segments.append([])
        else:
            segments[-1].append(offset)
    assert sorted(left) == [offset for segment in segments for offset in segment]
    for segment in segments:
        assert [each for each in left if each in segment] == segment


@given(work(), st.data())
def test_answers_of_previous_owner_release_held_ones(one: Work, data: st.DataObject) -> None:
    """A held answer leaves when its predecessor is found to be answered."""
    offsets = sorted(one.keys)
    previous = previous_of(offsets)
    progress = AckedOffsets(0)
    order: AnswerOrder[int] = AnswerOrder(progress)
    lost = set(data.draw(st.lists(st.sampled_from(offsets)))) if offsets else set()
    left = [
        each
        for offset in one.ends
        if offset not in lost
        for each in order.add(offset, previous[offset], offset)
    ]

    for offset in lost:
        progress.mark_acked(previous[offset], offset)
    left += order.release_answered()

    assert sorted(left) == [offset for offset in offsets if offset not in lost]
    assert order.held == 0


@given(work())
def test_order_chains_forget_only_answered_records(one: Work) -> None:
    """Forgetting changes no chain of what is still on its way."""
    progress = AckedOffsets(0)
    all_of = KeyChains(lambda _: False)
    forgetful = KeyChains(progress.__contains__, prune_at=1)
    offsets = sorted(one.keys)
    previous = previous_of(offsets)
    for place, offset in enumerate(offsets):
        expected = all_of.follow(one.keys[offset], offset)
        found = forgetful.follow(one.keys[offset], offset)
        assert found == expected or expected in progress
        if place % 2:
            progress.mark_acked(previous[offset], offset)
