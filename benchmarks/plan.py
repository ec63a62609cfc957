"""What a rate takes, on paper: from what a request costs here, and what others have published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

BUSY = 0.7
"""How busy everything is planned to be; a simulation says what that costs in waiting."""

PARTITIONS_PER_PROCESS = 4
BROKERS_AT_LEAST = 3
"""So that each record can be on three of them."""

BROKER_CORES = 8
BROKER_BYTES_PER_S = 605e6 / 3
"""Of records that are each on three brokers: 605 MB/s for three of them with 8 virtual cores each,
in Confluent's "Benchmarking Apache Kafka, Apache Pulsar, and RabbitMQ" (2020)."""

EXECUTOR = "executor"


class Gpu(NamedTuple):
    """What one GPU answers of a model."""

    model: str
    per_s: float


GPUS = {
    "4 KB": Gpu("BERT-large, 384 tokens", 57_609 / 8),
    "150 KB": Gpu("ResNet-50", 632_229 / 8),
}
"""MLPerf Inference v4.1, closed, datacenter, NVIDIA H200-SXM-141GBx8, Server, by the size of
requests. That is TensorRT in INT8 or FP8, under a limit for the 99th percentile."""


class Costs(NamedTuple):
    """Of one request.

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


class Carries(NamedTuple):
    """Requests a second that one of each carries when it has nothing left."""

    process: float
    """The slowest kind of process."""
    brokers: float
    """Three, the fewest that there are."""
    gpu: float

    @property
    def first(self) -> str:
        """What binds first."""
        named = {"processes": self.process, "brokers": self.brokers, "GPU": self.gpu}
        return min(named, key=lambda name: named[name])


class Plan(NamedTuple):
    """What a rate takes.

    Attributes:
        processes: by their stages.
        partitions: of each topic.
    """

    processes: Mapping[str, int]
    partitions: int
    brokers: int
    gpus: int


def carries(costs: Costs) -> Carries:
    """What one of each can do."""
    return Carries(
        1e6 / max(costs.cpu_us.values()),
        BROKERS_AT_LEAST * _per_broker_s(costs),
        costs.gpu.per_s if costs.gpu else math.inf,
    )


def _per_broker_s(costs: Costs) -> float:
    """By its cores, each replica taken for as much work as the first; or by its bytes."""
    by_cores = BROKER_CORES * 1e6 / costs.broker_us / BROKERS_AT_LEAST
    return min(by_cores, BROKER_BYTES_PER_S / costs.written_bytes)


def plan(costs: Costs, rate_per_s: float) -> Plan:
    """All `BUSY`. Each GPU has an executor of its own, and each process its partitions."""
    gpus = math.ceil(rate_per_s / (BUSY * costs.gpu.per_s)) if costs.gpu else 0
    processes = {
        stages: max(math.ceil(rate_per_s * us / 1e6 / BUSY), gpus if EXECUTOR in stages else 1)
        for stages, us in costs.cpu_us.items()
    }
    return Plan(
        processes,
        PARTITIONS_PER_PROCESS * max(processes.values()),
        max(BROKERS_AT_LEAST, math.ceil(rate_per_s / (BUSY * _per_broker_s(costs)))),
        gpus,
    )
