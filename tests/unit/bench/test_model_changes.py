"""The checker of `benchmarks.model_changes`: which answers are right, and what is a fault."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from benchmarks.model_changes import (
    Found,
    Made,
    Meanings,
    Period,
    find_latencies,
    find_wrong_answers,
)
from benchmarks.named_load import REFUSED, Note, version_of

DEFAULT, STABLE = 0, 1
"""Places of `digits` and `digits@stable` among the names."""


def moved_default() -> Meanings:
    """The default moves from version 1 to 2 between the moments 100 and 200."""
    meanings = Meanings()
    meanings.written({"digits": "1", "digits@stable": "1"}, 0)
    lost = meanings.written({"digits": "2", "digits@stable": "1"}, 100)
    meanings.followed(lost, 200)
    return meanings


@pytest.mark.parametrize(
    ("name", "sent_ns", "done_ns", "version", "is_right"),
    [
        (DEFAULT, 10, 99, 1, True),
        (DEFAULT, 10, 99, 2, False),  # nobody had written it yet
        (DEFAULT, 10, 100, 2, True),
        (DEFAULT, 150, 160, 1, True),
        (DEFAULT, 200, 900, 1, True),  # sent before all had followed
        (DEFAULT, 201, 210, 1, False),
        (DEFAULT, 201, 210, 2, True),
        (STABLE, 150, 160, 2, False),  # another name moved
        (STABLE, 201, 210, 1, True),
        (STABLE, 201, 210, REFUSED, True),  # counted as a refusal
    ],
)
def test_answer_is_right_if_its_name_had_the_version_meanwhile(
    name: int, sent_ns: int, done_ns: int, version: int, *, is_right: bool
) -> None:
    """Any moment between request and answer will do."""
    notes = np.array([Note(name, sent_ns, sent_ns, done_ns, version)], np.int64)
    wrong = find_wrong_answers(notes, moved_default().all(1000))
    assert (not wrong) == is_right


def test_outputs_of_another_version_than_named_are_refused() -> None:
    """The second score is the number of the version."""
    answer = b'{"model_version":"2","outputs":[{"name":"scores","data":[0,%d]}]}'
    assert version_of(answer % 2) == 2
    with pytest.raises(ValueError, match="outputs of version 3 by 2"):
        version_of(answer % 3)


def test_latencies_during_changes_are_those_of_requests_due_then() -> None:
    """Two labels moved, each for 1 s with a pause of 1 s; one load was answered by nothing."""
    made = [
        Made("label", 0.1, 0.5, 1.0, from_s=10.0),
        Made("load", 0.1, 0.5, 1.0, from_s=15.0),
        Made("label", 0.1, 0.5, 1.0, from_s=20.0),
    ]
    notes = np.array(
        [
            Note(DEFAULT, int(due_s * 1e9), int(due_s * 1e9), int(due_s * 1e9) + ms * 10**6, 1)
            for due_s, ms in ((9.9, 90), (10.0, 1), (11.9, 2), (12.0, 90), (21.5, 3))
        ],
        np.int64,
    )
    [during] = find_latencies(made, notes, 1.0)
    assert (during.action, during.requests, during.p50_ms) == ("label", 3, 2.0)


def found(**changed: Any) -> Found:
    """A run in which nothing went wrong."""
    values: dict[str, Any] = {
        "plan": {},
        "sent": 10,
        "answered": 10,
        "refusals": {},
        "wrong": [],
        "made": [Made("load", 0.1, 3.0, 4.0)],
        "periods": [Period(1, 0, 1, 10, 2, 3), Period(0, 1, 2, 10, 2, 2)],
        "left": [],
    }
    return Found(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"answered": 9, "refusals": {"UNKNOWN_MODEL": 1}}, "1 of 10 .*UNKNOWN_MODEL"),
        ({"wrong": ["digits by version 2"]}, "1 answers came from a wrong version"),
        ({"left": ["process 1: digits/2"]}, "not unloaded"),
        ({"made": [Made("load", 0.1, 3.0, 5.5)]}, r"after a load .* only 2\.50 s"),
        ({"made": [Made("label", 0.5, 0.2, 2.6)]}, r"after a label .* only 2\.10 s"),
        ({"periods": [Period(1, 0, 1, 9, 2, 4), Period(0, 1, 2, 9, 2, 2)]}, r"p99 .* 2\.00 times"),
    ],
)
def test_each_fault_is_reported(changed: dict[str, Any], fault: str) -> None:
    """One of each kind."""
    one = found(**changed)
    [reported] = one.faults() + one.missed_times()
    assert re.search(fault, reported)


def test_run_without_fault_reports_none() -> None:
    """Agreement a second after readiness, and a p99 of 1.5 times the other, are within limits."""
    one = found()
    assert one.faults() + one.missed_times() == []
