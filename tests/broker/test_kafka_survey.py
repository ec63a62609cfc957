"""Surveys of a real broker, with access rules and without."""

from __future__ import annotations

import pytest

from headrace.config import KafkaSettings
from headrace.log.kafka.cluster import ClientQuota, DescribedTopic, Right, survey
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicInfo
from headrace.tools.local_kafka import LocalKafka
from tests.support.acl import Operation, Resource, allow_only
from tests.support.conditions import eventually
from tests.support.quotas import limit_producers

pytestmark = pytest.mark.timeout(120)


async def test_survey_of_names_without_access_rules_reports_all_rights(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Everything is told and allowed; a topic that does not exist is left out."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with KafkaLog(settings) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
    found = await survey(settings, [unique_name, "missing"], unique_name, f"{unique_name}.0")
    assert found.release >= (4, 0)
    assert found.settings is not None
    assert found.settings["offset.metadata.max.bytes"] == "4096"
    assert found.topics == {unique_name: DescribedTopic(frozenset(Right), 1, 1)}
    assert (found.may_join, found.may_transact) == (True, True)


async def test_survey_reports_forbidden_topics_and_groups(
    kafka: LocalKafka, unique_name: str
) -> None:
    """A topic to read only, one that is hidden, and a group and an id that are another's."""
    servers = kafka.bootstrap_servers
    settings = KafkaSettings(bootstrap_servers=servers)
    readable, hidden, other = (f"{unique_name}.{kind}" for kind in ("readable", "hidden", "other"))
    async with KafkaLog(settings) as log:
        topics = [TopicInfo(name, 1, {}) for name in (readable, hidden)]
        await log.create_topics(topics, replication_factor=1)
    await allow_only(servers, readable, Operation.READ)
    await allow_only(servers, hidden, Operation.CREATE)
    await allow_only(servers, other, Operation.DESCRIBE, Resource.GROUP)
    await allow_only(servers, f"{other}.0", Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
    found = await survey(settings, [readable, hidden], other, f"{other}.0")
    assert found.topics == {readable: DescribedTopic(frozenset({Right.READ}), 1, 1)}
    assert found.forbidden_topics == {hidden}
    assert (found.may_join, found.may_transact) == (False, False)


async def test_survey_reports_quotas(kafka: LocalKafka, unique_name: str) -> None:
    """With the kind and the name of the clients that they are for."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    expected = ClientQuota({"client-id": unique_name}, {"producer_byte_rate": 1_500_000.0})

    async def is_reported() -> bool:
        return expected in (await survey(settings, [], "g", "g.0")).quotas

    await limit_producers(kafka.bootstrap_servers, unique_name, 1_500_000)
    await eventually(is_reported)  # a broker learns of it after the controller has answered
    await limit_producers(kafka.bootstrap_servers, unique_name, None)
