"""What larger rates take: unit costs, and the simulation of waiting."""

from __future__ import annotations

import pytest

from benchmarks.scaling import needs, simulate


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.7, 0.8])
def test_the_mean_wait_is_that_of_the_closed_form(utilisation: float) -> None:
    """One server, constant service time: half of utilisation / (1 - utilisation)."""
    found = simulate(1, utilisation, keyed=False)

    assert found.mean == pytest.approx(utilisation / (2 * (1 - utilisation)), rel=0.05)


def test_even_partitions_leave_no_process_busier() -> None:
    """However many there are, each one waits as a single one does."""
    alone, many = (simulate(count, 0.7, keyed=False) for count in (1, 16))

    assert many.busiest == pytest.approx(0.7)
    assert many.mean == pytest.approx(alone.mean, rel=0.1)


def test_hot_keys_make_one_process_busier() -> None:
    """With many processes the hottest key alone is more than a process's share."""
    assert simulate(64, 0.5, keyed=True).busiest > 1.0
    assert simulate(8, 0.5, keyed=True).busiest > simulate(8, 0.5, keyed=False).busiest


def test_needs_follow_from_unit_costs() -> None:
    """Processes by their throughput, cores by their processor time."""
    found = needs(cpu_us=20.0, broker_us=5.0, per_process_s=50_000.0, rate_per_s=100_000)

    assert found == (100_000, 3, 2.0, 0.5)
