"""Questions to a group's coordinator, and what is made of a broker's refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError

from headrace.log.kafka.admin import AdminClient
from headrace.log.port import Committed, TopicPartition

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
NOT_COORDINATOR, GROUP_FORBIDDEN, TOPIC_FORBIDDEN, NOT_LOADED = 16, 30, 29, 14
ILLEGAL_GENERATION, UNKNOWN_MEMBER, REBALANCING = 22, 25, 27


class Client:
    """Gives these answers one after the other, and says which nodes were asked."""

    def __init__(self, *answers: SimpleNamespace) -> None:
        self._answers = list(answers)
        self._lookups = 0
        self.asked: list[int] = []

    def get_random_node(self) -> int:
        return 1

    async def coordinator_lookup(self, kind: object, key: str) -> int:
        self._lookups += 1
        return self._lookups

    async def send(self, node: int, request: object, group: object = None) -> Any:
        self.asked.append(node)
        return self._answers.pop(0)


def admin_of(client: Client) -> AdminClient:
    """Repeats its requests to this client without a pause."""
    return AdminClient(cast(AIOKafkaClient, client), retry_s=0.0)


def fetched(*partitions: tuple[int, int, str, int], code: int = 0) -> SimpleNamespace:
    """An answer to OffsetFetch: number, offset, metadata and error of each partition."""
    found: list[tuple[int, int, int, str, int, dict[int, bytes]]] = [
        (number, offset, -1, metadata, error, {}) for number, offset, metadata, error in partitions
    ]
    return SimpleNamespace(error_code=code, topics=[("t", found, {})])


def beaten(code: int) -> SimpleNamespace:
    """An answer to a Heartbeat."""
    return SimpleNamespace(error_code=code)


GOOD = fetched((0, 7, "v1", 0), (1, -1, "", 0))


@pytest.mark.parametrize(
    "first",
    [
        SimpleNamespace(error_code=NOT_COORDINATOR, topics=[]),
        fetched((0, -1, "", NOT_COORDINATOR), (1, -1, "", NOT_COORDINATOR)),
        fetched((0, 7, "v1", 0), (1, -1, "", NOT_LOADED)),
        SimpleNamespace(error_code=0, topics=[]),
        fetched((0, 7, "v1", 0)),
    ],
    ids=["top-level", "each-partition", "loading", "silent", "incomplete"],
)
async def test_committed_offsets_are_retried_until_coordinator_answers(
    first: SimpleNamespace,
) -> None:
    """No error, and no answer that lacks a partition, is taken for "nothing committed"."""
    client = Client(first, GOOD)
    found = await admin_of(client).fetch_committed("g", [P0, P1])
    assert found == {P0: Committed(7, "v1"), P1: None}
    assert client.asked == [1, 2]  # the coordinator was looked up anew


async def test_refused_admin_request_is_not_retried() -> None:
    """It would be refused again."""
    client = Client(SimpleNamespace(error_code=GROUP_FORBIDDEN, topics=[]))
    with pytest.raises(GroupAuthorizationFailedError):
        await admin_of(client).fetch_committed("g", [P0])


async def test_refused_topic_settings_name_topic_and_right() -> None:
    """The broker's own message is the same for every topic and right."""
    message = "Topic authorization failed."
    client = Client(SimpleNamespace(resources=[(TOPIC_FORBIDDEN, message, 2, "orders", [])]))
    with pytest.raises(TopicAuthorizationFailedError, match="DescribeConfigs of orders"):
        await admin_of(client).topic_configs(["orders"])


@pytest.mark.parametrize(
    ("code", "counted_in"),
    [(0, True), (REBALANCING, True), (ILLEGAL_GENERATION, False), (UNKNOWN_MEMBER, False)],
)
async def test_membership_follows_answer_of_coordinator(code: int, counted_in: bool) -> None:
    """A member asked to rejoin is still a member; a moved coordinator is looked up again."""
    client = Client(beaten(NOT_COORDINATOR), beaten(code))
    assert await admin_of(client).is_member("g", 3, "me") is counted_in
    assert client.asked == [1, 2]
