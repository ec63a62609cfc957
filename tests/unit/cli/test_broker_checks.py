"""The doctor's checks of a cluster: harmful settings, missing rights, replicas."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.broker_checks import (
    check_broker_settings,
    check_quotas,
    check_replicas,
    check_rights,
)
from headrace.cli.findings import Severity
from headrace.config import Settings, make_settings
from headrace.log.kafka.cluster import ClientQuota, ClusterInfo, DescribedTopic, Right
from headrace.log.port import TopicInfo
from headrace.topics import Topic

BOTH = frozenset(Right)
GOOD = {
    "offset.metadata.max.bytes": "4096",
    "offsets.retention.minutes": "10080",
    "transaction.max.timeout.ms": "900000",
    "group.coordinator.append.linger.ms": "5",
    "group.min.session.timeout.ms": "6000",
    "group.max.session.timeout.ms": "1800000",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
}


def settings(guarantee: str = "at_least_once", mode: str = "all", **kafka: int) -> Settings:
    return make_settings(
        {
            "kafka": {"bootstrap_servers": "broker:9092", **kafka},
            "delivery": {"guarantee": guarantee},
            "models": {"mode": mode},
            "topics": {"replication_factor": 3},
        }
    )


def survey(**changes: Any) -> ClusterInfo:
    topics = {f"headrace.{topic}": DescribedTopic(BOTH, 3, 3) for topic in Topic}
    return ClusterInfo((4, 0), GOOD, topics, frozenset(), True, True)._replace(**changes)


def test_doctor_reports_nothing_for_good_broker_settings() -> None:
    """Kafka's own defaults pass, for either guarantee."""
    assert not list(check_broker_settings(settings("exactly_once"), GOOD))


@pytest.mark.parametrize(
    ("name", "value", "health"),
    [
        ("offset.metadata.max.bytes", "4095", Severity.ERROR),
        ("offsets.retention.minutes", "60", Severity.ERROR),
        ("offsets.retention.minutes", "1440", Severity.WARNING),
        ("transaction.max.timeout.ms", "9999", Severity.ERROR),
        ("group.coordinator.append.linger.ms", "101", Severity.WARNING),
        ("group.min.session.timeout.ms", "30001", Severity.ERROR),
        ("group.max.session.timeout.ms", "29999", Severity.ERROR),
        ("offsets.topic.replication.factor", "1", Severity.WARNING),
        ("transaction.state.log.replication.factor", "1", Severity.WARNING),
    ],
)
def test_doctor_reports_harmful_broker_setting(name: str, value: str, health: Severity) -> None:
    """One line with the setting, what was expected, what is there, why, and the fix."""
    (finding,) = check_broker_settings(settings("exactly_once"), GOOD | {name: value})
    assert finding.health is health
    assert finding.text.startswith(f"{name}: expected ")
    assert f"got {value}: " in finding.text
    assert finding.fix == f"set {name} on the brokers"


def test_doctor_ignores_transaction_settings_for_at_least_once() -> None:
    """At-least-once delivery needs no transactional producer."""
    assert not list(
        check_broker_settings(settings(), GOOD | {"transaction.max.timeout.ms": "1000"})
    )


def test_doctor_reports_unreadable_broker_settings() -> None:
    """It is a warning that they were not checked, and how they can be."""
    (finding,) = check_broker_settings(settings(), None)
    assert (finding.health, "DescribeConfigs" in finding.fix) == (Severity.WARNING, True)


def test_doctor_reports_nothing_for_complete_rights() -> None:
    """Rights that a broker does not report, or of topics not created yet, give no line either."""
    topics = {"headrace.requests": DescribedTopic(None, 3, 3)}
    assert not list(check_rights(settings("exactly_once"), survey()))
    assert not list(check_rights(settings(), survey(topics=topics)))


def test_forbidden_group_is_doctor_error() -> None:
    """Nothing can be read without the group."""
    (finding,) = check_rights(settings(), survey(may_join=False))
    assert (finding.health, finding.subject) == (Severity.ERROR, "rights")


@pytest.mark.parametrize(("guarantee", "count"), [("exactly_once", 1), ("at_least_once", 0)])
def test_forbidden_transactional_id_is_doctor_error(guarantee: str, count: int) -> None:
    """It is an error where transactions are asked for, and named with its prefix."""
    found = list(check_rights(settings(guarantee), survey(may_transact=False)))
    assert len(found) == count
    assert all("headrace.headrace.requests.0" in each.text for each in found)


