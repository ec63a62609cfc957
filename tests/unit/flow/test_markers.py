"""Marks as texts, and where they are kept."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.crash_isolation.markers import (
    NOBODY,
    CrashMarkers,
    Owner,
    decode_marker,
    encode_marker,
)
from headrace.crash_isolation.poison_search import CLEAN, CrashMarker, ranges_of
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, TopicInfo, TopicPartition

ONE = TopicPartition("requests", 0)
OFFSETS = st.integers(0, 2**62)
SCATTERED = tuple((2**40 * place, 2**40 * place + 1) for place in range(1000))
RANGES = st.sets(OFFSETS | st.integers(0, 99), max_size=20).map(ranges_of)
MARKS = st.builds(
    CrashMarker,
    is_open=st.booleans(),
    stop=OFFSETS,
    ends=st.integers(0, 99),
    running=RANGES,
    suspects=RANGES,
    alone=st.none() | st.integers(0, 10_000),
    attempts=st.dictionaries(
        st.tuples(OFFSETS, st.integers(0, 10_000)), st.integers(1, 9), max_size=5
    ),
)


async def made() -> MemoryLog:
    """An embedded log with the topic."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("requests", 1, {})], replication_factor=1)
    return log


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(MARKS, st.builds(Owner, st.text(max_size=20), st.text(max_size=20)))
def test_crash_marker_survives_round_trip(mark: CrashMarker, owner: Owner) -> None:
    """All of it, and who wrote it."""
    assert decode_marker(encode_marker(mark, owner)) == (mark, owner)


def test_crash_marker_with_many_attempts_fits_into_commit() -> None:
    """Attempts with the most deaths are kept where not all fit."""
    attempts = {(2**62 + offset, 9999): 1 + offset % 3 for offset in range(500)}
    mark = CrashMarker(True, 2**62, 99, SCATTERED, 0, attempts, SCATTERED)

    text = encode_marker(mark, Owner("m" * 80, "p" * 80))

    assert len(text) <= 4096
    assert set(decode_marker(text)[0].attempts.values()) == {3}


@pytest.mark.parametrize("count", [300, 1000, 5000])
def test_crash_marker_joins_ranges_that_do_not_fit(count: int) -> None:
    """None is left out, and those that are farthest apart stay apart."""
    ranges = ranges_of(Random(count).sample(range(100_000), count))

    running = decode_marker(encode_marker(CrashMarker(True, running=ranges)))[0].running

    assert all(any(one[0] <= start and stop <= one[1] for one in running) for start, stop in ranges)
    widest = max(after[0] - before[1] for before, after in pairwise(ranges))
    assert any(after[0] - before[1] == widest for before, after in pairwise(running))


@pytest.mark.parametrize("text", ["no json", "{}", '{"v":1}', '{"v":2}', "[]", '{"v":2,"open":1}'])
async def test_unreadable_crash_marker_is_ignored(text: str) -> None:
    """Another version's, or somebody else's: a hint that nobody can read is none."""
    log = await made()
    await log.commit("group.marks", {ONE: Committed(0, text)})

    assert await CrashMarkers(log, "group").read([ONE]) == {ONE: (CLEAN, NOBODY)}


async def test_unchanged_crash_marker_is_not_written_again() -> None:
    """The broker may be unavailable then, and nobody minds."""
    log = await made()
    marks, owner = CrashMarkers(log, "group"), Owner("member", "process")
    await marks.write({ONE: CrashMarker(True)}, owner)
    log.faults.brokers.take_down()

    await marks.write({ONE: CrashMarker(True)}, owner)

    with pytest.raises(LogUnavailable):
        await marks.write({ONE: CrashMarker(True)}, Owner("another", "process"))


async def test_crash_marker_of_unknown_outcome_is_written_again() -> None:
    """After a failure nobody knows what the log holds."""
    log = await made()
    marks, owner = CrashMarkers(log, "group"), Owner("member", "process")
    await marks.write({ONE: CrashMarker(True)}, owner)
    log.faults.brokers.take_down()
    with pytest.raises(LogUnavailable):
        await marks.write({ONE: CLEAN}, owner)
    log.faults.brokers.bring_back()

    await marks.write({ONE: CrashMarker(True)}, owner)

    assert await CrashMarkers(log, "group").read([ONE]) == {ONE: (CrashMarker(True), owner)}
