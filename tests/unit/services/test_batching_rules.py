"""Rules for the order of requests and the size of a batch, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import Code
from headrace.protocol.messages import Envelope
from headrace.transport.channels import Demand
from headrace.tuning import TUNING
from tests.support.batching import (
    KEY,
    LINE_US,
    NOW_MS,
    backlogged,
    filled,
    learned,
    pulled,
    request_of,
)
from tests.support.work import NOW_US, Limits

# --- who goes next ----------------------------------------------------------------------------


def test_earliest_deadline_goes_first_across_shapes() -> None:
    """However long the others have waited, and wherever in its group it stands."""
    old = request_of(shape_class=(1,), arrived_us=NOW_US - 1000)
    later = request_of(shape_class=(2,), in_ms=50)
    urgent = request_of(shape_class=(3,), in_ms=20)
    patient = request_of(shape_class=(3,), in_ms=80)

    forming = filled(Limits(), old, later, patient, urgent)

    assert pulled(forming).requests == [patient, urgent]
    assert pulled(forming).requests == [later]
    assert pulled(forming).requests == [old]


def test_request_without_deadline_becomes_urgent_after_patience() -> None:
    """It counts as one with a deadline some seconds after it came."""
    old = request_of(shape_class=(1,), arrived_us=NOW_US - TUNING.batcher.patience_us)
    urgent = request_of(shape_class=(2,), in_ms=20)

    assert pulled(filled(Limits(), old, urgent)).requests == [old]


def test_higher_priority_goes_first_within_tenant() -> None:
    """Among requests that may share a batch, when they do not all fit."""
    low, high = request_of(priority=-1), request_of(priority=3)
    plain = request_of()

    forming = filled(Limits(max_batch_size=1), low, plain, high)

    assert [pulled(forming).requests[0] for _ in range(3)] == [high, plain, low]


def test_long_wait_outweighs_priority() -> None:
    """A step of priority is worth a fixed time of waiting."""
    patient = request_of(arrived_us=NOW_US - TUNING.batcher.priority_step_us - 1)
    urgent = request_of(priority=1)

    assert pulled(filled(Limits(max_batch_size=1), urgent, patient)).requests == [patient]


def test_tenants_share_batch_evenly() -> None:
    """A tenant with many requests gets the rows that the others leave."""
    much = [request_of(tenant="much") for _ in range(20)]
    little = [request_of(tenant="little") for _ in range(3)]

    forming = filled(Limits(max_batch_size=8), *much, *little)

    first = [request.envelope.tenant for request in pulled(forming).requests]
    assert (first.count("much"), first.count("little")) == (5, 3)
    assert len(pulled(forming).requests) == 8


def test_tenants_share_rows_and_not_requests() -> None:
    """A tenant with requests of three rows gets a third as many of them."""
    wide = [request_of(tenant="wide", rows=3) for _ in range(8)]
    narrow = [request_of(tenant="narrow") for _ in range(8)]

    batch = pulled(filled(Limits(max_batch_size=12), *wide, *narrow))

    rows = {"wide": 0, "narrow": 0}
    for request in batch.requests:
        rows[request.envelope.tenant] += request.rows
    assert rows == {"wide": 6, "narrow": 6}


def test_high_priority_does_not_take_another_tenants_rows() -> None:
    """Priorities are among a tenant's own requests."""
    urgent = [request_of(tenant="a", priority=100) for _ in range(10)]
    plain = [request_of(tenant="b") for _ in range(10)]

    batch = pulled(filled(Limits(max_batch_size=4), *urgent, *plain))

    assert sorted(request.envelope.tenant for request in batch.requests) == ["a", "a", "b", "b"]


def test_returning_tenant_gets_no_credit() -> None:
    """Its share begins when it comes, and not with what it might have had before."""
    steady = [request_of(tenant="steady") for _ in range(30)]
    forming = filled(Limits(max_batch_size=2), *steady, request_of(tenant="other"))
    for _ in range(8):
        pulled(forming)
    for _ in range(10):
        forming.add(request_of(tenant="back"))

    tenants = [one.envelope.tenant for _ in range(4) for one in pulled(forming).requests]

    assert (tenants.count("steady"), tenants.count("back")) == (4, 4)


