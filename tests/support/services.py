"""Parts of services for tests: instruments, models, deliveries without a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.consumer.ready_queue import PolledRecords
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.log.port import Record, TopicPartition
from headrace.models.registry import Models
from headrace.protocol.codec import encode_request
from headrace.services.executor.worker import NoQuarantine
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from tests.support.models import add_version, digits, settings_for
from tests.support.work import NOW_US

REQUESTS = TopicPartition("headrace.requests", 0)


class StillClock:
    """The time in microseconds, where the test says it is."""

    def __init__(self, now_us: int = NOW_US) -> None:
        self.now_us = now_us
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.now_us


def make_instruments(
    clock: StillClock | None = None, steady: StillClock | None = None
) -> Instruments:
    """Return instruments with a registry of their own and no traces; one clock serves for both."""
    clock = clock or StillClock()
    return Instruments(Metrics(CollectorRegistry()), None, clock, steady or clock)


def counted(instruments: Instruments, name: str, **labels: str) -> float:
    """A metric's value; 0 while there is none."""
    return instruments.metrics.registry.get_sample_value(f"headrace_{name}", labels) or 0.0


class RecordSource:
    """A source of deliveries that were read already."""

    deferral = None

    def __init__(self, *deliveries: PolledRecords) -> None:
        self.quarantine = NoQuarantine()
        self._deliveries: Iterator[PolledRecords] = iter(deliveries)

    async def receive(self) -> PolledRecords | None:
        return next(self._deliveries, None)


def make_assignment(progress: AckedOffsets | None = None) -> AssignedPartition:
    """An assignment of the requests, which begins at offset 0."""
    tracker = InFlightTracker(Budget(1_000_000_000), lambda: None)
    return tracker.assign(REQUESTS, progress or AckedOffsets(0))


def delivery(
    *values: bytes | None,
    assignment: AssignedPartition | None = None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    first: int = 0,
) -> PolledRecords:
    """Records of these values, one after the other."""
    offsets = count(first)
    records = [
        Record(*REQUESTS, next(offsets), NOW_US // 1000, b"key", value, headers) for value in values
    ]
    return PolledRecords(assignment or make_assignment(), records)


def digits_value(
    model: str = "digits", rows: int = 1, *, version: str | None = None, id: str | None = None
) -> bytes:
    """A request for `tests.support.models.digits`."""
    pixels = np.ones((rows, 64), np.float32)
    return encode_request("application/msgpack", model, {"pixels": pixels}, version=version, id=id)


def digits_models(repository: Path, config: str = "") -> Models:
    """A registry whose model `digits` is ready."""
    add_version(repository, "digits", 1, digits(), config)
    models = Models(settings_for(repository))
    models.open()
    return models