@pytest.mark.parametrize(
    ("topic", "rights", "text"),
    [
        ("responses", {Right.READ}, "Write is not allowed, which responder needs"),
        ("items", {Right.WRITE}, "Read is not allowed, which batcher needs"),
        ("results", {Right.READ}, "Write is not allowed, which ingest and batcher and executor"),
    ],
)
def test_doctor_reports_missing_right(topic: str, rights: set[Right], text: str) -> None:
    """It is a warning, since another process may be the one with that stage."""
    mine = DescribedTopic(frozenset(rights), 3, 3)
    topics = {**survey().topics, f"headrace.{topic}": mine}
    (finding,) = check_rights(settings(), survey(topics=topics))
    assert finding.health is Severity.WARNING
    assert text in finding.text


@pytest.mark.parametrize(
    ("mode", "stages"),
    [("all", "batcher"), ("explicit", "ingest and batcher and executor and responder")],
)
def test_doctor_names_every_stage_that_reads_events(mode: str, stages: str) -> None:
    """With the control topic, every stage needs what the others announce."""
    mine = DescribedTopic(frozenset({Right.WRITE}), 3, 3)
    topics = {**survey().topics, "headrace.events": mine}
    (finding,) = check_rights(settings(mode=mode), survey(topics=topics))
    assert f"Read is not allowed, which {stages} need" in finding.text


def test_doctor_reports_hidden_topic_as_without_rights() -> None:
    """Every right that the topic's stages need is reported missing."""
    topics = {name: each for name, each in survey().topics.items() if name != "headrace.items"}
    hidden = survey(topics=topics, forbidden_topics=frozenset({"headrace.items"}))
    assert len(list(check_rights(settings(), hidden))) == 2


@pytest.mark.parametrize(
    ("replicas", "in_sync", "least", "health"),
    [
        (3, 3, "2", None),
        (3, 2, "2", None),
        (1, 1, "1", None),
        (1, 1, "2", Severity.ERROR),
        (3, 1, "2", Severity.ERROR),
        (2, 2, "2", Severity.WARNING),
    ],
)
def test_doctor_compares_replicas_with_min_in_sync(
    replicas: int, in_sync: int, least: str, health: Severity | None
) -> None:
    """Too few replicas ever, too few now, and none to spare are told apart."""
    found = survey(topics={"t": DescribedTopic(BOTH, replicas, in_sync)})
    existing = {"t": TopicInfo("t", 1, {"min.insync.replicas": least})}
    assert [each.health for each in check_replicas(found, existing)] == ([health] if health else [])


@pytest.mark.parametrize(
    ("entities", "whom"),
    [
        ([{"client-id": "headrace"}, {"client-id": None}], "client-id headrace"),
        ([{"client-id": "headrace"}, {"user": None}], "user <default>"),
        ([{"user": "ANONYMOUS"}, {"user": None, "client-id": "headrace"}], "user ANONYMOUS"),
        (
            [{"user": "ANONYMOUS"}, {"user": "ANONYMOUS", "client-id": None}],
            "user ANONYMOUS, client-id <default>",
        ),
        ([{"user": None}, {"user": "alice"}, {"client-id": "other"}], "user <default>"),
    ],
)
@pytest.mark.parametrize("step", [1, -1])
def test_doctor_reports_quota_that_kafka_prefers(
    entities: list[dict[str, str | None]], whom: str, step: int
) -> None:
    """The user counts before the client id, and a name before the default."""
    quotas = [ClientQuota(each, {"producer_byte_rate": len(str(each))}) for each in entities]
    (finding,) = check_quotas(settings(), quotas[::step])
    assert finding.text.startswith(f"quota of {whom}: producer_byte_rate is ")


def test_doctor_reports_no_quota_of_other_clients() -> None:
    """Nor one of addresses, which limits connections."""
    others: list[dict[str, str | None]] = [
        {"user": "alice"},
        {"client-id": "b"},
        {"ip": "127.0.0.1"},
    ]
    quotas = [ClientQuota(each, {"consumer_byte_rate": 1.0}) for each in others]
    assert not list(check_quotas(settings(), quotas))
