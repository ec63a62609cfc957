"""Requests about topics and groups that aiokafka does not make, or whose responses it truncates."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import (
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
)
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

from headrace.log.kafka.errors import UnstableOffsetCommit, broker_error
from headrace.log.port import Committed, GroupMember, TopicInfo, TopicPartition

_TOPIC: Final = 2  # ConfigResource.Type.TOPIC
_NO_OFFSET: Final = -1
_NO_MEMBER = (kafka_errors.IllegalGenerationError, kafka_errors.UnknownMemberIdError)
_ABSENT = (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.InvalidTopicError)
_ANY_ID = UUID(int=0)

T = TypeVar("T")


class TopicOutline(NamedTuple):
    """A topic's number of partitions, and its id, which no other topic has had."""

    partitions: int
    topic_id: str


class AdminClient:
    """Requests about topics and groups, retried while they can succeed.

    Every method raises aiokafka's errors; callers bound it in time and translate the errors
    (`headrace.log.kafka.errors.answered`).

    Args:
        client: a connected client, which may be used by others as well.
        retry_s: the pause before a request is repeated.
    """

    def __init__(self, client: AIOKafkaClient, retry_s: float) -> None:
        self._client = client
        self._retry_s = retry_s

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicOutline | None]:
        """Describe each topic; None if there is no such topic.

        Never makes the broker create a topic, and leaves the client's own list of topics alone.
        """
        if not topics:
            return {}
        response = await self._ask_any_node(TopicsRequest(topics))
        found: dict[str, TopicOutline | None] = dict.fromkeys(topics)
        for code, name, topic_id, _internal, partitions, *_ in response.topics:
            error = broker_error(code, name)
            if error is None:
                found[name] = TopicOutline(len(partitions), str(topic_id))
            elif not isinstance(error, _ABSENT):
                raise error
        return found

    async def partition_counts(self, topics: Sequence[str]) -> Mapping[str, int | None]:
        """Return the number of partitions of each topic; see `describe_topics`."""
        found = await self.describe_topics(topics)
        return {name: None if topic is None else topic.partitions for name, topic in found.items()}

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return the settings of each topic; a topic that does not exist is left out."""
        if not topics:
            return {}
        request = DescribeConfigsRequest([(_TOPIC, name, None) for name in topics])
        response = await self._ask_any_node(request)
        configs: dict[str, Mapping[str, str]] = {}
        for code, message, _kind, name, entries in response.resources:
            # A broker's message names neither the topic nor the right.
            error = broker_error(code, f"DescribeConfigs of {name}", message)
            if error is None:
                configs[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
            elif not isinstance(error, _ABSENT):
                raise error
        return configs

    async def create_topics(
        self, topics: Sequence[TopicInfo], replication_factor: int, timeout_ms: int
    ) -> Mapping[str, bool]:
        """Create topics through the controller; False for those that existed before."""
        request = CreateTopicsRequest(
            [
                (each.name, each.partitions, replication_factor, [], list(each.config.items()))
                for each in topics
            ],
            timeout_ms,
            validate_only=False,
        )

        async def attempt() -> Mapping[str, bool]:
            if self._client.cluster.controller is None:
                await self._client.force_metadata_update()
            controller = self._client.cluster.controller
            if controller is None:
                raise kafka_errors.BrokerNotAvailableError("no controller is known")
            response = await self._client.send(controller.nodeId, request)
            made: dict[str, bool] = {}
            for name, code, *message in response.topic_errors:
                error = broker_error(code, f"topic {name}", *message)
                if isinstance(error, kafka_errors.NotControllerError):
                    await self._client.force_metadata_update()
                existed = isinstance(error, kafka_errors.TopicAlreadyExistsError)
                if error is not None and not existed:
                    raise error
                made[name] = error is None
            return made

        return await self._retry(attempt)

    async def wait_until_known(self, topics: Sequence[str]) -> None:
        """Wait until a broker reports every topic; a new one appears shortly after its creation."""

        async def attempt() -> None:
            if None in (await self.partition_counts(topics)).values():
                raise kafka_errors.UnknownTopicOrPartitionError("not known to every broker yet")

        await self._retry(attempt)

    async def fetch_committed(
        self,
        group: str,
        partitions: Iterable[TopicPartition],
        stable_timeout_s: float | None = None,
    ) -> Mapping[TopicPartition, Committed | None]:
        """Return the offsets and metadata that a group has committed, from its coordinator.

        With `stable_timeout_s` it waits for the end of open transactions that commit one of them,
        and raises `UnstableOffsetCommit` after this time; without, it returns the former offset.
        """
        asked: dict[str, list[int]] = defaultdict(list)
        for partition in partitions:
            asked[partition.topic].append(partition.partition)
        if not asked:
            return {}
        request = OffsetsRequest(group, asked, is_stable=stable_timeout_s is not None)
        wanted = {
            TopicPartition(topic, each) for topic, numbers in asked.items() for each in numbers
        }

        async def attempt() -> Mapping[TopicPartition, Committed | None]:
            found = committed_in(group, await self._ask_coordinator(group, request))
            if missing := wanted - found.keys():
                raise kafka_errors.NotCoordinatorForGroupError(f"no answer for {sorted(missing)}")
            return found

        deadline_s = time.monotonic() + (stable_timeout_s or 0.0)
        while True:
            try:
                return await self._retry(attempt)
            except UnstableOffsetCommit:
                if time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(self._retry_s)

    async def commit_without_members(
        self, group: str, offsets: Mapping[TopicPartition, Committed]
    ) -> None:
        """Commit like a consumer that assigns partitions to itself: a broker accepts this from any
        client while the group is empty.
        """
        if not offsets:
            return
        commits: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (topic, number), (offset, metadata) in offsets.items():
            commits[topic].append((number, offset, metadata))
        request = OffsetCommitRequest(
            group,
            OffsetCommitRequest.DEFAULT_GENERATION_ID,
            "",
            OffsetCommitRequest.DEFAULT_RETENTION_TIME,
            list(commits.items()),
        )

        async def attempt() -> None:
            response = await self._ask_coordinator(group, request)
            for topic, answers in response.topics:
                for number, code in answers:
                    if (error := broker_error(code, f"{topic}/{number}")) is not None:
                        raise error

        await self._retry(attempt)

    async def members(self, group: str) -> Sequence[GroupMember]:
        """Return the members of a group, from its coordinator."""
        request = DescribeGroupsRequest([group])

        async def attempt() -> Sequence[GroupMember]:
            response = await self._ask_coordinator(group, request)
            ((code, _, _state, _type, _protocol, found, *_),) = response.groups
            if (error := broker_error(code, group)) is not None:
                raise error
            return [GroupMember(member_id, host) for member_id, _client_id, host, *_ in found]

        return await self._retry(attempt)

    async def remove_member(self, group: str, member_id: str) -> bool:
        """Leave a group on a member's behalf; False if it was not a member."""
        request = LeaveGroupRequest(group, member_id)

        async def attempt() -> bool:
            response = await self._ask_coordinator(group, request)
            error = broker_error(response.error_code, group)
            if error is not None and not isinstance(error, _NO_MEMBER):
                raise error
            return error is None

        return await self._retry(attempt)

    async def is_member(self, group: str, generation: int, member_id: str) -> bool:
        """Return whether the group's coordinator counts a member in this generation.

        A member that is asked to rejoin for a rebalance still counts: its partitions have no other
        owner yet.
        """
        request = HeartbeatRequest(group, generation, member_id)

        async def attempt() -> bool:
            response = await self._ask_coordinator(group, request)
            error = broker_error(response.error_code, group)
            if error is None or isinstance(error, kafka_errors.RebalanceInProgressError):
                return True
            if isinstance(error, _NO_MEMBER):
                return False
            raise error

        return await self._retry(attempt)

    async def _ask_any_node(self, request: Any) -> Any:
        """Return the response of any broker."""

        async def attempt() -> Any:
            node = self._client.get_random_node()
            if node is None:
                raise kafka_errors.NodeNotReadyError("no broker is known")
            return await self._client.send(node, request)

        return await self._retry(attempt)

    async def _ask_coordinator(self, group: str, request: Any) -> Any:
        """Return the response of a group's coordinator, which is looked up each time."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group)
        return await self._client.send(node, request, group=ConnectionGroup.COORDINATION)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until it succeeds or fails for good; the caller's deadline ends it."""
        while True:
            try:
                return await attempt()
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(self._retry_s)


