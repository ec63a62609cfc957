"""How long a transaction waits for company: not where few requests pass, and never for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.responder.gathering import (
    ENOUGH_ANSWERS,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    SHARE,
    pause_s,
)


@pytest.mark.parametrize(
    ("answers", "elapsed_s", "under_way"),
    [
        (1, 0.002, 0),  # one request at a time
        (2, 0.010, 4),  # 200 a second
        (20, 0.010, 40),  # 2,000 a second
        (0, 0.010, 10_000),  # nothing was answered
        (100, 0.0, 10_000),  # the first transaction of a partition
    ],
)
def test_without_a_backlog_the_next_transaction_begins_at_once(
    answers: int, elapsed_s: float, under_way: int
) -> None:
    """There is nothing to wait for, or its callers would wait."""
    assert pause_s(answers, elapsed_s, under_way) == 0.0


def test_with_a_backlog_a_thousand_answers_gather() -> None:
    """At 20,000 a second they take 51 ms."""
    assert pause_s(400, 0.020, 100_000) == pytest.approx(ENOUGH_ANSWERS / 20_000)


def test_where_answers_are_slow_the_pause_is_bounded() -> None:
    """A transaction does not wait a second for the next answer."""
    assert pause_s(10, 1.0, 100_000) == MAX_PAUSE_S


@given(st.integers(1, 5000), st.floats(1e-4, 60.0), st.integers(0, 1_000_000))
def test_nobody_waits_a_tenth_longer(answers: int, elapsed_s: float, under_way: int) -> None:
    """The pause is a tenth of the time that the last of those under way takes, at most."""
    found_s = pause_s(answers, elapsed_s, under_way)
    assert found_s == 0.0 or MIN_PAUSE_S <= found_s <= MAX_PAUSE_S
    assert found_s <= SHARE * under_way * elapsed_s / answers * (1 + 1e-9)
