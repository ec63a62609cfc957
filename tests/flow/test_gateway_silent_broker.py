"""A gateway in a process of its own is ready only while it hears from a broker."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.log.memory import MemoryLog
from headrace.runtime.log_factory import open_log
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.gateways import HOST, QUICK_CHANGES, pipeline_with_doors
from tests.support.models import add_version, digits

HASTY = replace(QUICK_CHANGES, runtime=replace(QUICK_CHANGES.runtime, broker_silence_s=0.05))


async def test_gateway_alone_is_not_ready_while_broker_is_silent(tmp_path: Path) -> None:
    """A balancer sends no call to it then; it is ready again with the first response."""
    add_version(tmp_path, "digits", 1, digits())
    settings = make_settings(
        {
            "models": {"repository": tmp_path},
            "gateway": {"grpc_host": HOST, "http_port": "off", "grpc_port": 0},
        }
    )
    async with (
        open_log(settings) as log,
        pipeline_with_doors(settings, log, (), TUNING.gateway, process_tuning=HASTY) as (
            pipeline,
            doors,
        ),
        grpc.aio.insecure_channel(f"{HOST}:{doors.ports['grpc']}") as channel,
    ):
        health, registry = pipeline.health, pipeline.metrics.registry
        faults = cast("MemoryLog", log).faults
        stub = health_pb2_grpc.HealthStub(channel)
        await eventually(lambda: health.ready)
        faults.brokers.take_down()
        await eventually(lambda: not health.ready)
        reason, live = health.ready_fault(), health.live
        checked = await stub.Check(health_pb2.HealthCheckRequest())
        silent_s = registry.get_sample_value(
            "headrace_log_last_contact_seconds", {"topic": "headrace.responses"}
        )
        faults.brokers.bring_back()
        await eventually(lambda: health.ready)

    assert reason.startswith("the broker was last heard of")
    assert live
    assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert silent_s is not None
    assert silent_s > 0.05
