"""The batcher's own rules in simulated time, held against tables that other code has computed.

The tables are 99th percentiles in milliseconds of one server, S(b) = t0 + a b, batches of up to 32,
Poisson arrivals, by the share of what the server can do. They come from a simulation that shares no
code with this one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest

from headrace.models.profiling.latency import Latency
from headrace.tools.simulate.events import EXPIRED, Kind
from tests.support.arrivals import Setup, poisson, simulated, together

CAP = 32
SEEDS = range(8)
STUDENT_T_95 = 2.365
"""Quantile for seven degrees of freedom, two-sided."""

GREEDY = {0.1: 2.25, 0.5: 3.28, 0.85: 5.10}
DELAYED_2_6 = {0.1: 4.00, 0.5: 4.75, 0.85: 5.39}
DELAYED_5 = {0.1: 6.55, 0.5: 7.46, 0.85: 6.28}
STEPS_OF_4 = {0.3: (2.93, 0.99), 0.6: (3.92, 1.78), 0.85: (5.21, 3.36)}

CAPACITY_PER_US = CAP / 2600


def line(rows: int) -> int:
    """S(b) = 1 + 0.05 b ms."""
    return 1000 + 50 * rows


def cheap(rows: int) -> int:
    """S(b) = 0.2 + 0.05 b ms."""
    return 200 + 50 * rows


def p99s_ms(
    load: float, count: int, service_us: Callable[[int], int], setup: Setup
) -> tuple[float, float]:
    """The mean over the seeds, and half of its 95 % confidence interval."""
    found = []
    for seed in SEEDS:
        arriving = poisson(count, load * CAP / service_us(CAP), seed)
        seen = simulated(arriving, service_us, setup)
        found.append(float(np.quantile(seen.latency_us, 0.99)) / 1000)
    half = STUDENT_T_95 * float(np.std(found, ddof=1)) / sqrt(len(found))
    return float(np.mean(found)), half


def agrees(found: tuple[float, float], told_ms: float) -> bool:
    """Within 5 %, and certain enough for that to mean something."""
    mean_ms, half_ms = found
    return abs(mean_ms - told_ms) <= 0.05 * told_ms and half_ms <= 0.05 * told_ms


def by_recursion(at_us: list[int]) -> list[int]:
    """Latencies of one greedy server, written down as directly as can be."""
    latency_us: list[int] = []
    free_us = first = 0
    while first < len(at_us):
        start_us = max(free_us, at_us[first])
        stop = min(bisect_right(at_us, start_us, first), first + CAP)
        free_us = start_us + line(stop - first)
        latency_us += [free_us - each for each in at_us[first:stop]]
        first = stop
    return latency_us


@pytest.mark.parametrize("load", [0.5, 0.95, 1.5])
def test_greedy_closing_takes_all_waiting_requests(load: float) -> None:
    """Every single latency is that of the recursion, below capacity and above it."""
    arriving = poisson(30_000, load * CAPACITY_PER_US, seed=5)

    seen = simulated(arriving, line)

    assert seen.latency_us.tolist() == by_recursion(arriving.at_us.tolist())


@pytest.mark.slow
def test_just_in_time_closing_near_capacity_has_known_latency() -> None:
    """At 95 % a percentile settles after millions of arrivals only, so both see the same ones."""
    arriving = poisson(300_000, 0.95 * CAPACITY_PER_US, seed=6)
    told_ms = np.quantile(by_recursion(arriving.at_us.tolist()), 0.99)

    seen = simulated(arriving, line, Setup(prepare_us=50, ahead=True, latency=Latency()))

    assert np.quantile(seen.latency_us, 0.99) == pytest.approx(told_ms, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("load", GREEDY)
def test_just_in_time_closing_costs_no_latency(load: float) -> None:
    """Gathering and copying for 50 us, hidden behind the runs, leaves the greedy latency; the
    size of the batches is learned meanwhile.
    """
    found = p99s_ms(load, 10_000, line, Setup(prepare_us=50, ahead=True, latency=Latency()))

    assert agrees(found, GREEDY[load]), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay_ms", "load", "told_ms"),
    [
        *((2.6, load, told) for load, told in DELAYED_2_6.items()),
        *((5.0, load, told) for load, told in DELAYED_5.items()),
    ],
)
def test_fixed_delay_has_known_cost(delay_ms: float, load: float, told_ms: float) -> None:
    """`max_queue_delay_ms` is worse than taking what is there, by as much as the table says."""
    found = p99s_ms(load, 6_000, line, Setup(max_queue_delay_ms=delay_ms))

    assert agrees(found, told_ms), found


def steps_of_4(rows: int) -> int:
    """The next of 1, 2, 4, and then steps of 4."""
    return rows if rows <= 2 else -(-rows // 4) * 4


@pytest.mark.slow
@pytest.mark.parametrize("load", STEPS_OF_4)
def test_padding_to_buckets_has_known_cost(load: float) -> None:
    """On a device that runs only some sizes, a large and a small fixed cost are simulated."""

    def expensive_us(rows: int) -> int:
        return line(steps_of_4(rows))

    def cheap_us(rows: int) -> int:
        return cheap(steps_of_4(rows))

    for service_us, told_ms in zip((expensive_us, cheap_us), STEPS_OF_4[load], strict=True):
        found = p99s_ms(load, 14_000, service_us, Setup())
        assert agrees(found, told_ms), (found, told_ms)


def test_best_size_is_found_and_kept() -> None:
    """A model that is quickest at 8 rows runs batches of 8 when more wait than it can do."""
    latency = Latency()
    magika_us = {1: 3300, 2: 5500, 4: 10_200, 8: 19_700, 16: 44_400, 32: 97_000, 64: 205_000}

    def service_us(rows: int) -> int:
        return round(float(np.interp(rows, [*magika_us], [*magika_us.values()])))

    for rows in magika_us:
        latency.observe((), rows, service_us(rows))
    seen = simulated(
        poisson(8000, 2 * 406 / 1e6, seed=1),
        service_us,
        Setup(max_batch_size=64, latency=latency),
    )

    assert seen.batch_rows[8] > 0.95 * seen.batch_rows.total()
    per_s = 8000 / (seen.end_us - 1_700_000_000_000_000) * 1e6
    assert per_s > 0.97 * 406


def test_overload_is_refused_and_admitted_requests_are_in_time() -> None:
    """At twice the capacity, with 50 ms to the deadline: nine tenths of the capacity or more is
    answered in time, and hardly anything is run in vain.
    """
    arriving = poisson(100_000, 2 * CAPACITY_PER_US, seed=1, timeout_us=50_000)

    seen = simulated(arriving, line, Setup(latency=Latency()))

    in_time = int((seen.latency_us != EXPIRED).sum()) - seen.late
    elapsed_us = int(arriving.at_us[-1] - arriving.at_us[0])
    assert in_time / elapsed_us > 0.9 * CAPACITY_PER_US
    assert seen.late < 0.01 * in_time


def test_overloading_tenant_does_not_cost_another_its_deadlines() -> None:
    """One sends five times what can be done, the other a fifth of it; both want 50 ms."""
    flood = poisson(
        50_000,
        5 * CAPACITY_PER_US,
        seed=1,
        timeout_us=50_000,
        kinds=(Kind("m", "1", (), tenant="flood"),),
    )
    quiet = poisson(
        2000,
        0.2 * CAPACITY_PER_US,
        seed=2,
        timeout_us=50_000,
        kinds=(Kind("m", "1", (), tenant="quiet"),),
    )
    arriving = together(flood, quiet)

    seen = simulated(arriving, line, Setup(latency=Latency()))

    latency_us = seen.latency_us[arriving.kind == 1]
    assert (latency_us != EXPIRED).all()
    assert np.quantile(latency_us, 0.99) < 10_000


def test_higher_priority_goes_first_without_starving_others() -> None:
    """At nine tenths of the capacity in bursts, the urgent wait less and all are done."""
    kinds = (Kind("m", "1", (), priority=50), Kind("m", "1", (), priority=0))
    burst = poisson(4000, 3 * CAPACITY_PER_US, seed=3, kinds=kinds)

    seen = simulated(burst, line, Setup())

    assert (seen.latency_us != EXPIRED).all()
    urgent_us, patient_us = (seen.latency_us[burst.kind == number] for number in (0, 1))
    assert np.quantile(urgent_us, 0.99) < np.quantile(patient_us, 0.5)
