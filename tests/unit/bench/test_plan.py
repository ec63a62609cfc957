"""The resources that a rate needs, by the cost of one request."""

from __future__ import annotations

import pytest

from benchmarks.plan import Costs, Gpu, capacities, plan_resources

ONE = Costs({"ingest,batcher,executor,responder": 70.0}, broker_us=1.0, written_bytes=4_000)


def test_plan_keeps_processes_busy_for_seven_tenths() -> None:
    """20,000 requests of 70 µs are 1.4 cores, which two processes have at 70 %."""
    assert list(plan_resources(ONE, 20_000).processes.values()) == [2]


def test_plan_gives_each_stage_its_own_processes() -> None:
    """A process that needs twice the time is there twice as often, and sets the partitions."""
    apart = ONE._replace(cpu_us={"ingest": 70.0, "batcher,executor": 140.0, "responder": 7.0})

    found = plan_resources(apart, 20_000)

    assert found.processes == {"ingest": 2, "batcher,executor": 4, "responder": 1}
    assert found.partitions == 16


def test_plan_has_at_least_three_brokers() -> None:
    """Each record has three replicas, however little is written."""
    assert plan_resources(ONE, 10).brokers == 3


def test_plan_adds_brokers_for_bytes() -> None:
    """150 KB for 10,000 requests a second are 1.5 GB/s, of which a broker takes 141 MB at 70 %."""
    assert plan_resources(ONE._replace(written_bytes=150_000), 10_000).brokers == 11


def test_plan_adds_brokers_for_cpu() -> None:
    """1 ms for each of 100,000 requests on three brokers is 300 cores, at 70 % of eight each."""
    assert plan_resources(ONE._replace(broker_us=1_000.0), 100_000).brokers == 54


def test_plan_gives_each_gpu_executor() -> None:
    """Five GPUs at 70 % for 20,000 requests a second, and a process for each."""
    found = plan_resources(ONE._replace(gpu=Gpu("a model", 6_000.0)), 20_000)

    assert found.gpus == 5
    assert list(found.processes.values()) == [5]


@pytest.mark.parametrize(
    ("costs", "first"),
    [
        (ONE, "processes"),
        (ONE._replace(written_bytes=150_000), "brokers"),
        (ONE._replace(gpu=Gpu("a model", 1_000.0)), "GPU"),
    ],
)
def test_plan_names_smallest_capacity_as_bottleneck(costs: Costs, first: str) -> None:
    """One process carries 14,286 requests a second, and three brokers 605 MB."""
    assert capacities(costs).first == first
