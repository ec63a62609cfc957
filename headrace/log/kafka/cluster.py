"""Inspect a cluster without changing it: its release, settings, rights and replicas.

Rights are learned from how requests are refused, or from the bits that brokers report about them
(KIP-430). The requests that could change something carry ids that do not exist, and go to any
broker: each broker checks the rights first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import NodeNotReadyError
from aiokafka.protocol.admin import (
    ApiVersionRequest,
    DescribeClientQuotasRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.transaction import AddOffsetsToTxnRequest
from aiokafka.protocol.types import Array, Boolean, Int16, Int32, Schema, String

from headrace.config import KafkaSettings
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, broker_error

_BROKER: Final = 4  # ConfigResource.Type.BROKER
_UNKNOWN_RIGHTS: Final = -(2**31)
_FETCH: Final = 1
_DESCRIBE_TRANSACTIONS: Final = 65
_UNKNOWN_MEMBER_ID: Final = "headrace-doctor"


class Right(IntEnum):
    """An operation on a topic. Source: `org.apache.kafka.common.acl.AclOperation`."""

    READ = 3
    WRITE = 4


class DescribedTopic(NamedTuple):
    """A topic as the cluster describes it.

    Attributes:
        rights: what we may do with it; None if the broker does not say.
        replicas: the number of replicas of the partition that has the fewest.
        in_sync: the number of in-sync replicas of the partition that has the fewest.
    """

    rights: frozenset[Right] | None
    replicas: int
    in_sync: int


class ClientQuota(NamedTuple):
    """The limits of the clients of one user, one client id, or both.

    Attributes:
        entity: the names by kind, `user` and `client-id` among others; None for all names that have
            no limits of their own.
        limits: values by Kafka's names, such as `producer_byte_rate`.
    """

    entity: Mapping[str, str | None]
    limits: Mapping[str, float]


class ClusterInfo(NamedTuple):
    """The result of `survey`.

    Attributes:
        release: the oldest release that the brokers can be, major and minor.
        settings: one broker's settings, by Kafka's names; None if we may not read them.
        topics: the topics that exist and that we may describe.
        forbidden_topics: the topics that we may not describe.
        may_join: whether we may join the group.
        may_transact: whether we may use the transactional id.
        quotas: of all clients; none if we may not read them, or the broker cannot describe them.
    """

    release: tuple[int, int]
    settings: Mapping[str, str] | None
    topics: Mapping[str, DescribedTopic]
    forbidden_topics: frozenset[str]
    may_join: bool
    may_transact: bool
    quotas: Sequence[ClientQuota] = ()


class _MetadataResponse(Response):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            Array(
                ("node_id", Int32),
                ("host", String("utf-8")),
                ("port", Int32),
                ("rack", String("utf-8")),
            ),
        ),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("cluster_authorized_operations", Int32),
    )


class _MetadataRequestV8(RequestStruct):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class _MetadataRequest(Request[_MetadataRequestV8]):  # type: ignore[misc]  # aiokafka publishes no types
    """aiokafka's own request ends with version 5, which does not report rights."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = list(topics)

    def build(self, request_struct_class: type[_MetadataRequestV8]) -> _MetadataRequestV8:
        return request_struct_class(self._topics, False, False, True)


async def survey(
    settings: KafkaSettings, topics: Sequence[str], group: str, transactional_id: str
) -> ClusterInfo:
    """Query one of the brokers.

    Raises:
        LogUnavailable: no broker answers.
        LogAuthenticationFailed: the broker refuses us, or we its certificate.
        ConfigurationError: a file that the settings name cannot be used.
    """
    connection = Connection(settings)
    client = await connection.open_client()
    try:
        async with answered("survey", connection.request_timeout_s):
            node = client.get_random_node()
            if node is None:
                raise NodeNotReadyError("no broker is known")
            found, forbidden = await _query_topics(client, node, topics)
            return ClusterInfo(
                await _query_release(client, node),
                await _query_settings(client, node),
                found,
                forbidden,
                await _may_join(client, node, group),
                await _may_transact(client, node, transactional_id, group),
                await _query_quotas(client, node),
            )
    finally:
        await connection.close_client(client)