def committed_in(group: str, response: Any) -> dict[TopicPartition, Committed | None]:
    """Return the offsets in a response to `OffsetsRequest`.

    A broker that is not the coordinator may answer with an error for the whole, for each partition,
    or without partitions.

    Raises:
        KafkaError: the response has an error.
    """
    if (error := broker_error(response.error_code, group)) is not None:
        raise error
    found: dict[TopicPartition, Committed | None] = {}
    for topic, answers, _tags in response.topics:
        for number, offset, _epoch, metadata, code, _tags in answers:
            if (error := broker_error(code, f"{topic}/{number}")) is not None:
                raise error
            found[TopicPartition(topic, number)] = (
                None if offset == _NO_OFFSET else Committed(offset, metadata or "")
            )
    return found


# --- offset requests --------------------------------------------------------------------------
#
# aiokafka's own end with version 3. Since version 7, of Kafka 2.5 (KIP-447), the coordinator says
# if an open transaction commits an offset. Source: `OffsetFetchRequest.json` and
# `OffsetFetchResponse.json`.


class _OffsetFetchResponse(Response):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class _OffsetFetchRequestV7(RequestStruct):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _OffsetFetchResponse
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                ("partitions", CompactArray(Int32)),
                ("tags", TaggedFields),
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class OffsetsRequest(Request[_OffsetFetchRequestV7]):  # type: ignore[misc]  # aiokafka publishes no types
    """Asks a group's coordinator for committed offsets.

    Args:
        group: the group.
        partitions: numbers of partitions, by topic.
        is_stable: whether to answer `UNSTABLE_OFFSET_COMMIT` where an open transaction commits one.
    """

    API_KEY = 9

    def __init__(
        self, group: str, partitions: Mapping[str, Sequence[int]], *, is_stable: bool
    ) -> None:
        self._group = group
        self._topics: list[tuple[str, Sequence[int], dict[int, bytes]]] = [
            (topic, numbers, {}) for topic, numbers in partitions.items()
        ]
        self._is_stable = is_stable

    def build(self, request_struct_class: type[_OffsetFetchRequestV7]) -> _OffsetFetchRequestV7:
        return request_struct_class(self._group, self._topics, self._is_stable, {})


