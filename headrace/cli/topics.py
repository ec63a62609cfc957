"""`headrace topics create|describe|check`: compares the topics with what they should be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from headrace.cli.event_loop import run
from headrace.cli.options import json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.log.port import TopicInfo
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import (
    CLEANUP_POLICY,
    MAX_MESSAGE_BYTES,
    MIN_INSYNC_REPLICAS,
    RETENTION_BYTES,
    RETENTION_MS,
    SEGMENT_MS,
    Fault,
    compare,
    is_controlled,
    plan_topics,
    required_topics,
)
from headrace.topics import TOPICS, Topic

SHOWN = (
    CLEANUP_POLICY,
    RETENTION_MS,
    RETENTION_BYTES,
    SEGMENT_MS,
    MAX_MESSAGE_BYTES,
    MIN_INSYNC_REPLICAS,
)

EMBEDDED = "no broker is configured: the embedded log has its topics already"


@click.group()
def command() -> None:
    """Create, describe or check Headrace's topics on the broker."""


@command.command()
@json_option
@pass_settings
def create(settings: Settings, in_json: bool) -> None:
    """Create the topics that are missing.

    Topics that exist are left as they are; their faults are shown (exit code 1 if
    `headrace run` would refuse them).
    """
    if settings.kafka is None:
        click.echo(EMBEDDED, err=True)
        if in_json:
            click.echo("{}")
        return
    created, faults = run(_create(settings))
    if in_json:
        click.echo(json.dumps(created))
    else:
        for name, is_new in created.items():
            click.echo(f"{name}: {'created' if is_new else 'existed'}")
    _tell(faults)


@command.command()
@json_option
@pass_settings
def describe(settings: Settings, in_json: bool) -> None:
    """Show each topic: partitions, settings, writers, readers."""
    existing = run(_describe(settings))
    topics = [_described(settings, topic, existing) for topic in Topic]
    if in_json:
        click.echo(json.dumps(topics, indent=2))
        return
    for topic in topics:
        click.echo(_paragraph(topic))


@command.command()
@json_option
@pass_settings
def check(settings: Settings, in_json: bool) -> None:
    """Compare the topics with what they should be.

    Exit code 1 when `headrace run` would refuse one of them.
    """
    faults = compare(plan_topics(settings), run(_describe(settings)), required_topics(settings))
    if in_json:
        click.echo(json.dumps([fault._asdict() for fault in faults], indent=2))
        if any(fault.blocking for fault in faults):
            raise Unsuccessful
        return
    if not faults:
        click.echo("all topics are as they should be")
    _tell(faults)


async def _create(settings: Settings) -> tuple[Mapping[str, bool], list[Fault]]:
    async with open_log(settings) as log:
        before = await log.describe_topics([settings.topic(topic) for topic in Topic])
        requests = settings.topic(Topic.REQUESTS)
        plan = plan_topics(settings, before[requests])
        created = await log.create_topics(
            list(plan.values()), replication_factor=settings.topics.replication_factor
        )
        # The others are compared with `requests`, also where that is new.
        existing = {**before, requests: before[requests] or plan[Topic.REQUESTS]}
        return created, compare(plan, existing, needed=())


async def _describe(settings: Settings) -> Mapping[str, TopicInfo | None]:
    async with open_log(settings) as log:
        return await log.describe_topics([settings.topic(topic) for topic in Topic])


def _described(
    settings: Settings, topic: Topic, existing: Mapping[str, TopicInfo | None]
) -> dict[str, Any]:
    spec = TOPICS[topic]
    info = existing.get(settings.topic(topic))
    return {
        "topic": settings.topic(topic),
        "exists": info is not None,
        "partitions": info.partitions if info else None,
        "config": {name: info.config.get(name) for name in SHOWN} if info else {},
        "message": spec.message,
        "key": spec.key,
        "partition": spec.partition,
        "writers": list(spec.writing(controlled=is_controlled(settings))),
        "readers": list(spec.reading(controlled=is_controlled(settings))),
    }


def _paragraph(topic: dict[str, Any]) -> str:
    writers = ", ".join(topic["writers"]) or "outside"
    readers = ", ".join(topic["readers"]) or "outside"
    exists = f"{topic['partitions']} partitions" if topic["exists"] else "does not exist"
    config = "".join(f"  {name}={value}\n" for name, value in topic["config"].items() if value)
    return (
        f"{topic['topic']}: {exists}\n"
        f"  {writers} -> {readers}: {topic['message']}\n"
        f"  key: {topic['key']}; partition: {topic['partition']}\n{config}"
    )


def _tell(faults: Sequence[Fault]) -> None:
    for fault in faults:
        click.echo(f"{'error' if fault.blocking else 'warning'}: {fault}", err=True)
    if any(fault.blocking for fault in faults):
        raise Unsuccessful
