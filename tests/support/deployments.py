"""Deployments under traffic, for tests that do something to the brokers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from aiokafka.admin import AIOKafkaAdminClient

from tests.support.conditions import eventually
from tests.support.processes import Process, create_topics, environment
from tests.support.traffic import PARTITIONS, Traffic

MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"
ALL = "ingest,batcher,executor,responder"
ONE_NODE = {"TOPICS__REPLICATION_FACTOR": "1"}
GUARANTEES = ("at_least_once", "exactly_once")


def settings_for(
    servers: str, namespace: str, guarantee: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a process; three replicas of everything unless told otherwise."""
    return environment(
        servers,
        namespace,
        MODELS,
        KAFKA__SESSION_TIMEOUT_MS="6000",
        DELIVERY__GUARANTEE=guarantee,
        TOPICS__PARTITIONS=str(PARTITIONS),
        **{"TOPICS__REPLICATION_FACTOR": "3", **more},
    )


@asynccontextmanager
async def deployment(
    servers: str,
    namespace: str,
    guarantee: str,
    more: Mapping[str, str] | None = None,
    *,
    outside: str = "",
) -> AsyncIterator[tuple[Process, Traffic]]:
    """All four stages in a process, with traffic that flows, by other addresses where told so."""
    settings = settings_for(servers, namespace, guarantee, more or {})
    await create_topics(settings)
    async with (
        Process(ALL, settings) as process,
        Traffic(outside or servers, namespace) as traffic,
    ):
        try:
            await traffic.flows()
            yield process, traffic
        except BaseException as error:
            error.add_note(process.output[-8000:])
            raise


class Deployed(NamedTuple):
    """A process under one of the guarantees, in a namespace of its own."""

    guarantee: str
    namespace: str
    process: Process
    traffic: Traffic

    def require_nothing_lost(self) -> None:
        """Each request has an answer, and exactly one where that is the guarantee."""
        require_nothing_lost(self.traffic, self.guarantee)


@asynccontextmanager
async def deployments(
    servers: str, name: str, more: Mapping[str, str] | None = None
) -> AsyncIterator[list[Deployed]]:
    """Start a deployment under each guarantee, so that both meet the same trouble."""
    async with AsyncExitStack() as stack:
        found = []
        for guarantee in GUARANTEES:
            namespace = f"{name}-{guarantee.replace('_', '-')}"
            entering = deployment(servers, namespace, guarantee, more)
            process, traffic = await stack.enter_async_context(entering)
            found.append(Deployed(guarantee, namespace, process, traffic))
        yield found


async def all_flow(deployed: Sequence[Deployed], more: int = 25) -> None:
    """Wait until each of them has answered so many more requests."""
    await asyncio.gather(*[each.traffic.flows(more) for each in deployed])


async def unready(process: Process, deadline_s: float) -> None:
    """Wait until it says that it is not ready."""

    async def is_unready() -> bool:
        return not await process.is_ready()

    await eventually(is_unready, deadline_s=deadline_s, recheck_s=0.2)


def require_nothing_lost(traffic: Traffic, guarantee: str) -> None:
    """Require an answer of the model to each request, and exactly one where that is guaranteed."""
    assert set(traffic.counts) == set(range(traffic.sent))
    assert set(traffic.codes) == {"ok"}
    if guarantee == "exactly_once":
        assert traffic.doubled == set()


@asynccontextmanager
async def administration(servers: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A client for what an operator does to topics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
