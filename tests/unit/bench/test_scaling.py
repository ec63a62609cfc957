"""How long requests wait for their process."""

from __future__ import annotations

import pytest

from benchmarks.scaling import simulate


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.7, 0.8])
def test_modelled_mean_wait_matches_closed_form(utilisation: float) -> None:
    """One server, constant service time: half of utilisation / (1 - utilisation)."""
    found = simulate(1, utilisation, keyed=False)

    assert found.mean == pytest.approx(utilisation / (2 * (1 - utilisation)), rel=0.05)


def test_even_partitions_load_processes_evenly() -> None:
    """Each of any number of processes waits as a single one does."""
    alone, many = (simulate(count, 0.7, keyed=False) for count in (1, 16))

    assert many.busiest == pytest.approx(0.7)
    assert many.mean == pytest.approx(alone.mean, rel=0.1)


def test_hot_keys_overload_one_process() -> None:
    """With many processes the hottest key alone is more than a process's share."""
    assert simulate(64, 0.5, keyed=True).busiest > 1.0
    assert simulate(8, 0.5, keyed=True).busiest > simulate(8, 0.5, keyed=False).busiest
