"""The door for gRPC reports its own end to the health of its process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.gateway.gateway import Gateway
from headrace.gateway.grpc_door import GrpcDoor
from headrace.log.memory import MemoryLog
from headrace.models.registry import Models
from headrace.telemetry.health import Health
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics


async def test_process_is_not_live_once_door_accepts_no_calls(tmp_path: Path) -> None:
    """A supervisor starts it again; after a stop the end of the acceptors is no fault."""
    settings = make_settings(
        {"models": {"repository": tmp_path}, "gateway": {"grpc_host": "127.0.0.1"}}
    )
    health = Health()
    instruments = Instruments(Metrics(CollectorRegistry()))
    gateway = Gateway(settings, MemoryLog(), Models(settings).catalog, health, instruments)
    async with GrpcDoor(gateway, 0):
        before = health.live_fault()
        acceptors = [
            each for each in asyncio.all_tasks() if each.get_name().startswith("grpc-accept-")
        ]
        for each in acceptors:
            each.cancel()
        await asyncio.wait(acceptors)
        ended = health.live_fault()

    assert (before, health.live_fault()) == ("", "")
    assert ended == "gRPC calls are no longer accepted: the server has ended"