def test_thousand_tenants_do_not_slow_batch() -> None:
    """Every one of 20,000 tenants gets its row, and no batch looks at all of them."""
    requests = [request_of(tenant=str(number)) for number in range(20_000)]
    forming = filled(Limits(max_batch_size=32), *requests)

    rows = 0
    while (batch := forming.next(KEY, NOW_US)) is not None:
        rows += batch.rows

    assert rows == 20_000


# --- when a batch closes, and how large it is -------------------------------------------------


def test_batch_for_busy_instance_closes_just_in_time() -> None:
    """Requests that come before the time to close join; then the batch closes, full or not."""
    forming = filled(Limits(), request_of())
    demand = Demand(close_at_us=NOW_US + 500)

    assert forming.next(KEY, NOW_US + 499, demand) is None
    forming.add(request_of(), NOW_US + 499)

    batch = pulled(forming, NOW_US + 500, demand)
    assert (batch.reason, batch.rows) == ("just_in_time", 2)


def test_full_batch_does_not_wait_for_busy_instance() -> None:
    """More would not fit, so it can be gathered now; less urgent shapes still wait."""
    single = request_of(shape_class=(1,))
    full = [request_of(arrived_us=NOW_US - 1) for _ in range(4)]
    forming = filled(Limits(max_batch_size=4), single, *full)
    demand = Demand(close_at_us=NOW_US + 500)

    batch = pulled(forming, NOW_US, demand)

    assert (batch.reason, batch.requests) == ("full", full)
    assert forming.next(KEY, NOW_US, demand) is None


@pytest.mark.parametrize("rare", [{"in_ms": 100}, {"tenant": "quiet"}], ids=["shape", "tenant"])
def test_full_batch_goes_before_another_shape_at_busy_instance_once(rare: dict[str, Any]) -> None:
    """With none before them, small batches of many tenants would take the time of full ones."""
    first = request_of(shape_class=(1,), arrived_us=NOW_US - 1, **rare)
    forming = filled(Limits(max_batch_size=4), first, *(request_of() for _ in range(12)))
    demand = Demand(close_at_us=NOW_US + 500)

    assert pulled(forming, demand=demand).rows == 4
    assert forming.next(KEY, NOW_US, demand) is None
    assert pulled(forming, NOW_US + 500, demand).requests == [first]


@pytest.mark.parametrize("rare", [{"in_ms": 100}, {"tenant": "quiet"}], ids=["shape", "tenant"])
def test_flood_of_full_batches_does_not_starve_another_shape_at_busy_instance(
    rare: dict[str, Any],
) -> None:
    """An instance that always finds a full batch of the flood would never run the other one."""
    first = request_of(shape_class=(1,), arrived_us=NOW_US - 1, **rare)
    forming = filled(Limits(max_batch_size=4), *(request_of() for _ in range(40)), first)
    batches = []
    for run in range(4):
        now_us = NOW_US + run * 1000
        demand = Demand(close_at_us=now_us + 500)
        batch = forming.next(KEY, now_us, demand)
        batches.append(batch or pulled(forming, now_us + 500, demand))

    assert any(first in batch.requests for batch in batches)


def test_batch_size_has_best_throughput() -> None:
    """Rows wait for the next batch where a larger batch would cost more for each row."""
    latency = learned({1: 3000, 4: 10_000, 8: 19_000, 16: 60_000, 32: 200_000})
    requests = [request_of() for _ in range(30)]

    batch = pulled(filled(Limits(32, 10_000, latency=latency), *requests))

    assert (batch.rows, batch.reason) == (8, "full")


