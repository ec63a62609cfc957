"""Delaying writes in a burst, so that records leave together."""

from __future__ import annotations

import pytest

from headrace.transport.burst_limiter import BurstLimiter
from headrace.tuning import TUNING

MAX_DELAY_S = TUNING.transport.max_write_delay_s


def passed(
    limiter: BurstLimiter, requests: int, every_s: float, times: int, now_s: float = 100.0
) -> float:
    """Let runs leave at even distances, whatever the limiter says; when the last one did."""
    for number in range(times):
        limiter.record_write(requests, 0, now_s + number * every_s)
    return now_s + (times - 1) * every_s


def test_first_write_is_not_delayed() -> None:
    """Nobody waits for a second one."""
    assert BurstLimiter().delay_s(100.0) == 0


@pytest.mark.parametrize("per_s", [500, 5000])
def test_flow_below_burst_is_never_delayed(per_s: int) -> None:
    """Requests that come one after the other are never delayed."""
    limiter = BurstLimiter()
    last_s = passed(limiter, 1, 1 / per_s, 1000)
    assert limiter.delay_s(last_s + 0.002) == 0


def test_writes_in_burst_are_gathered() -> None:
    """The pause counts from when the run before record_write."""
    limiter = BurstLimiter()
    last_s = passed(limiter, 20, 0.001, 200)
    assert limiter.delay_s(last_s + 0.004) == pytest.approx(MAX_DELAY_S - 0.004)
    assert limiter.delay_s(last_s + MAX_DELAY_S) == 0


@pytest.mark.parametrize(("per_s", "is_delayed"), [(500, False), (1000, True)])
def test_flow_of_large_requests_is_delayed_from_lower_rate(per_s: int, is_delayed: bool) -> None:
    """Of 150 KB; of small ones, neither rate would be delayed."""
    limiter = BurstLimiter()
    for number in range(1000):
        limiter.record_write(1, 150_000, 100.0 + number / per_s)
    assert (limiter.delay_s(100.0 + 999 / per_s + 0.002) > 0) is is_delayed


def test_writes_after_burst_are_not_delayed() -> None:
    """The length of the burst does not matter."""
    limiter = BurstLimiter()
    last_s = passed(limiter, 500, 0.01, 1000)
    limiter.record_write(1, 0, last_s + 5 * MAX_DELAY_S)
    assert limiter.delay_s(last_s + 5 * MAX_DELAY_S + 0.002) == 0


def test_short_burst_is_not_delayed() -> None:
    """Sixty requests at once, and the next ones a moment later."""
    limiter = BurstLimiter()
    limiter.record_write(60, 0, 100.0)
    assert limiter.delay_s(100.002) == 0


def test_writes_to_several_partitions_leave_together() -> None:
    """The second one of a moment does not wait for the first one's pause."""
    limiter = BurstLimiter()
    last_s = passed(limiter, 500, 0.01, 10)
    assert limiter.delay_s(last_s + 0.0002) == 0
