"""How many events of a kind pass, and what becomes of the others."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.telemetry.logs import Event, LogRateLimiter
from headrace.tuning import TUNING

BURST = 20
PER_S = 2.0
MAX_KINDS = 100
TUNED = replace(
    TUNING.runtime, log_burst_lines=BURST, log_lines_per_s=PER_S, log_max_kinds=MAX_KINDS
)


def test_log_rate_limiter_passes_burst_and_no_more() -> None:
    """Events beyond the burst are held back and counted."""
    limiter = LogRateLimiter(TUNED)
    passed = [limiter.admit("event", 0.0) for _ in range(BURST + 30)]
    assert passed == [0] * BURST + [None] * 30
    assert limiter.suppressed == {"event": 30}


def test_next_log_line_counts_suppressed_ones() -> None:
    """The line after that counts none."""
    limiter = LogRateLimiter(TUNED)
    for _ in range(BURST + 5):
        limiter.admit("event", 0.0)
    assert [limiter.admit("event", 2 / PER_S) for _ in range(2)] == [5, 0]


def test_flood_of_one_event_does_not_suppress_another() -> None:
    """A flood of one hides no other."""
    limiter = LogRateLimiter(TUNED)
    for _ in range(BURST + 1):
        limiter.admit("often", 0.0)
    assert limiter.admit("rare", 0.0) == 0


def test_events_over_limit_share_one_bucket() -> None:
    """Memory is bounded, whatever libraries write."""
    limiter = LogRateLimiter(TUNED)
    passed = [limiter.admit(f"kind {number}", 0.0) for number in range(MAX_KINDS + BURST + 10)]
    assert passed.count(None) == 10


def test_lines_of_libraries_suppress_no_event_of_headrace() -> None:
    """Not even a first one behind more kinds than are told apart, such as texts with addresses."""
    limiter = LogRateLimiter(TUNED)
    for number in range(MAX_KINDS + BURST + 1):
        limiter.admit(f"asyncio: <Task at {number:#x}>", 0.0)
    assert limiter.admit(Event.COMMIT_FAILED, 0.0) == 0
