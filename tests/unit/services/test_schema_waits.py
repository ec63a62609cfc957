"""Payloads that wait for their schemas: in ingest after a crash, and behind a run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.clock import wall_clock_us
from headrace.config import make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.errors import Code
from headrace.log.port import TopicPartition
from headrace.models.registry import Models
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.version import ModelVersion
from headrace.primitives.backoff import Backoff
from headrace.protocol.headers import BY_CORRELATION
from headrace.protocol.messages import Envelope
from headrace.services.executor.answer_rewriting import pass_through
from headrace.services.ingest.schemas import SchemaWaits
from headrace.transforms.workers import PendingTransform
from headrace.tuning import SchemaTuning
from tests.support.conditions import eventually
from tests.support.schema_registry import StandInRegistry
from tests.support.services import StillClock
from tests.support.tree import ROOT
from tests.support.work import NOW_US, make_request

QUICK = SchemaTuning(backoff=Backoff(0.001, 0.01))
SCHEMA = json.loads((ROOT / "examples/orders/models/fraud/order.avsc").read_text())
FRAMED = b"\0\0\0\0\1order"


def version_of(directory: Path, registry: StandInRegistry) -> tuple[ModelVersion, SchemaRegistry]:
    """The model of the example, of which no schema is known yet, and its client."""
    shutil.copytree(ROOT / "examples/orders/models/fraud", directory / "fraud")
    path = directory / "fraud" / "model.toml"
    text = path.read_text().replace('avro_schema = "order.avsc"', 'framing = "confluent"')
    path.write_text(text.replace("pass_through = true", ""))
    settings = make_settings(
        {
            "models": {"repository": str(directory)},
            "schema_registry": {"url": registry.url, "timeout_ms": 60_000},
        }
    )
    assert settings.schema_registry is not None
    client = SchemaRegistry(settings.schema_registry)
    models = Models(settings, registry=client)
    models.open()
    return models.catalog.lookup("fraud", None), client


def finish(_: Sequence[PendingTransform]) -> None:
    """Payloads that run alone are finished by the reading itself."""


async def test_payload_alone_waits_until_registry_is_back(tmp_path: Path) -> None:
    """Its schema is known then."""
    async with StandInRegistry({1: ("AVRO", SCHEMA)}) as registry:
        registry.is_unavailable = True
        version, client = version_of(tmp_path, registry)
        payload = PendingTransform(make_request(), version, FRAMED, "avro/binary")
        async with client, asyncio.TaskGroup() as tasks:
            waits = SchemaWaits(finish, lambda: NOW_US, QUICK)
            waiting = tasks.create_task(waits.fetch_alone(payload))
            await eventually(lambda: len(registry.requests) > 2, what="it asked again")
            assert not waiting.done()
            registry.is_unavailable = False

    assert version.records is not None
    assert version.records.framed is not None
    assert version.records.framed.find_unknown(FRAMED) is None
    assert (payload.error, payload.request.failure) == (None, None)


@pytest.mark.parametrize("fault", ["unknown", "late"])
async def test_payload_alone_that_has_no_schema_in_time_ends(tmp_path: Path, fault: str) -> None:
    """With the registry's refusal, or the failure of its deadline."""
    async with StandInRegistry() as registry:
        registry.is_unavailable = fault == "late"
        version, client = version_of(tmp_path, registry)
        request = make_request(deadline_ms=NOW_US // 1000 - 1 if fault == "late" else 0)
        payload = PendingTransform(request, version, FRAMED, "avro/binary")
        async with client:
            await SchemaWaits(finish, lambda: NOW_US, QUICK).fetch_alone(payload)

    if fault == "late":
        assert request.failure is not None
        assert request.failure.code == Code.DEADLINE_EXCEEDED
    else:
        assert payload.error is not None
        assert payload.error.code == Code.INVALID_REQUEST


@pytest.mark.parametrize("end", ["late", "cancelled"])
async def test_payload_ends_while_registry_hangs(tmp_path: Path, end: str) -> None:
    """Its deadline is not that of the request to the registry."""
    async with StandInRegistry() as registry:
        registry.holds = True
        version, client = version_of(tmp_path, registry)
        clock = StillClock(NOW_US)
        origin = Envelope(deadline_ms=NOW_US // 1000 + 1, correlation_id=b"mine")
        request = make_request(envelope=origin)
        cancelling = make_request(envelope=Envelope(cancels=BY_CORRELATION, correlation_id=b"mine"))
        finished: list[PendingTransform] = []
        async with client, asyncio.TaskGroup() as tasks:
            waits = SchemaWaits(finished.extend, clock, QUICK)
            running = tasks.create_task(waits.run())
            waits.add(PendingTransform(request, version, FRAMED, "avro/binary"))
            await eventually(lambda: registry.requests, what="the registry is asked")
            if end == "late":
                clock.now_us += 1000
            else:
                assert waits.cancel([cancelling]) == [request]
            await eventually(lambda: finished, what="it is passed on")
            running.cancel()

    assert request.failure is not None
    assert request.failure.code == (Code.DEADLINE_EXCEEDED if end == "late" else Code.CANCELLED)


async def test_unknown_schemas_of_a_run_are_requested_together(tmp_path: Path) -> None:
    """Each takes as long as the registry does; several records of one schema need one request."""
    async with StandInRegistry() as registry:
        registry.holds = True
        version, client = version_of(tmp_path, registry)
        assert version.records is not None
        requests = [make_request() for _ in range(6)]
        for number, request in enumerate(requests):
            request.value = b"\0\0\0\0" + bytes([number // 2]) + b"order"
        async with client, asyncio.TaskGroup() as tasks:
            passing = tasks.create_task(pass_through(requests, version.records))
            await eventually(lambda: len(registry.requests) == 3, what="all were asked for")
            passing.cancel()

    assert sorted(registry.requests) == [f"GET /schemas/ids/{number}" for number in range(3)]


async def test_run_request_ends_at_its_deadline_while_registry_hangs(tmp_path: Path) -> None:
    """Its instance would otherwise wait as long as a request to the registry may take."""
    async with StandInRegistry() as registry:
        registry.holds = True
        version, client = version_of(tmp_path, registry)
        assert version.records is not None
        request = make_request(deadline_ms=wall_clock_us() // 1000 + 200)
        request.value = FRAMED
        async with client, asyncio.TaskGroup() as tasks:
            passing = tasks.create_task(pass_through([request], version.records))
            await eventually(passing.done, what="the request has ended")

    assert request.failure is not None
    assert request.failure.code == Code.DEADLINE_EXCEEDED


async def test_payload_read_while_its_partition_leaves_is_left_in_the_log(tmp_path: Path) -> None:
    """A drain would wait for the registry otherwise: the rest of a chunk is still being read."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    assignment = tracker.assign(TopicPartition("requests", 0), AckedOffsets(0))
    async with StandInRegistry() as registry:
        version, client = version_of(tmp_path, registry)
        async with client:
            waits = SchemaWaits(finish, lambda: NOW_US, QUICK)
            assignment.leaving = True
            waits.drop_revoked()
            request = make_request()
            request.ack_handle = assignment.admit(0, 10)
            waits.add(PendingTransform(request, version, FRAMED, "avro/binary"))

    assert tracker.unfinished() == 0
    assert tracker.budget.used_bytes == 0
    assert list(assignment.deferred) == [0]
