"""A broker with access rules, and rules for its topics."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.admin import CreateAclsRequest

AUTHORIZER: Final[Mapping[str, str]] = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
"""Broker settings: everything is allowed on what no rule is about."""

_LITERAL = 3
_ALLOW = 3


class Resource(IntEnum):
    """Subject of a rule. Source: `org.apache.kafka.common.resource.ResourceType`."""

    TOPIC = 2
    GROUP = 3
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    """Operation that a rule allows. Source: `org.apache.kafka.common.acl.AclOperation`."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DESCRIBE = 8


async def allow_only(
    bootstrap_servers: str,
    name: str,
    operation: Operation,
    resource: Resource = Resource.TOPIC,
) -> None:
    """Allow everybody this on a resource, and with that nothing else."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap_servers)
    await client.bootstrap()
    try:
        request = CreateAclsRequest(resource, name, _LITERAL, "User:*", "*", operation, _ALLOW)
        response = await client.send(client.get_random_node(), request)
        ((code, message),) = response.creation_responses
        if code:
            raise for_code(code)(message)
    finally:
        await client.close()
