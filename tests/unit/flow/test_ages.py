"""How old the oldest unanswered record is."""

from __future__ import annotations

from headrace.delivery.inflight import RecordAges
from headrace.tuning import TUNING


def test_partition_without_unanswered_record_has_no_age() -> None:
    """No age is shown where nothing was read, or everything is answered."""
    ages = RecordAges()
    assert ages.oldest_ms(0) is None
    ages.note(9, 1000)
    assert ages.oldest_ms(10) is None


def test_age_is_that_of_chunk_with_lowest_unanswered_offset() -> None:
    """It is as old as its first record until its last one is answered."""
    ages = RecordAges()
    ages.note(9, 1000)
    ages.note(19, 2000)
    assert [ages.oldest_ms(base) for base in (0, 9, 10, 19)] == [1000, 1000, 2000, 2000]


def test_merged_chunks_keep_age_of_older() -> None:
    """Neighbours become one, with the age of the older."""
    ages = RecordAges()
    for chunk in range(10 * TUNING.delivery.max_age_marks):
        ages.note(chunk, chunk)
        oldest_ms = ages.oldest_ms(0)
        assert oldest_ms == 0
    for base in range(0, 10 * TUNING.delivery.max_age_marks, 7):
        oldest_ms = ages.oldest_ms(base)
        assert oldest_ms is not None
        assert oldest_ms <= base
