"""When the demo asks what."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headrace.tools.demo.questions import (
    DIGITS_JSON,
    DIGITS_MSGPACK,
    FILES,
    INVALID,
    Digits,
    Questions,
    SampleFile,
)
from headrace.tools.demo.traffic import DIGITS_BURSTS, FILE_BURSTS, Due, plan_load

SECONDS = 20.0


@pytest.fixture
def questions() -> Questions:
    digits = Digits(np.zeros((5, 64), np.uint8), np.arange(5, dtype=np.uint8))
    return Questions(digits, [SampleFile("csv", b"a,b\n1,2\n")])


def _plan(questions: Questions, *, files_per_s: float = 400.0) -> list[Due]:
    return list(plan_load(questions, SECONDS, seed=3, file_capacity_per_s=files_per_s))


def test_demo_load_is_ordered_by_due_time(questions: Questions) -> None:
    """The plan never goes back, and ends in time."""
    times_s = [due.at_s for due in _plan(questions)]
    assert times_s == sorted(times_s)
    assert times_s[-1] < SECONDS


def test_demo_load_has_single_requests_and_bursts(questions: Questions) -> None:
    """Bursts make batches of many sizes possible."""
    sizes = {(due.questions[0].group, len(due.questions)) for due in _plan(questions)}
    assert {(DIGITS_MSGPACK, size) for size in (1, *DIGITS_BURSTS)} <= sizes
    assert {(FILES, size) for size in (1, *FILE_BURSTS)} <= sizes


def test_demo_load_has_requests_of_several_rows(questions: Questions) -> None:
    """One to four images travel in one request."""
    rows = {
        len(each.labels)
        for due in _plan(questions)
        for each in due.questions
        if each.group == DIGITS_MSGPACK
    }
    assert rows == {1, 2, 3, 4}


def test_demo_load_has_stated_rates(questions: Questions) -> None:
    """About 100 requests in JSON a second: within five standard deviations."""
    groups = Counter(each.group for due in _plan(questions) for each in due.questions)
    assert groups[DIGITS_JSON] == pytest.approx(100 * SECONDS, abs=5 * (100 * SECONDS) ** 0.5)
    assert groups[INVALID] == 12


def test_demo_load_without_file_model_has_no_files(questions: Questions) -> None:
    """The digits alone make a demo, too."""
    groups = {each.group for due in _plan(questions, files_per_s=0.0) for each in due.questions}
    assert groups == {DIGITS_MSGPACK, DIGITS_JSON, INVALID}


@pytest.mark.parametrize("capacity_per_s", [20.0, 80.0])
def test_demo_load_is_half_of_measured_capacity(
    questions: Questions, capacity_per_s: float
) -> None:
    """Files come, bursts included, at half of the rate that was measured, or less."""
    plan = _plan(questions, files_per_s=capacity_per_s)
    sent = sum(each.group == FILES for due in plan for each in due.questions)
    expected = 0.5 * capacity_per_s * SECONDS
    assert sent == pytest.approx(expected, abs=5 * expected**0.5)
