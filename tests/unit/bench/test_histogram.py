"""A histogram of times: percentiles and bounds."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.tools.histogram import HIGHEST_S, LOWEST_S, Histogram


def histogram(*times_s: float) -> Histogram:
    """Return a histogram with these times."""
    found = Histogram()
    found.add(times_s)
    return found


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 99.9, 100])
def test_histogram_percentiles_are_exact_within_half_percent(percent: float) -> None:
    """Over four decades of times, as NumPy has them."""
    times_s = 10.0 ** np.random.default_rng(0).uniform(-5, -1, 20_000)
    found = histogram(*times_s)

    wanted = np.percentile(times_s, percent, method="inverted_cdf")
    assert found.percentile_s(percent) == pytest.approx(wanted, rel=0.005)


def test_percentile_never_exceeds_highest_time() -> None:
    """The bucket of the highest time reaches further, and is cut."""
    assert histogram(0.0123).percentile_s(99.9) <= 0.0123


def test_times_outside_histogram_count_in_end_bins() -> None:
    """A time of zero and one of hours are counted."""
    found = histogram(0.0, -1.0, 2 * HIGHEST_S)

    assert len(found) == 3
    assert found.percentile_s(50) == pytest.approx(LOWEST_S)
    assert found.max_s == 2 * HIGHEST_S


def test_empty_histogram_has_no_percentiles() -> None:
    """Zeros."""
    assert (Histogram().percentile_s(99), Histogram().mean_s) == (0.0, 0.0)