async def _query_release(client: AIOKafkaClient, node: int) -> tuple[int, int]:
    response = await client.send(node, ApiVersionRequest())
    return oldest_release(
        {key: (lowest, highest) for key, lowest, highest in response.api_versions}
    )


def oldest_release(versions: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the oldest release (major, minor) that a broker can be; (0, 0) when older than 3.0.

    Brokers do not report their release. They report the supported versions of each request, and
    some of those were added, or lost their old versions, in one release: KIP-896 removed Fetch
    below version 4 with Kafka 4.0 (old versions of Produce are still listed, for clients that
    insist on them), and KIP-664 added DescribeTransactions with 3.0.

    Args:
        versions: the lowest and highest supported version, by API key.
    """
    if versions.get(_FETCH, (0, 0))[0] >= 4:
        return 4, 0
    return (3, 0) if _DESCRIBE_TRANSACTIONS in versions else (0, 0)


async def _query_settings(client: AIOKafkaClient, node: int) -> Mapping[str, str] | None:
    request = DescribeConfigsRequest([(_BROKER, str(node), None)])
    response = await client.send(node, request)
    ((code, message, _kind, _name, entries),) = response.resources
    error = broker_error(code, message or "broker settings")
    if isinstance(error, kafka_errors.ClusterAuthorizationFailedError):
        return None
    if error is not None:
        raise error
    return {entry[0]: entry[1] for entry in entries if entry[1] is not None}


async def _query_quotas(client: AIOKafkaClient, node: int) -> list[ClientQuota]:
    try:
        response = await client.send(node, DescribeClientQuotasRequest([], strict=False))
    except kafka_errors.IncompatibleBrokerVersion:
        return []
    error = broker_error(response.error_code, response.error_message or "client quotas")
    if isinstance(error, kafka_errors.ClusterAuthorizationFailedError):
        return []
    if error is not None:
        raise error
    return [ClientQuota(dict(entity), dict(limits)) for entity, limits in response.entries or ()]


async def _query_topics(
    client: AIOKafkaClient, node: int, topics: Sequence[str]
) -> tuple[Mapping[str, DescribedTopic], frozenset[str]]:
    response = await client.send(node, _MetadataRequest(topics))
    found: dict[str, DescribedTopic] = {}
    forbidden: set[str] = set()
    for code, name, _internal, partitions, bits in response.topics:
        error = broker_error(code, name)
        if isinstance(error, kafka_errors.TopicAuthorizationFailedError):
            forbidden.add(name)
        elif error is None:
            found[name] = DescribedTopic(
                _rights(bits),
                min((len(each[4]) for each in partitions), default=0),
                min((len(each[5]) for each in partitions), default=0),
            )
    return found, frozenset(forbidden)


def _rights(bits: int) -> frozenset[Right] | None:
    if bits == _UNKNOWN_RIGHTS:
        return None
    return frozenset(right for right in Right if bits >> right & 1)


async def _may_join(client: AIOKafkaClient, node: int, group: str) -> bool:
    response = await client.send(node, HeartbeatRequest(group, 0, _UNKNOWN_MEMBER_ID))
    return not _is_error(response.error_code, kafka_errors.GroupAuthorizationFailedError)


async def _may_transact(
    client: AIOKafkaClient, node: int, transactional_id: str, group: str
) -> bool:
    response = await client.send(node, AddOffsetsToTxnRequest(transactional_id, -1, -1, group))
    return not _is_error(response.error_code, kafka_errors.TransactionalIdAuthorizationFailed)


def _is_error(code: int, kind: Any) -> bool:
    return isinstance(broker_error(code), kind)