# --- metadata requests ------------------------------------------------------------------------
#
# aiokafka's own end with version 5. Responses contain topic ids since version 10, of Kafka 2.8
# (KIP-516). Source: `MetadataRequest.json` and `MetadataResponse.json`.


class _Uuid(AbstractType):  # type: ignore[misc]  # aiokafka publishes no types
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


_PARTITION = CompactArray(
    ("error_code", Int16),
    ("partition", Int32),
    ("leader", Int32),
    ("leader_epoch", Int32),
    ("replicas", CompactArray(Int32)),
    ("isr", CompactArray(Int32)),
    ("offline_replicas", CompactArray(Int32)),
    ("tags", TaggedFields),
)


class _FlexibleMetadataResponse(Response):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                ("partitions", _PARTITION),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _MetadataRequestV10(RequestStruct):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _FlexibleMetadataResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic_id", _Uuid), ("topic", CompactString("utf-8")), ("tags", TaggedFields)
            ),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicsRequest(Request[_MetadataRequestV10]):  # type: ignore[misc]  # aiokafka publishes no types
    """Describes topics by name; creates none. Each topic of the response starts with its error
    code, name, id, whether it is internal, and its partitions.
    """

    API_KEY = 3

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._topics: list[tuple[UUID, str, dict[int, bytes]]] = [
            (_ANY_ID, name, {}) for name in names
        ]

    def build(self, request_struct_class: type[_MetadataRequestV10]) -> _MetadataRequestV10:
        return request_struct_class(self._topics, False, False, False, {})
