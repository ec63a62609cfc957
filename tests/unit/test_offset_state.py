"""Committed state as `headrace offsets` reads it: positions, lag, and the target of a reset."""

from __future__ import annotations

import pytest

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.port import Committed
from headrace.tools.offsets.resetting import Reset, moved
from headrace.tools.offsets.state import PartitionOffsets, readable_progress

RANGES = [(12, 15), (20, 30)]


def state(
    base: int | None, ranges: list[tuple[int, int]] | None = None, *, beginning: int = 0
) -> PartitionOffsets:
    """A partition that ends at 40."""
    if base is None:
        return PartitionOffsets(0, beginning, 40, None, None)
    progress = AckedOffsets(base, ranges or [])
    return PartitionOffsets(0, beginning, 40, progress.committable(), progress)


@pytest.mark.parametrize(
    ("found", "lag", "unanswered"),
    [
        (state(None), 40, 40),
        (state(None, beginning=5), 35, 35),
        (state(10), 30, 30),
        (state(10, RANGES), 30, 17),
        (state(10, RANGES, beginning=25), 15, 10),
        (state(40), 0, 0),
        (state(50), 0, 0),
    ],
    ids=["nothing", "trimmed", "base", "ranges", "trimmed-into-a-range", "done", "beyond-the-end"],
)
def test_lag_is_split_into_answered_and_unanswered(
    found: PartitionOffsets, lag: int, unanswered: int
) -> None:
    """Lag counts from the base, or from what the log still holds; answered ranges are in it."""
    assert (found.lag, found.unanswered) == (lag, unanswered)


@pytest.mark.parametrize(
    ("committed", "form"),
    [
        (None, "none"),
        (Committed(3), "none"),
        (AckedOffsets(3, [(5, 9)]).committable(), "runs"),
        (AckedOffsets(0, [(n, n + 1) for n in range(1, 6000, 2)]).committable(), "bitmap"),
        (Committed(3, "written by another"), "unreadable"),
    ],
    ids=["nothing", "no-ranges", "runs", "bitmap", "unreadable"],
)
def test_offset_state_names_form_of_metadata(committed: Committed | None, form: str) -> None:
    """It is told by name, and what cannot be read is no error of the reading."""
    found = PartitionOffsets(0, 0, 200, committed, readable_progress(committed))
    assert found.form == form


@pytest.mark.parametrize(
    ("base", "after"),
    [
        (0, AckedOffsets(0)),
        (9, AckedOffsets(9)),
        (10, AckedOffsets(10, RANGES)),
        (11, AckedOffsets(11, RANGES)),
        (12, AckedOffsets(15, [(20, 30)])),
        (13, AckedOffsets(15, [(20, 30)])),
        (19, AckedOffsets(19, [(20, 30)])),
        (20, AckedOffsets(30)),
        (40, AckedOffsets(40)),
    ],
)
def test_reset_moves_base(base: int, after: AckedOffsets) -> None:
    """Forward the ranges above it stay, and close up with it; backward none do."""
    assert moved(AckedOffsets(10, RANGES), base) == after


def test_reset_without_commit_moves_base() -> None:
    """There is nothing to keep."""
    assert moved(None, 7) == AckedOffsets(7)


@pytest.mark.parametrize(
    ("base", "skips", "repeats"),
    [(0, 0, 23), (10, 0, 0), (11, 1, 0), (20, 7, 0), (40, 17, 0)],
)
def test_reset_counts_skipped_and_repeated_offsets(base: int, skips: int, repeats: int) -> None:
    """Offsets that nobody will answer, and those that will be answered once more."""
    before = state(10, RANGES)
    planned = Reset(before, moved(before.progress, base))
    assert (planned.skips, planned.repeats) == (skips, repeats)


def test_reset_does_not_count_deleted_records_as_skipped() -> None:
    """Retention has passed the base: only what the log still holds can be passed over."""
    before = state(10, beginning=25)
    assert Reset(before, moved(before.progress, 30)).skips == 5
