"""The plan of topics, and which faults of existing ones count."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.config import Settings, make_settings
from headrace.log.port import TopicInfo
from headrace.runtime.topic_plan import compare, plan_topics, required_topics, topics_in_use
from headrace.topics import STAGES, Stage, Topic


def existing_as_planned(settings: Settings) -> dict[str, TopicInfo | None]:
    return {planned.name: planned for planned in plan_topics(settings).values()}


def changed(
    settings: Settings,
    topic: Topic,
    partitions: int | None = None,
    config: Mapping[str, str] | None = None,
) -> dict[str, TopicInfo | None]:
    """Topics as planned, but for one of them."""
    planned = plan_topics(settings)[topic]
    return existing_as_planned(settings) | {
        planned.name: TopicInfo(
            planned.name, partitions or planned.partitions, {**planned.config, **(config or {})}
        )
    }


def test_topics_as_planned_pass_check() -> None:
    """The comparison accepts the topics that the plan makes."""
    settings = make_settings({})
    assert compare(plan_topics(settings), existing_as_planned(settings)) == []


def test_topic_plan_follows_settings() -> None:
    """Partitions, names, retention and sizes come from the settings."""
    settings = make_settings(
        {
            "namespace": "vision",
            "topics": {
                "partitions": 12,
                "retention_ms": 5000,
                "internal_retention_ms": 800,
                "max_message_bytes": 2048,
                "names": {"requests": "incoming"},
            },
        }
    )
    plan = plan_topics(settings)
    assert plan[Topic.REQUESTS].name == "incoming"
    assert plan[Topic.ITEMS].name == "vision.items"
    by_settings = [planned for topic, planned in plan.items() if topic is not Topic.CONTROL]
    assert {planned.partitions for planned in by_settings} == {12}
    assert plan[Topic.REQUESTS].config == {
        "cleanup.policy": "delete",
        "retention.ms": "5000",
        "max.message.bytes": "2048",
        "retention.bytes": "-1",
    }
    assert plan[Topic.ITEMS].config["retention.ms"] == "800"
    assert plan[Topic.ITEMS].config["segment.ms"] == "100"


def test_plan_allows_batches_larger_than_requests() -> None:
    """A batches record has room for a full batch beside the values it came in."""
    plan = plan_topics(make_settings({"batching": {"max_batch_bytes": 1000}}))
    requests, batches = plan[Topic.REQUESTS], plan[Topic.BATCHES]
    difference = int(batches.config["max.message.bytes"]) - int(
        requests.config["max.message.bytes"]
    )
    assert difference == 1000


def test_plan_of_three_replicas_wants_two_in_sync() -> None:
    """With three replicas an acknowledged record lies on two brokers."""
    plan = plan_topics(make_settings({"topics": {"replication_factor": 3}}))
    assert plan[Topic.REQUESTS].config["min.insync.replicas"] == "2"


@pytest.mark.parametrize("topic", [Topic.ITEMS, Topic.RESULTS])
def test_topic_with_other_partition_count_than_requests_is_error(topic: Topic) -> None:
    """Items and results must have exactly the partitions of requests."""
    settings = make_settings({})
    (fault,) = compare(plan_topics(settings), changed(settings, topic, partitions=3))
    assert fault.blocking
    assert str(fault) == (
        f"headrace.{topic}: expected the 4 partitions of headrace.requests, got 3; "
        "add partitions until it has 4"
    )


def test_partition_counts_are_compared_with_existing_requests() -> None:
    """When requests has more partitions than the settings say, items and results must follow."""
    settings = make_settings({})
    existing = {
        name: info._replace(partitions=8)
        for name, info in existing_as_planned(settings).items()
        if info is not None and name != settings.topic(Topic.CONTROL)
    }
    faults = compare(plan_topics(settings), existing, required_topics(settings))
    assert not any(fault.blocking for fault in faults)
    assert {fault.topic for fault in faults} & {"headrace.items", "headrace.results"} == set()


def test_partition_count_of_responses_is_free() -> None:
    """Responses may have any number of partitions; a number unlike the settings is told."""
    settings = make_settings({})
    (fault,) = compare(plan_topics(settings), changed(settings, Topic.RESPONSES, partitions=9))
    assert not fault.blocking
    assert "has 9 partitions, topics.partitions says 4" in fault.problem


def test_compacted_requests_topic_is_error() -> None:
    """Compaction would delete unanswered requests."""
    settings = make_settings({})
    existing = changed(settings, Topic.REQUESTS, config={"cleanup.policy": "compact"})
    (fault,) = compare(plan_topics(settings), existing)
    assert fault.blocking
    assert fault.problem == "cleanup.policy: expected delete, got compact"


@pytest.mark.parametrize(
    ("name", "value", "faults"),
    [
        ("retention.ms", "-1", 0),
        ("retention.ms", "999999999999", 0),
        ("retention.ms", "1000", 1),
        ("retention.bytes", "-1", 0),
        ("retention.bytes", "1073741824", 1),
        ("max.message.bytes", "99999999", 0),
        ("max.message.bytes", "1048588", 1),
        ("segment.ms", "604800000", 1),
        ("segment.ms", "1000", 0),
    ],
)
def test_topic_settings_above_plan_pass_check(name: str, value: str, faults: int) -> None:
    """More retention and larger records are no fault, less is one that does not block."""
    settings = make_settings({})
    found = compare(plan_topics(settings), changed(settings, Topic.ITEMS, config={name: value}))
    assert [fault.blocking for fault in found] == [False] * faults


@pytest.mark.parametrize(
    ("topic", "faults"),
    [(Topic.REQUESTS, 1), (Topic.RESULTS, 1), (Topic.CONTROL, 1), (Topic.RESPONSES, 0)],
)
def test_topic_that_stages_read_is_not_bounded_by_size(topic: Topic, faults: int) -> None:
    """Retention by size deletes records before a stage has read them; callers read `responses`."""
    settings = make_settings({})
    existing = changed(settings, topic, config={"retention.bytes": "1073741824"})
    found = compare(plan_topics(settings), existing)
    assert [fault.problem for fault in found] == [
        "retention.bytes: expected -1, got 1073741824"
    ] * faults


def test_unused_topic_may_be_missing() -> None:
    """A topic that the process does not use may be missing."""
    settings = make_settings({})
    plan = plan_topics(settings)
    faults = compare(plan, {}, needed=[Topic.REQUESTS])
    assert [str(fault) for fault in faults] == [
        "headrace.requests: does not exist; run `headrace topics create`"
    ]


@pytest.mark.parametrize(
    ("partitions", "config", "problem"),
    [
        (4, {}, "expected 1 partition, got 4"),
        (1, {"cleanup.policy": "compact"}, "cleanup.policy: expected delete, got compact"),
        (1, {"retention.ms": "604800000"}, "retention.ms: expected -1, got 604800000"),
    ],
)
def test_control_topic_that_loses_records_or_order_is_error(
    partitions: int, config: dict[str, str], problem: str
) -> None:
    """The topic is the history of the deployment; its plan has one partition, kept forever."""
    settings = make_settings({})
    existing = changed(settings, Topic.CONTROL, partitions=partitions, config=config)
    (fault,) = compare(plan_topics(settings), existing)
    assert fault.blocking
    assert fault.problem == problem


def test_control_topic_is_needed_in_explicit_mode_alone() -> None:
    """A deployment that follows `model.toml` runs without it."""
    broker = {"bootstrap_servers": "127.0.0.1:9092"}
    settings = make_settings({"kafka": broker, "models": {"mode": "explicit"}})
    assert Topic.CONTROL in required_topics(settings)
    assert Topic.CONTROL not in required_topics(make_settings({"kafka": broker}))
    assert Topic.CONTROL in topics_in_use(STAGES, controlled=True)


@pytest.mark.parametrize(
    ("stages", "topics"),
    [
        (STAGES, {Topic.REQUESTS, Topic.RESPONSES, Topic.DEAD_LETTERS}),
        ((Stage.INGEST,), {Topic.REQUESTS, Topic.ITEMS, Topic.RESULTS}),
        (
            (Stage.BATCHER, Stage.EXECUTOR),
            {Topic.REQUESTS, Topic.ITEMS, Topic.RESULTS},
        ),
        (
            (Stage.EXECUTOR,),
            {Topic.REQUESTS, Topic.BATCHES, Topic.RESULTS, Topic.EVENTS},
        ),
        (
            (Stage.RESPONDER,),
            {Topic.REQUESTS, Topic.RESULTS, Topic.RESPONSES, Topic.DEAD_LETTERS},
        ),
    ],
)
def test_topics_in_use_are_those_between_processes(
    stages: tuple[Stage, ...], topics: set[Topic]
) -> None:
    """Between two stages of one process there is no topic."""
    assert set(topics_in_use(stages)) == topics
