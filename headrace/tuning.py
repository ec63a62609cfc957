"""Tuning values: times, sizes and counts that are chosen, not promised.

They are not settings: the defaults suit every deployment that was measured. They stand here so that
they can be read in one place, and so that a test passes other values to the object that it tests.
Each class belongs to one package, and is passed to the constructors of that package's objects.
Limits of a protocol or of a file format are not tuning values; they stay beside the code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConsumerTuning:
    """Tuning values of `headrace.consumer`."""


@dataclass(frozen=True)
class DeliveryTuning:
    """Tuning values of `headrace.delivery` and `headrace.crash_isolation`."""


@dataclass(frozen=True)
class TransportTuning:
    """Tuning values of `headrace.transport`."""


@dataclass(frozen=True)
class KafkaTuning:
    """Tuning values of `headrace.log.kafka`."""


@dataclass(frozen=True)
class MemoryTuning:
    """Tuning values of `headrace.log.memory`."""


@dataclass(frozen=True)
class ModelTuning:
    """Tuning values of `headrace.models` and `headrace.device`."""


@dataclass(frozen=True)
class IngestTuning:
    """Tuning values of `services.ingest`."""


@dataclass(frozen=True)
class BatcherTuning:
    """Tuning values of `services.batcher`."""


@dataclass(frozen=True)
class ExecutorTuning:
    """Tuning values of `services.executor`."""


@dataclass(frozen=True)
class ResponderTuning:
    """Tuning values of `services.responder`."""


@dataclass(frozen=True)
class RuntimeTuning:
    """Tuning values of `headrace.runtime` and `headrace.telemetry`."""


@dataclass(frozen=True)
class Tuning:
    """Tuning values of a process, by package."""

    consumer: ConsumerTuning = ConsumerTuning()
    delivery: DeliveryTuning = DeliveryTuning()
    transport: TransportTuning = TransportTuning()
    kafka: KafkaTuning = KafkaTuning()
    memory: MemoryTuning = MemoryTuning()
    models: ModelTuning = ModelTuning()
    ingest: IngestTuning = IngestTuning()
    batcher: BatcherTuning = BatcherTuning()
    executor: ExecutorTuning = ExecutorTuning()
    responder: ResponderTuning = ResponderTuning()
    runtime: RuntimeTuning = RuntimeTuning()


TUNING = Tuning()
"""The default values."""
