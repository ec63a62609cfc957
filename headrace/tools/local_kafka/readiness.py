"""Check whether a broker serves clients, by connecting as a client."""

from __future__ import annotations

import asyncio

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

_ATTEMPT_TIMEOUT_S = 5.0


async def listens(host: str, port: int) -> bool:
    """Return whether something accepts connections there."""
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def known_brokers(bootstrap_servers: str) -> frozenset[int]:
    """Return the ids of the brokers that this one lists; empty while it does not answer."""
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap_servers,
        request_timeout_ms=int(_ATTEMPT_TIMEOUT_S * 1000),
        client_id="headrace-local-kafka",
    )
    try:
        async with asyncio.timeout(2 * _ATTEMPT_TIMEOUT_S):
            await admin.start()
            cluster = await admin.describe_cluster()
    except (KafkaError, OSError, TimeoutError):
        return frozenset()
    finally:
        await admin.close()
    return frozenset(broker["node_id"] for broker in cluster["brokers"])
