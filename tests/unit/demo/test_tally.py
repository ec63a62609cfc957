"""Counting what was asked and what was answered."""

from __future__ import annotations

import pytest

from headrace.tools.demo.questions import DIGITS_MSGPACK
from headrace.tools.demo.tally import Tally
from tests.unit.demo.examples import answer, question, wrong_question


@pytest.fixture
def tally() -> Tally:
    return Tally()


def test_an_answered_question_is_no_longer_in_flight(tally: Tally) -> None:
    """What is in flight is what was asked and not yet answered."""
    tally.ask(question(1), 0.0)
    tally.ask(question(2), 0.0)
    tally.answer(answer(1), 0.1)
    assert tally.in_flight == 1
    assert not tally.is_complete


def test_rows_are_held_against_their_labels(tally: Tally) -> None:
    """Right answers are counted by rows, not by requests."""
    tally.ask(question(1, "1", "2", "3"), 0.0)
    tally.answer(answer(1, "1", "2", "4"), 0.1)
    (group,) = tally.result().groups
    assert (group.group, group.asked, group.answered) == (DIGITS_MSGPACK, 1, 1)
    assert (group.right, group.rows) == (2, 3)


def test_latency_counts_from_when_a_question_was_due(tally: Tally) -> None:
    """Quantiles are of the milliseconds between due time and answer."""
    for number in range(101):
        tally.ask(question(number), 10.0)
        tally.answer(answer(number), 10.0 + number / 1000)
    latency = tally.result().groups[0].latency
    assert latency == pytest.approx((50.0, 90.0, 99.0, 100.0))


def test_batches_are_counted_from_the_rows_that_rode_in_them(tally: Tally) -> None:
    """Four rows that say 4 are one batch; two that say 1 are two."""
    for number, size in enumerate((4, 4, 4, 4, 1, 1)):
        tally.ask(question(number), 0.0)
        tally.answer(answer(number, batch_size=size), 0.1)
    (batches,) = tally.result().batches
    assert batches.sizes == {1: 2, 4: 1}
    assert (batches.batches, batches.mean_rows) == (3, 2.0)


def test_a_request_of_several_rows_fills_its_part_of_a_batch(tally: Tally) -> None:
    """Three rows of one request and one of another are one batch of four."""
    tally.ask(question(1, "1", "2", "3"), 0.0)
    tally.ask(question(2), 0.0)
    tally.answer(answer(1, "1", "2", "3", batch_size=4), 0.1)
    tally.answer(answer(2, batch_size=4), 0.1)
    assert tally.result().batches[0].sizes == {4: 1}


def test_a_missing_answer_is_a_fault(tally: Tally) -> None:
    """A question without an answer is told."""
    tally.ask(question(1), 0.0)
    assert tally.result().faults == ("requests without an answer: 1",)


def test_a_second_answer_is_a_fault(tally: Tally) -> None:
    """Each request has one answer."""
    tally.ask(question(1), 0.0)
    tally.answer(answer(1), 0.1)
    tally.answer(answer(1), 0.2)
    assert tally.result().faults == ("answers beyond one to a request: 1",)


def test_an_error_that_nobody_asked_for_is_a_fault(tally: Tally) -> None:
    """A good request must not get an error."""
    tally.ask(question(1, "7"), 0.0)
    tally.answer(answer(1, status="INTERNAL"), 0.1)
    assert "1 images: INTERNAL: what was wrong" in tally.result().faults


def test_implausibly_many_wrong_answers_are_a_fault(tally: Tally) -> None:
    """Eight of ten right is less than the digits model can do."""
    for number in range(10):
        tally.ask(question(number, "7"), 0.0)
        tally.answer(answer(number, "7" if number < 8 else "1"), 0.1)
    assert tally.result().faults == (f"{DIGITS_MSGPACK}: only 8 of 10 right",)


def test_too_few_rows_are_a_fault(tally: Tally) -> None:
    """An answer has as many rows as its question."""
    tally.ask(question(1, "1", "2"), 0.0)
    tally.answer(answer(1, "1"), 0.1)
    assert "2 images: expected 2 rows, got 1" in tally.result().faults


def test_an_error_that_was_asked_for_is_right(tally: Tally) -> None:
    """A wrong request with the error that belongs to it is no fault."""
    tally.ask(wrong_question(1, "DEADLINE_EXCEEDED"), 0.0)
    tally.answer(answer(1, status="DEADLINE_EXCEEDED"), 0.1)
    result = tally.result()
    assert result.faults == ()
    assert result.errors == (("a broken one", "DEADLINE_EXCEEDED", "what was wrong", 1, 0),)


def test_another_error_than_the_right_one_is_a_fault(tally: Tally) -> None:
    """The code of an error counts."""
    tally.ask(wrong_question(1, "DEADLINE_EXCEEDED"), 0.0)
    tally.answer(answer(1, status="INTERNAL"), 0.1)
    assert "a broken one: expected DEADLINE_EXCEEDED, got INTERNAL" in tally.result().faults


def test_a_dead_letter_must_be_found(tally: Tally) -> None:
    """A request that can never succeed is answered and kept."""
    tally.ask(wrong_question(1, "INVALID_TENSOR"), 0.0)
    tally.answer(answer(1, status="INVALID_TENSOR"), 0.1)
    assert tally.result().faults == ("dead letters that are missing: 1",)
    tally.dead_letter(b"1", "INVALID_TENSOR")
    assert tally.is_complete
    assert tally.result().errors[0].dead_letters == 1


def test_a_dead_letter_that_nobody_expects_is_a_fault(tally: Tally) -> None:
    """A good request leaves none."""
    tally.dead_letter(b"9", "INVALID_TENSOR")
    assert tally.result().faults == ("a dead letter b'9' with code INVALID_TENSOR",)


def test_a_glance_sees_the_last_second(tally: Tally) -> None:
    """Rates and times are of the window; totals are of the whole."""
    for number, at_s in enumerate((1.0, 9.2, 9.6)):
        tally.ask(question(number), at_s)
        tally.answer(answer(number, batch_size=number + 1, queue_us=3000), at_s + 0.010)
    tally.ask(question(9), 9.9)
    glance = tally.glance(10.0, 0.0)
    assert (glance.asked, glance.answered, glance.in_flight) == (4, 3, 1)
    assert glance.answers_per_s == pytest.approx(2.0)
    assert (glance.batch_mean, glance.batch_max) == (2.5, 3)
    assert (glance.queue_ms, glance.p50_ms) == pytest.approx((3.0, 10.0))


def test_a_glance_at_nothing_is_all_zeros(tally: Tally) -> None:
    """Before the first answer there is nothing to divide by."""
    assert tally.glance(5.0, 5.0) == (0.0, 0, 0, 0, 0.0, 0.0, 0, 0.0, 0.0, 0.0)


def test_the_request_that_is_shown_is_a_typical_one_that_shared_its_batch(tally: Tally) -> None:
    """Of those in batches of more than one, the one of median latency."""
    for number, (latency_s, size) in enumerate(((0.3, 2), (0.2, 2), (0.1, 2), (0.9, 1))):
        tally.ask(question(number), 0.0)
        tally.answer(answer(number, batch_size=size), latency_s)
    trace = tally.result().trace
    assert trace is not None
    assert trace.total_ms == pytest.approx(200.0)
