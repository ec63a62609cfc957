"""Scenarios: executors as they are, and what their times say they can do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.services.batcher.batcher import DynamicBatcher
from headrace.tools.simulate.events import Arrivals, Policy, SimulatedLimits
from headrace.tools.simulate.report import cells
from headrace.tools.simulate.scenarios import Scenario, ScenarioResult, Served, simulate
from headrace.tools.simulate.service_times import BatchTime, ServiceTime
from tests.support.arrivals import KIND, arrivals, poisson

LIMITS = SimulatedLimits(32, 1 << 40, 0.0)


def policy(limits: Callable[[str, str], SimulatedLimits]) -> Policy:
    """The batcher's own rules."""
    return DynamicBatcher(limits, "test")


def outcome(arriving: Arrivals, served: Served, scenario: Scenario | None = None) -> ScenarioResult:
    """Simulate one scenario; by default the present configuration."""
    return simulate(arriving, {KIND.key: served}, scenario or Scenario(), policy)


def test_overhead_around_run_delays_request_and_not_instance() -> None:
    """The second request waits for the first one's run alone."""
    times = ServiceTime((), (1000, 0))
    times.around_us = 300

    found = outcome(arrivals([0, 100]), Served(LIMITS, 1, times))

    assert found.latencies_ms[-1] == pytest.approx((2000 + 300 - 100) / 1000)


def test_table_shows_rate_below_one_request_a_second() -> None:
    """A quiet topic is not one without requests."""
    found = outcome(
        arrivals([0, 2_500_000, 5_000_000]), Served(LIMITS, 1, ServiceTime((), (1000, 0)))
    )

    assert 0 < float(cells(found)[1]) == pytest.approx(found.rate_per_s, abs=0.01)


@pytest.mark.parametrize(("instances", "reason"), [(1, "just_in_time"), (2, "idle")])
def test_single_instance_closes_next_batch_just_in_time(instances: int, reason: str) -> None:
    """The second of two instances takes requests at once."""
    arriving = arrivals([0, 100, 200, 5000])

    found = outcome(arriving, Served(LIMITS, instances, ServiceTime((), (10_000, 0))))

    assert set(found.reasons) == {"idle", reason}


def test_simulated_instance_looks_ahead_during_long_runs_only() -> None:
    """As the executor, which asks how long this run takes, not how long one row does."""
    arriving = arrivals([0, 100, 200, 300, 400, 500, 600, 700, 2000])

    found = outcome(arriving, Served(LIMITS, 1, ServiceTime((), (800, 400))))

    assert found.reasons == {"idle": 2, "just_in_time": 1}


def test_simulated_batches_have_best_size() -> None:
    """A model that is quickest at 4 rows is given 4, since its runs are known."""
    times = ServiceTime(
        [BatchTime(1, 900), BatchTime(4, 1200), BatchTime(8, 4800), BatchTime(32, 19_200)]
    )

    found = outcome(poisson(4000, 2 * 4 / 1200, seed=1), Served(LIMITS, 1, times))

    assert 3.5 < found.mean_batch < 4.5


def test_simulated_slow_stretches_reproduce_latency_tail() -> None:
    """A tenth of the runs is slow, in one piece: the queue that they leave is simulated as well."""
    runs = [(1, 1000.0)] * 900 + [(1, 3000.0)] * 100
    shuffled = [runs[place] for place in np.random.default_rng(1).permutation(len(runs))]
    served = Served(LIMITS._replace(max_batch_size=1), 1, ServiceTime([BatchTime(1, 1000)]))
    arriving = poisson(20_000, 0.7 / 1000, seed=1)

    together, apart = (
        outcome(arriving, served._replace(service_time=served.service_time.spread(each)))
        for each in (runs, shuffled)
    )

    assert together.latency_ms(0.99) > 1.5 * apart.latency_ms(0.99)
