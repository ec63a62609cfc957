"""Broker requests that aiokafka does not make, or whose responses it truncates.

Every function takes a connected client and raises aiokafka's errors; callers bound it in time and
translate the errors (`headrace.log.kafka.errors.answered`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import (
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
)
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest

from headrace.log.kafka.connection import RETRY_BACKOFF_S
from headrace.log.kafka.errors import broker_error
from headrace.log.kafka.metadata import TopicsRequest
from headrace.log.port import Committed, GroupMember, TopicInfo, TopicPartition

_TOPIC: Final = 2  # ConfigResource.Type.TOPIC
_NO_OFFSET: Final = -1
_NO_MEMBER = (kafka_errors.IllegalGenerationError, kafka_errors.UnknownMemberIdError)
_ABSENT = (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.InvalidTopicError)

T = TypeVar("T")


class Outline(NamedTuple):
    """A topic's number of partitions, and its id, which no other topic has had."""

    partitions: int
    topic_id: str


async def outlines(client: AIOKafkaClient, topics: Sequence[str]) -> Mapping[str, Outline | None]:
    """Describe each topic; None if there is no such topic.

    Never makes the broker create a topic, and leaves the client's own list of topics alone.
    """
    if not topics:
        return {}
    response = await _any_node(client, TopicsRequest(topics))
    found: dict[str, Outline | None] = dict.fromkeys(topics)
    for code, name, topic_id, _internal, partitions, *_ in response.topics:
        error = broker_error(code, name)
        if error is None:
            found[name] = Outline(len(partitions), str(topic_id))
        elif not isinstance(error, _ABSENT):
            raise error
    return found


async def partition_counts(
    client: AIOKafkaClient, topics: Sequence[str]
) -> Mapping[str, int | None]:
    """Return the number of partitions of each topic; see `outlines`."""
    found = await outlines(client, topics)
    return {name: None if topic is None else topic.partitions for name, topic in found.items()}


async def topic_configs(
    client: AIOKafkaClient, topics: Sequence[str]
) -> Mapping[str, Mapping[str, str]]:
    """Return the settings of each topic; a topic that does not exist is left out."""
    if not topics:
        return {}
    request = DescribeConfigsRequest([(_TOPIC, name, None) for name in topics])
    response = await _any_node(client, request)
    configs: dict[str, Mapping[str, str]] = {}
    for code, message, _kind, name, entries in response.resources:
        error = broker_error(code, message or name)
        if error is None:
            configs[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        elif not isinstance(error, _ABSENT):
            raise error
    return configs


async def create(
    client: AIOKafkaClient, topics: Sequence[TopicInfo], replication_factor: int, timeout_ms: int
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
        if client.cluster.controller is None:
            await client.force_metadata_update()
        controller = client.cluster.controller
        if controller is None:
            raise kafka_errors.BrokerNotAvailableError("no controller is known")
        response = await client.send(controller.nodeId, request)
        made: dict[str, bool] = {}
        for name, code, *message in response.topic_errors:
            error = broker_error(code, f"topic {name}", *message)
            if isinstance(error, kafka_errors.NotControllerError):
                await client.force_metadata_update()
            if error is not None and not isinstance(error, kafka_errors.TopicAlreadyExistsError):
                raise error
            made[name] = error is None
        return made

    return await _retried(attempt)


async def wait_until_known(client: AIOKafkaClient, topics: Sequence[str]) -> None:
    """Wait until a broker reports every topic; a new one appears shortly after its creation."""

    async def attempt() -> None:
        if None in (await partition_counts(client, topics)).values():
            raise kafka_errors.UnknownTopicOrPartitionError("not known to every broker yet")

    await _retried(attempt)


async def fetch_committed(
    client: AIOKafkaClient, group: str, partitions: Iterable[TopicPartition]
) -> Mapping[TopicPartition, Committed | None]:
    """Return the offsets and metadata that a group has committed, from its coordinator.

    aiokafka's consumer drops the metadata, and its admin client takes the empty response of a
    broker that is not the coordinator for "nothing committed"; so the top-level error and those of
    the partitions are checked here, and every requested partition must be in the response.
    """
    asked: dict[str, list[int]] = defaultdict(list)
    for partition in partitions:
        asked[partition.topic].append(partition.partition)
    if not asked:
        return {}
    request = OffsetFetchRequest(group, list(asked.items()))

    async def attempt() -> Mapping[TopicPartition, Committed | None]:
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        if (error := broker_error(getattr(response, "error_code", 0), group)) is not None:
            raise error
        found: dict[TopicPartition, Committed | None] = {}
        for topic, answers in response.topics:
            for number, offset, metadata, code in answers:
                if (error := broker_error(code, f"{topic}/{number}")) is not None:
                    raise error
                found[TopicPartition(topic, number)] = (
                    None if offset == _NO_OFFSET else Committed(offset, metadata or "")
                )
        missing = {TopicPartition(t, n) for t, ns in asked.items() for n in ns} - found.keys()
        if missing:
            raise kafka_errors.NotCoordinatorForGroupError(f"no answer for {sorted(missing)}")
        return found

    return await _retried(attempt)


async def commit_without_members(
    client: AIOKafkaClient, group: str, offsets: Mapping[TopicPartition, Committed]
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
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        for topic, answers in response.topics:
            for number, code in answers:
                if (error := broker_error(code, f"{topic}/{number}")) is not None:
                    raise error

    await _retried(attempt)


async def members(client: AIOKafkaClient, group: str) -> Sequence[GroupMember]:
    """Return the members of a group, from its coordinator."""
    request = DescribeGroupsRequest([group])

    async def attempt() -> Sequence[GroupMember]:
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        ((code, _, _state, _type, _protocol, found, *_),) = response.groups
        if (error := broker_error(code, group)) is not None:
            raise error
        return [GroupMember(*member[:3]) for member in found]

    return await _retried(attempt)


async def remove_member(client: AIOKafkaClient, group: str, member_id: str) -> bool:
    """Leave a group on a member's behalf; False if it was not a member."""
    request = LeaveGroupRequest(group, member_id)

    async def attempt() -> bool:
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        error = broker_error(response.error_code, group)
        if error is not None and not isinstance(error, _NO_MEMBER):
            raise error
        return error is None

    return await _retried(attempt)


async def is_counted_in(
    client: AIOKafkaClient, group: str, generation: int, member_id: str
) -> bool:
    """Return whether the group's coordinator counts a member in this generation.

    A member that is asked to rejoin for a rebalance still counts: its partitions have no other
    owner yet.
    """
    request = HeartbeatRequest(group, generation, member_id)

    async def attempt() -> bool:
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        error = broker_error(response.error_code, group)
        if error is None or isinstance(error, kafka_errors.RebalanceInProgressError):
            return True
        if isinstance(error, _NO_MEMBER):
            return False
        raise error

    return await _retried(attempt)


async def _any_node(client: AIOKafkaClient, request: Any) -> Any:
    """Return the response of any broker."""

    async def attempt() -> Any:
        node = client.get_random_node()
        if node is None:
            raise kafka_errors.NodeNotReadyError("no broker is known")
        return await client.send(node, request)

    return await _retried(attempt)


async def _retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry until it succeeds or fails for good; the caller's deadline ends it."""
    while True:
        try:
            return await attempt()
        except KafkaError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(RETRY_BACKOFF_S)
