"""Capacity planning: the resources for a rate, from measured unit costs and published figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

BUSY = 0.7
"""Planned utilisation; docs/scaling.md simulates the waits that result from it."""

PARTITIONS_PER_PROCESS = 4
BROKERS_AT_LEAST = 3
"""Minimum number of brokers, so that each record can have three replicas."""

BROKER_CORES = 8
BROKER_BYTES_PER_S = 605e6 / 3
"""Throughput of one broker with three replicas of each record: 605 MB/s for three brokers with 8
virtual cores each, in Confluent's "Benchmarking Apache Kafka, Apache Pulsar, and RabbitMQ" (2020).
"""

EXECUTOR = "executor"


class Gpu(NamedTuple):
    """Throughput of one GPU for a model."""

    model: str
    per_s: float


GPUS = {
    "4 KB": Gpu("BERT-large, 384 tokens", 57_609 / 8),
    "150 KB": Gpu("ResNet-50", 632_229 / 8),
}
"""MLPerf Inference v4.1, closed, datacenter, NVIDIA H200-SXM-141GBx8, Server, by the size of
requests: TensorRT in INT8 or FP8, with a limit on the 99th percentile.
"""


class Costs(NamedTuple):
    """Costs of one request.

    Attributes:
        cpu_us: of each process that it passes, by the stages of that process.
        broker_us: of a broker that has every record once.
        written_bytes: into all topics together, each record once.
        gpu: what computes; None: nothing does.
    """

    cpu_us: Mapping[str, float]
    broker_us: float
    written_bytes: float
    gpu: Gpu | None = None


class Capacities(NamedTuple):
    """Highest rate of one process, of three brokers and of one GPU, in requests per second."""

    process: float
    """The slowest kind of process."""
    brokers: float
    """Three brokers, the minimum."""
    gpu: float

    @property
    def first(self) -> str:
        """The resource that is saturated first."""
        named = {"processes": self.process, "brokers": self.brokers, "GPU": self.gpu}
        return min(named, key=lambda name: named[name])


class Resources(NamedTuple):
    """Resources for a rate.

    Attributes:
        processes: by their stages.
        partitions: of each topic.
    """

    processes: Mapping[str, int]
    partitions: int
    brokers: int
    gpus: int


def capacities(costs: Costs) -> Capacities:
    """Return the highest rates of single resources."""
    return Capacities(
        1e6 / max(costs.cpu_us.values()),
        BROKERS_AT_LEAST * _per_broker_s(costs),
        costs.gpu.per_s if costs.gpu else math.inf,
    )


def _per_broker_s(costs: Costs) -> float:
    """Return the lower limit of CPU and bytes; a replica costs as much CPU as the first copy."""
    by_cores = BROKER_CORES * 1e6 / costs.broker_us / BROKERS_AT_LEAST
    return min(by_cores, BROKER_BYTES_PER_S / costs.written_bytes)


def plan_resources(costs: Costs, rate_per_s: float) -> Resources:
    """Plan for the utilisation `BUSY`. Each GPU has an executor process, each process its
    partitions.
    """
    gpus = math.ceil(rate_per_s / (BUSY * costs.gpu.per_s)) if costs.gpu else 0
    processes = {
        stages: max(math.ceil(rate_per_s * us / 1e6 / BUSY), gpus if EXECUTOR in stages else 1)
        for stages, us in costs.cpu_us.items()
    }
    return Resources(
        processes,
        PARTITIONS_PER_PROCESS * max(processes.values()),
        max(BROKERS_AT_LEAST, math.ceil(rate_per_s / (BUSY * _per_broker_s(costs)))),
        gpus,
    )
