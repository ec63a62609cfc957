"""When records are due, and how that is measured."""

from __future__ import annotations

import math

import pytest

from headrace.log.port import Record
from headrace.tools.replay.replay import (
    FixedRate,
    OriginalSpacing,
    Pace,
    Schedule,
    Unpaced,
    due_until,
)
from tests.support.recordings import START_MS, recorded


def at(*offsets_ms: int) -> list[Record]:
    """Records with timestamps so many milliseconds after the start."""
    return [
        recorded(number, timestamp=START_MS + offset_ms)
        for number, offset_ms in enumerate(offsets_ms)
    ]


@pytest.mark.parametrize(("speed", "dues"), [(1, [50, 50.2, 51]), (4, [50, 50.05, 50.25])])
def test_replay_speed_divides_original_spacing(speed: float, dues: list[float]) -> None:
    """Records are due after the first as they came after it, so many times as fast."""
    schedule = Schedule(OriginalSpacing(speed), 50.0)
    assert schedule.plan(at(0, 200, 1000)) == pytest.approx(dues)


def test_record_with_earlier_timestamp_is_due_at_once() -> None:
    """It is due with the record that it follows, and moves none of those after it."""
    schedule = Schedule(OriginalSpacing(), 0.0)
    assert schedule.plan(at(0, 500, 100, 600)) == pytest.approx([0, 0.5, 0.5, 0.6])


def test_record_without_timestamp_is_due_at_once() -> None:
    """Also the first one: the others would be due half a century later."""
    first, second, *others = at(0, 0, 200, 700)
    unstamped = [each._replace(timestamp=-1) for each in (first, second)]
    schedule = Schedule(OriginalSpacing(), 0.0)
    assert schedule.plan([unstamped[0], *others, unstamped[1]]) == pytest.approx([0, 0, 0.5, 0.5])


def test_schedule_continues_across_chunks() -> None:
    """The second chunk continues the timeline of the first."""
    schedule = Schedule(FixedRate(500), 10.0)
    first, second = schedule.plan(at(0, 0)), schedule.plan(at(0))
    assert [*first, *second] == pytest.approx([10, 10.002, 10.004])


def test_unpaced_records_are_all_due() -> None:
    """All records are due when the run starts, whatever their timestamps."""
    assert Schedule(Unpaced(), 7.0).plan(at(0, 5000)) == [7.0, 7.0]


def test_all_due_records_are_returned_at_once() -> None:
    """After a delay, a chunk goes out together; one that is not due yet stays."""
    dues = [1.0, 1.1, 1.2, 9.0]
    assert (due_until(dues, 0, 0.9), due_until(dues, 0, 1.1), due_until(dues, 2, 5.0)) == (0, 2, 3)


@pytest.mark.parametrize("make", [OriginalSpacing, FixedRate])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_nonpositive_pace_is_refused(make: type[Pace], value: float) -> None:
    """Others are refused with the reason."""
    with pytest.raises(ValueError, match="expected a positive number"):
        make(value)  # type: ignore[call-arg]  # both take the number