def test_batcher_explores_other_sizes_at_intervals() -> None:
    """They may have become better since they were last seen: one batch in 128 has another size,
    and of the first 128 batches sixteen have.
    """
    latency = learned({1: 3000, 4: 10_000, 8: 19_000, 16: 60_000, 32: 200_000})
    forming = filled(Limits(32, 10_000, latency=latency), *(request_of() for _ in range(6000)))

    early = [pulled(forming).rows for _ in range(128)]
    later = [pulled(forming).rows for _ in range(512)]

    assert (early.count(4), early.count(8), early.count(16)) == (8, 112, 8)
    assert (later.count(4), later.count(8), later.count(16)) == (2, 508, 2)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_batch_size_measured_badly_recovers(wrong: float) -> None:
    """All sizes but the largest had one wrong time each; of all runs after them the times are
    right, and two rows are best.
    """
    rows = [1, 2, 4, 8, 16, 32, 64]
    us = [7_820, 15_200, 31_600, 64_900, 137_000, 288_000, 590_000]
    latency = learned({64: us[-1]})
    for each, right_us in zip(rows[:-1], us[:-1], strict=True):
        latency.observe((64,), each, round(right_us * wrong))
    forming = filled(Limits(64, 10_000, latency=latency), *(request_of() for _ in range(12_000)))

    sizes = []
    for _ in range(192):
        sizes.append(pulled(forming).rows)
        latency.observe((64,), sizes[-1], round(np.interp(sizes[-1], rows, us)))

    assert max(sizes[-32:]) <= 4


def test_batch_is_cut_for_its_most_urgent_request() -> None:
    """All twenty would take 2 ms; in 1.5 ms ten rows can be done."""
    urgent = request_of(in_ms=0)
    urgent.envelope = Envelope(deadline_ms=NOW_MS + 2)
    others = [request_of() for _ in range(19)]
    forming = filled(Limits(32, 10_000, latency=learned(LINE_US)), urgent, *others)

    batch = pulled(forming, NOW_US + 500)

    assert (batch.reason, batch.rows, batch.requests[0]) == ("deadline", 10, urgent)


def test_batch_is_cut_for_request_that_was_less_urgent_than_an_expired_one() -> None:
    """Otherwise it would be refused as late, and be given up."""
    less_urgent, expired = request_of(in_ms=2), request_of()
    expired.envelope = Envelope(deadline_ms=NOW_MS)
    others = [request_of() for _ in range(19)]
    forming = filled(Limits(32, 10_000, latency=learned(LINE_US)), less_urgent, *others, expired)

    batch = pulled(forming, NOW_US + 500)

    assert (batch.reason, batch.rows, batch.requests[0]) == ("deadline", 10, less_urgent)


def test_batches_under_backlog_stay_large_and_refuse_late_requests() -> None:
    """Small batches would make everybody late."""
    hopeless = request_of(in_ms=1)
    others = [request_of() for _ in range(40)]
    forming = filled(Limits(32, 10_000, latency=learned(LINE_US)), hopeless, *others)

    batch = pulled(forming)

    assert batch.rows == 32
    assert forming.ended == [hopeless]
    assert hopeless.failure is not None
    assert hopeless.failure.code == Code.OVERLOADED
    assert hopeless.failure.retry_after_ms == 2


def test_single_request_runs_though_predicted_late() -> None:
    """The prediction may be wrong, and nothing else would show it."""
    alone = request_of(in_ms=1)

    batch = pulled(filled(Limits(32, 10_000, latency=learned({1: 50_000})), alone))

    assert batch.requests == [alone]


@pytest.mark.parametrize(("in_ms", "is_late"), [(250, True), (350, False)])
def test_request_of_one_tenant_waits_behind_as_many_rows_of_each_other(
    in_ms: int, is_late: bool
) -> None:
    """A hundred of its own and of the busy tenant, eighty of one without a name, and eight."""
    forming = backlogged(Limits(max_batch_size=4, max_batch_bytes=10_000), row_us=1000)
    for number in range(8):
        forming.add(request_of(tenant=f"quiet-{number}"))
    for _ in range(1000):
        forming.add(request_of(tenant="busy"))
    for _ in range(100):
        forming.add(request_of(tenant="own"))
    request = request_of(tenant="own", in_ms=in_ms)

    forming.add(request)

    assert (request.failure is not None) is is_late
