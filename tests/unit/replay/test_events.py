"""The simulation: by hand for a few requests, against queueing theory for very many."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.tools.simulate.events import (
    EXPIRED,
    Kind,
)
from tests.support.arrivals import Setup, arrivals, poisson, simulated

T0_US, A_US = 1000, 50
CAP = 32
GREEDY_P99_MS = {0.3: 2.71, 0.5: 3.28, 0.7: 4.11, 0.85: 5.10}
"""99th percentiles by load for one server, S(b) = 1 + 0.05 b ms, batches of up to 32 and Poisson
arrivals; from a simulation that shares no code with this one.
"""


def line(rows: int) -> int:
    """S(b) = 1 + 0.05 b ms."""
    return T0_US + A_US * rows


def p99_ms(load: float, count: int, seed: int) -> float:
    """At a share of what one server can do."""
    seen = simulated(poisson(count, load * CAP / line(CAP), seed), line)
    return float(np.quantile(seen.latency_us, 0.99)) / 1000


@pytest.mark.parametrize("load", GREEDY_P99_MS)
def test_simulated_greedy_batching_matches_known_latency(load: float) -> None:
    """The 99th percentile, within 5 %, at every load of the table."""
    assert p99_ms(load, 80_000, seed=1) == pytest.approx(GREEDY_P99_MS[load], rel=0.05)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_simulated_mean_matches_closed_form(rho: float) -> None:
    """Inoue's phi1 (arXiv 1912.06322), which is tight where rho is not small, without a limit:
    3 t0 / (2 (1 - rho)) + (a / 2) (rho + 2) / (1 - rho^2), with rho the arrival rate times a.
    """
    t0_us, a_us = 1000, 100
    seen = simulated(
        poisson(80_000, rho / a_us, seed=3),
        lambda rows: t0_us + a_us * rows,
        Setup(max_batch_size=100_000),
    )
    phi1_us = 3 * t0_us / (2 * (1 - rho)) + a_us / 2 * (rho + 2) / (1 - rho**2)

    assert seen.latency_us.mean() == pytest.approx(phi1_us, rel=0.02)


def test_requests_arriving_during_run_share_next_batch() -> None:
    """The first request goes alone at once; the other two wait for its end."""
    seen = simulated(arrivals([0, 300, 500]), line)

    assert seen.latency_us.tolist() == [1050, 1050 - 300 + 1100, 1050 - 500 + 1100]
    assert dict(seen.batch_rows) == {1: 1, 2: 1}
    assert dict(seen.reasons) == {"idle": 2}
    assert seen.busy_us[("m", "1")] == 1050 + 1100


def test_simulated_batches_keep_row_limit() -> None:
    """Five at once, two to a batch, one batch after the other."""
    seen = simulated(arrivals([0] * 5), line, Setup(max_batch_size=2))

    assert dict(seen.batch_rows) == {2: 2, 1: 1}
    assert seen.latency_us.max() == 1100 + 1100 + 1050


def test_simulated_instances_run_side_by_side() -> None:
    """Two requests, one to a batch, on two instances: neither waits."""
    seen = simulated(arrivals([0, 0]), line, Setup(instances=2, max_batch_size=1))

    assert seen.latency_us.tolist() == [1050, 1050]


def test_idle_simulated_instance_waits_for_queue_delay() -> None:
    """A batch that is not full closes when its first request has waited so long."""
    seen = simulated(arrivals([0, 400, 9000]), line, Setup(max_queue_delay_ms=2))

    assert seen.latency_us.tolist() == [2000 + 1100, 2000 - 400 + 1100, 2000 + 1050]
    assert dict(seen.reasons) == {"delay": 2}


def test_request_expiring_while_waiting_costs_no_run() -> None:
    """The second request's deadline passes behind the first, which is late but was begun."""
    seen = simulated(arrivals([0, 10], timeout_us=1000), line)

    assert seen.latency_us.tolist() == [1050, EXPIRED]
    assert seen.late == 1
    assert seen.batch_rows.total() == 1


def test_simulated_shapes_share_no_batch_and_models_no_instance() -> None:
    """Four kinds in turn: two shapes of one model in sequence, and two other versions beside."""
    kinds = (
        Kind("m", "1", (8,)),
        Kind("m", "1", (16,)),
        Kind("m", "2", ()),
        Kind("n", "1", ()),
    )
    seen = simulated(arrivals([0, 0, 0, 0], kinds=kinds), line)

    assert seen.latency_us.tolist() == [1050, 2100, 1050, 1050]


def test_faster_simulation_keeps_timeouts() -> None:
    """Only the gaps between the requests are shorter."""
    faster = arrivals([0, 100, 500], timeout_us=1000).faster(2)

    assert (faster.at_us - faster.at_us[0]).tolist() == [0, 50, 250]
    assert faster.timeout_us.tolist() == [1000] * 3


def test_simulated_batch_is_prepared_during_previous_run() -> None:
    """Just in time: the second batch closes 200 us before the first is done, and loses nothing."""
    seen = simulated(arrivals([0, 300, 900, 1100]), line, Setup(prepare_us=200, ahead=True))

    first_us = 200 + 1050
    assert seen.latency_us[:3].tolist() == [
        first_us,
        first_us + 1100 - 300,
        first_us + 1100 - 900,
    ]
    assert dict(seen.reasons) == {"idle": 1, "just_in_time": 2}


def test_simulated_preparation_without_overlap_delays_instance() -> None:
    """Without it the instance computes nothing while a batch is gathered and copied."""
    seen = simulated(arrivals([0, 300]), line, Setup(prepare_us=200))

    assert seen.latency_us.tolist() == [200 + 1050, 200 + 1050 + 200 + 1050 - 300]
