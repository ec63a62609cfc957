"""How long a transaction waits for company: not where few requests pass, and never for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.responder.transactional import TransactionLinger, linger_after
from headrace.tuning import TUNING

TUNED = TUNING.responder


@pytest.mark.parametrize(
    ("answers", "elapsed_s", "in_flight"),
    [
        (1, 0.002, 0),  # one request at a time
        (2, 0.010, 4),  # 200 a second
        (20, 0.010, 40),  # 2,000 a second
        (0, 0.010, 10_000),  # nothing was answered
        (100, 0.0, 10_000),  # the first transaction of a partition
    ],
)
def test_transaction_without_backlog_begins_at_once(
    answers: int, elapsed_s: float, in_flight: int
) -> None:
    """There is nothing to wait for, or its callers would wait."""
    assert linger_after(answers, elapsed_s, elapsed_s, in_flight, TUNED) == 0.0


def test_transaction_with_backlog_gathers_hundreds_of_answers() -> None:
    """At 4,000 a second they take 64 ms, of which the step itself takes a part."""
    expected_s = TUNED.linger_answers / 4000 - 0.02
    assert linger_after(80, 0.020, 0.020, 100_000, TUNED) == pytest.approx(expected_s)


def test_transaction_during_which_enough_answers_come_does_not_linger() -> None:
    """At 20,000 a second a step of 20 ms gets 400 answers without waiting for them."""
    assert linger_after(400, 0.020, 0.020, 100_000, TUNED) == 0.0


def test_transaction_linger_is_bounded_for_slow_answers() -> None:
    """A transaction does not wait a second for the next answer."""
    assert linger_after(10, 1.0, 0.02, 100_000, TUNED) == TUNED.max_linger_s


@given(st.integers(1, 5000), st.floats(1e-4, 60.0), st.integers(0, 1_000_000))
def test_transaction_linger_is_at_most_tenth_of_latency(
    answers: int, elapsed_s: float, in_flight: int
) -> None:
    """The pause is a tenth of the time that the last of those under way takes, at most."""
    linger_s = linger_after(answers, elapsed_s, 0.0, in_flight, TUNED)
    assert linger_s == 0.0 or TUNED.min_linger_s <= linger_s <= TUNED.max_linger_s
    assert linger_s <= TUNED.linger_share * in_flight * elapsed_s / answers * (1 + 1e-9)


def test_step_after_silence_does_not_linger() -> None:
    """Only a step that follows another measures how quickly requests are answered."""
    linger = TransactionLinger(TUNED)
    assert linger.record_step(10.0, 10.02, answers=80, in_flight=100_000) == 0.0
    assert linger.record_step(10.5, 10.52, answers=80, in_flight=100_000) == 0.0


def test_following_step_lingers_under_backlog() -> None:
    """The time since the last step's end counts, and the linger itself is no silence."""
    linger = TransactionLinger(TUNED)
    linger.record_step(10.0, 10.02, answers=80, in_flight=100_000)
    first_s = linger.record_step(10.02, 10.04, answers=80, in_flight=100_000)
    assert first_s == pytest.approx(TUNED.linger_answers / 4000 - 0.02)
    began_s = 10.04 + first_s
    assert linger.record_step(began_s, began_s + 0.02, answers=256, in_flight=100_000) > 0.0
