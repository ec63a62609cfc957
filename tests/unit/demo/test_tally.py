"""Counting questions and answers."""

from __future__ import annotations

import pytest

from headrace.tools.demo.questions import DIGITS_MSGPACK
from headrace.tools.demo.tally import Tally
from tests.unit.demo.examples import answer, count, question, wrong_question


@pytest.fixture
def tally() -> Tally:
    return Tally()


def test_answered_demo_request_is_not_in_flight(tally: Tally) -> None:
    """Questions in flight were sent and not yet answered."""
    tally.send(question())
    count(tally, question(), answer())
    assert tally.in_flight == 1


def test_demo_compares_rows_with_labels(tally: Tally) -> None:
    """Right answers are counted by rows, not by requests."""
    count(tally, question("1", "2", "3"), answer("1", "2", "4"))
    (group,) = tally.result().groups
    assert (group.group, group.sent, group.answered) == (DIGITS_MSGPACK, 1, 1)
    assert (group.right, group.rows) == (2, 3)


def test_demo_latency_counts_from_due_time(tally: Tally) -> None:
    """Quantiles are of the milliseconds between due time and answer."""
    for number in range(101):
        count(tally, question(), answer(), number / 1000, at_s=10.0)
    latency = tally.result().groups[0].latency
    assert latency == pytest.approx((50.0, 90.0, 99.0, 100.0))


def test_demo_counts_batches_from_their_rows(tally: Tally) -> None:
    """Four rows that report 4 are one batch; two that report 1 are two."""
    for size in (4, 4, 4, 4, 1, 1):
        count(tally, question(), answer(batch_size=size))
    (batches,) = tally.result().batches
    assert batches.sizes == {1: 2, 4: 1}
    assert (batches.batches, batches.mean_rows) == (3, 2.0)


def test_demo_counts_rows_of_large_request_in_batch(tally: Tally) -> None:
    """Three rows of one request and one of another are one batch of four."""
    count(tally, question("1", "2", "3"), answer("1", "2", "3", batch_size=4))
    count(tally, question(), answer(batch_size=4))
    assert tally.result().batches[0].sizes == {4: 1}


def test_missing_answer_is_demo_fault(tally: Tally) -> None:
    """A question without an answer is reported."""
    tally.send(question())
    assert tally.result().faults == ("requests without an answer: 1",)


def test_surplus_answers_and_dead_letters_are_demo_faults(tally: Tally) -> None:
    """Each request has one answer, and a good one has no dead letter."""
    count(tally, question(), answer())
    tally.surplus_answers, tally.surplus_dead_letters = 1, 2
    assert tally.result().faults == (
        "answers besides one to each request: 1",
        "dead letters of requests that must not have one: 2",
    )


def test_unexpected_error_is_demo_fault(tally: Tally) -> None:
    """A good request must not get an error."""
    count(tally, question("7"), answer(status="INTERNAL"))
    assert "1 images: INTERNAL: what was wrong" in tally.result().faults


def test_too_many_wrong_labels_are_demo_fault(tally: Tally) -> None:
    """Eight of ten right is less than the digits model reaches."""
    for number in range(10):
        count(tally, question("7"), answer("7" if number < 8 else "1"))
    assert tally.result().faults == (f"{DIGITS_MSGPACK}: only 8 of 10 right",)


def test_too_few_rows_are_demo_fault(tally: Tally) -> None:
    """An answer has as many rows as its question."""
    count(tally, question("1", "2"), answer("1"))
    assert "2 images: expected 2 rows, got 1" in tally.result().faults


def test_expected_error_is_no_demo_fault(tally: Tally) -> None:
    """A wrong request with its expected error is no fault."""
    count(tally, wrong_question("DEADLINE_EXCEEDED"), answer(status="DEADLINE_EXCEEDED"))
    result = tally.result()
    assert result.faults == ()
    assert result.errors == (("a broken one", "DEADLINE_EXCEEDED", "what was wrong", 1, 0),)


def test_other_error_than_expected_is_demo_fault(tally: Tally) -> None:
    """The code of an error counts."""
    count(tally, wrong_question("DEADLINE_EXCEEDED"), answer(status="INTERNAL"))
    assert "a broken one: expected DEADLINE_EXCEEDED, got INTERNAL" in tally.result().faults


def test_missing_dead_letter_is_demo_fault(tally: Tally) -> None:
    """A request that can never succeed has an answer and a dead letter."""
    wrong = wrong_question("INVALID_TENSOR")
    count(tally, wrong, answer(status="INVALID_TENSOR"))
    assert tally.result().faults == ("dead letters that are missing: 1",)
    tally.dead_letter(wrong, "INVALID_TENSOR")
    assert tally.result().faults == ()
    assert tally.result().errors[0].dead_letters == 1


def test_dead_letter_of_other_code_is_demo_fault(tally: Tally) -> None:
    """The code of a dead letter counts."""
    wrong = wrong_question("INVALID_TENSOR")
    count(tally, wrong, answer(status="INVALID_TENSOR"))
    tally.dead_letter(wrong, "INTERNAL")
    assert tally.result().faults == ("a broken one: a dead letter with code INTERNAL",)


def test_live_stats_cover_last_second(tally: Tally) -> None:
    """Rates and times are of the window; totals are of the whole."""
    for number, at_s in enumerate((1.0, 9.2, 9.6)):
        count(tally, question(), answer(batch_size=number + 1, queue_us=3000), 0.010, at_s)
    tally.send(question())
    stats = tally.live_stats(10.0, 0.0)
    assert (stats.sent, stats.answered, stats.in_flight) == (4, 3, 1)
    assert stats.answers_per_s == pytest.approx(2.0)
    assert (stats.batch_mean, stats.batch_max) == (2.5, 3)
    assert (stats.queue_ms, stats.p50_ms) == pytest.approx((3.0, 10.0))


def test_live_stats_without_answers_are_zero(tally: Tally) -> None:
    """Before the first answer there is nothing to divide by."""
    assert tally.live_stats(5.0, 5.0) == (0.0, 0, 0, 0, 0.0, 0.0, 0, 0.0, 0.0, 0.0)
