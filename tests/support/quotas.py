"""Client quotas of a broker: how many bytes a second the producers of one client id may write.

aiokafka has no request for it. Source: `AlterClientQuotasRequest.json` and
`AlterClientQuotasResponse.json`, version 0.
"""

from __future__ import annotations

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

_ENTITY = Array(("type", String("utf-8")), ("name", String("utf-8")))


class _Response(Response):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 49
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "entries",
            Array(("error_code", Int16), ("error_message", String("utf-8")), ("entity", _ENTITY)),
        ),
    )


class _RequestV0(RequestStruct):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        (
            "entries",
            Array(
                ("entity", _ENTITY),
                (
                    "operations",
                    Array(("key", String("utf-8")), ("value", Float64), ("remove", Boolean)),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class _AlterQuota(Request[_RequestV0]):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 49

    def __init__(self, client_id: str, quota: str, value: float | None) -> None:
        operation = (quota, 0.0 if value is None else value, value is None)
        self._entries = [([("client-id", client_id)], [operation])]

    def build(self, request_struct_class: type[_RequestV0]) -> _RequestV0:
        return request_struct_class(self._entries, False)


async def limit_producers(
    bootstrap_servers: str, client_id: str, bytes_per_second: float | None
) -> None:
    """Set the `producer_byte_rate` of a client id on every broker; None takes it away."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap_servers)
    await client.bootstrap()
    try:
        request = _AlterQuota(client_id, "producer_byte_rate", bytes_per_second)
        response = await client.send(client.get_random_node(), request)
        for code, message, _ in response.entries:
            if code:
                raise for_code(code)(message)
    finally:
        await client.close()
