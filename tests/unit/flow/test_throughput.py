"""Learning what a process can do: the formula of docs/metrics.md."""

from __future__ import annotations

from headrace.consumer.lag import Throughput


def learned(*looks: tuple[int, int]) -> Throughput:
    """After looks one second apart, each with what was answered since and what is left."""
    throughput = Throughput()
    throughput.observe(0.0, 0, 0)
    answered = 0
    for second, (done, backlog) in enumerate(looks, start=1):
        answered += done
        throughput.observe(float(second), answered, backlog)
    return throughput


def test_drain_time_before_first_answers_is_unknown() -> None:
    """A process that has just started does not claim to drain never, or at once."""
    throughput = learned((0, 500))
    assert throughput.per_s is None
    assert throughput.time_to_drain_s(500) is None


def test_first_throughput_is_taken_whole() -> None:
    """Backlog over throughput is the time to drain."""
    throughput = learned((100, 500))
    assert throughput.per_s == 100
    assert throughput.time_to_drain_s(500) == 5.0


def test_higher_rate_raises_throughput_halfway() -> None:
    """The process can do at least what it just did, backlog or not."""
    assert learned((100, 0), (200, 0)).per_s == 150


def test_lower_rate_with_backlog_lowers_throughput_slowly() -> None:
    """There was more to do than was done, so this is what it can do."""
    assert learned((100, 500), (50, 500)).per_s == 95


def test_lower_rate_without_backlog_leaves_throughput() -> None:
    """The demand was low, and not the throughput."""
    assert learned((100, 500), (3, 1), (0, 0)).per_s == 100


def test_standstill_with_backlog_lowers_throughput() -> None:
    """A process that is stuck does not go on to promise what it once did."""
    assert learned((100, 500), (0, 500)).per_s == 90


def test_drain_time_without_backlog_is_zero() -> None:
    """Before anything was learned as well."""
    assert Throughput().time_to_drain_s(0) == 0.0
