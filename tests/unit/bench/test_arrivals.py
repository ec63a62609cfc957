"""Due times of a load's requests."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.tools.bench.load import PoissonArrivals


def test_generated_arrivals_are_poisson() -> None:
    """The rate is kept, gaps are exponential: their deviation is their mean."""
    arrivals = PoissonArrivals(1000.0, 20.0, seed=3)
    gaps = np.diff(arrivals.due(20.0))

    assert len(gaps) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps.std() == pytest.approx(1e-3, rel=0.05)


def test_due_arrivals_are_returned_once() -> None:
    """Arrivals are returned in order up to the asked time, for any steps."""
    steps, whole = PoissonArrivals(500.0, 3.0, seed=1), PoissonArrivals(500.0, 3.0, seed=1)
    given = [due_s for now_s in np.linspace(0, 3, 40) for due_s in steps.due(float(now_s))]

    assert given == whole.due(3.0)
    assert given == sorted(given)


def test_due_arrivals_are_bounded_at_any_rate() -> None:
    """At a rate above what can be drawn, it would otherwise never end."""
    arrivals = PoissonArrivals(1e12, 1.0)
    first, second = arrivals.due(1.0, 100), arrivals.due(1.0, 100)

    assert (len(first), len(second)) == (100, 100)
    assert first[-1] < second[0]


def test_generated_arrivals_end() -> None:
    """Nothing is due after the time is over, however late somebody asks."""
    arrivals = PoissonArrivals(100.0, 1.0)
    arrivals.due(100.0)

    assert arrivals.next_s() is None


@pytest.mark.parametrize("per_s", [0.0, -1.0, float("nan"), float("inf")])
def test_nonpositive_arrival_rate_is_refused(per_s: float) -> None:
    """Anything else is refused with what came."""
    with pytest.raises(ValueError, match="expected a positive number"):
        PoissonArrivals(per_s, 1.0)
