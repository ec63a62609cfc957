"""Which Kafka a broker is, as far as it lets clients know.

Brokers do not tell their release. They tell which requests they take, and some of those came, or
lost their old forms, with one release: KIP-896 removed Fetch below version 4 with Kafka 4.0 (of
Produce the old versions are still listed, for clients that insist on them), and KIP-664 brought
DescribeTransactions with 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiokafka.errors import NodeNotReadyError
from aiokafka.protocol.admin import ApiVersionRequest

from headrace.config import KafkaSettings
from headrace.log.kafka_closing import close_client
from headrace.log.kafka_connection import Connection
from headrace.log.kafka_errors import answered

FETCH: Final = 1
DESCRIBE_TRANSACTIONS: Final = 65


def oldest_release(versions: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """The oldest release, major and minor, that a broker can be; (0, 0) when older than 3.0.

    Args:
        versions: the lowest and highest version taken, by the request's key.
    """
    if versions.get(FETCH, (0, 0))[0] >= 4:
        return 4, 0
    return (3, 0) if DESCRIBE_TRANSACTIONS in versions else (0, 0)


async def ask_release(settings: KafkaSettings) -> tuple[int, int]:
    """`oldest_release` of one of the brokers.

    Raises:
        LogUnavailable: no broker answers.
        LogAuthenticationFailed: it refuses us, or we its certificate.
        ConfigurationError: a file that the settings name cannot be used.
    """
    connection = Connection(settings)
    client = await connection.open_client()
    try:
        async with answered("API versions", connection.request_timeout_s):
            node = client.get_random_node()
            if node is None:
                raise NodeNotReadyError("no broker is known")
            response = await client.send(node, ApiVersionRequest())
    finally:
        await close_client(client)
    return oldest_release(
        {key: (lowest, highest) for key, lowest, highest in response.api_versions}
    )
