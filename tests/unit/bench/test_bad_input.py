"""The judgement of `benchmarks.bad_input`: what is a fault, and which requests a window counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.bad_input import Beside, Found, Window
from benchmarks.named_load import Note, NoteColumns

ROUNDS = 4


def found(p99_ms: float = 2.0, rise_mib: float = 0.0) -> Found:
    """A run whose windows take ten seconds each; beside good requests the p99 is 2 ms."""
    measured = Found(3, 100.0)
    latencies = {Beside.NOTHING: 1.0, Beside.GOOD: 2.0, Beside.BAD: p99_ms}
    for number in range(ROUNDS):
        for place, (beside, each_ms) in enumerate(latencies.items()):
            until_s = 100 + 10 * (3 * number + place)
            memory_mib = 80 + rise_mib * until_s / 40
            measured.windows.append(
                Window(beside, until_s - 10, until_s, memory_mib, 1000, 1.0, each_ms, 9.0)
            )
    return measured


def test_unmoved_caller_and_flat_memory_are_no_faults() -> None:
    """Statuses that blame the caller are as they should be."""
    measured = found(p99_ms=2.4, rise_mib=3.5)
    measured.ended[Beside.BAD].update({"400": 7, "INVALID_ARGUMENT": 7, "0": 1})

    assert measured.faults() == []
    assert measured.p99_ratio(Beside.NOTHING) == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ("500", "1 answers blame the server"),
        ("INTERNAL", "1 answers blame the server"),
        ("TimeoutError", "1 bad requests were not answered in 5 s"),
        ("DEADLINE_EXCEEDED", "1 bad requests were not answered in 5 s"),
    ],
)
def test_bad_request_without_error_of_caller_is_a_fault(status: str, fault: str) -> None:
    """It must get a status that blames the caller, and in time."""
    measured = found()
    measured.ended[Beside.BAD][status] += 1

    assert measured.faults() == [fault]


def test_moved_p99_risen_memory_and_refusals_are_faults() -> None:
    """The 99th percentile is compared with that beside as many good requests."""
    measured = found(p99_ms=2.6, rise_mib=4.5)
    measured.refusals = Counter({"connection closed": 2})

    assert measured.faults() == [
        "the good caller got 2 refusals, such as ['connection closed']",
        "p99 beside bad requests is 1.30 times that beside good ones",
        "memory rises by 4.5 MiB",
    ]


def test_window_counts_requests_by_when_they_were_due() -> None:
    """A late request counts in the window in which it was due, from that moment on."""
    millis = 1_000_000
    notes = [
        Note(0, 999 * millis, 999 * millis, 1_900 * millis, 1),
        Note(0, 1_000 * millis, 1_000 * millis, 1_002 * millis, 1),
        Note(0, 1_999 * millis, 3_000 * millis, 3_001 * millis, 1),
        Note(0, 2_000 * millis, 2_000 * millis, 2_900 * millis, 1),
    ]
    window = Window(Beside.BAD, from_s=1.0, until_s=2.0)

    window.count(NoteColumns(*np.array(notes, np.int64).T))

    assert (window.requests, window.max_ms) == (2, 1_002.0)
