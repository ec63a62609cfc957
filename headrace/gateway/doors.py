"""The doors of a gateway together: which are open, and how they drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

import structlog

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import HttpDoor
from headrace.log.port import Log
from headrace.models.index import RepositoryIndex
from headrace.telemetry.file_refresh import read_first, refreshing
from headrace.telemetry.health import Health
from headrace.telemetry.http import ServedModels
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import GatewaySnapshot
from headrace.tuning import TUNING, GatewayTuning

log = structlog.get_logger(__name__)


class Door(Protocol):
    """A server for one protocol; entering starts it, leaving stops it."""

    @property
    def port(self) -> int: ...
    @property
    def untaken_bytes(self) -> int: ...
    async def stop_listening(self) -> None: ...


class Doors:
    """The open doors of a gateway, by the name of their protocol.

    Args:
        gateway: an open one.
        doors: started.
    """

    def __init__(self, gateway: Gateway, doors: Mapping[str, Door]) -> None:
        self._gateway = gateway
        self._doors = doors

    @property
    def ports(self) -> dict[str, int]:
        """The port that each door listens on."""
        return {name: door.port for name, door in self._doors.items()}

    def snapshot(self) -> GatewaySnapshot:
        """Return the state that the metrics show."""
        untaken_bytes = {name: door.untaken_bytes for name, door in self._doors.items()}
        return self._gateway.snapshot(untaken_bytes)

    async def give_notice(self) -> None:
        """Take requests for `gateway.drain_notice_s` more, each answer the last of its connection.

        Readiness has ended before: balancers can see that meanwhile.
        """
        self._gateway.draining.set()
        await asyncio.sleep(self._gateway.settings.drain_notice_s)

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, and answer what is under way, for up to `timeout_s`."""
        gateway = self._gateway
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                for name, door in self._doors.items():
                    tasks.create_task(door.stop_listening(), name=f"stop-{name}")
                silence = gateway.under_way.wait_for_silence(gateway.tuning.drain_silence_s)
                tasks.create_task(silence, name="gateway-silence")
        except TimeoutError:
            log.warning(Event.DRAIN_INCOMPLETE, reason="callers of the gateway still wait")


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    log: Log,
    models: ServedModels,
    health: Health,
    instruments: Instruments,
    repository: RepositoryIndex | None = None,
    tuning: GatewayTuning = TUNING.gateway,
) -> AsyncIterator[Doors]:
    """Open a gateway and those of its doors that are not off, while the context lasts.

    Args:
        settings: `gateway`, and the names of the topics.
        log: an open log.
        models: the models that the metadata describes.
        health: of the process; the doors are ready while it is.
        instruments: count its requests and trace them.
        repository: lists the models, and changes them; by default calls cannot change them.
        tuning: tuning values of the gateway.

    Raises:
        Fatal: an address is taken, or is not this machine's.
        ConfigurationError: all doors are off; or as `headrace.client.Client`.
        LogUnavailable, LogAuthenticationFailed: see `headrace.client.Client`.
    """
    chosen = settings.gateway
    async with AsyncExitStack() as stack:
        gateway = await read_first(
            partial(Gateway, settings, log, models, health, instruments, repository, tuning),
            tuning.access.first_read_timeout_s,
        )
        await stack.enter_async_context(gateway)
        await stack.enter_async_context(
            refreshing(gateway.files, tuning.access.file_check_interval_s)
        )
        doors: dict[str, Door] = {}
        if chosen.http_port != "off":
            doors["http"] = await stack.enter_async_context(HttpDoor(gateway, chosen.http_port))
        if chosen.grpc_port != "off":
            from headrace.gateway.grpc_door import GrpcDoor  # gRPC takes 0.3 s to import

            grpc_door = GrpcDoor(gateway, chosen.grpc_port)
            doors["grpc"] = await stack.enter_async_context(grpc_door)
        if not doors:
            raise ConfigurationError("gateway: expected a door that is open, got all of them off")
        try:
            yield Doors(gateway, doors)
        finally:
            gateway.under_way.end()  # the doors give what still waits a second to be answered
