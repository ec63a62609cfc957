"""Changing what a topic of a real broker accepts, while others go by what it was."""

from __future__ import annotations

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually


async def set_limit(cluster: LocalKafka, partition: TopicPartition, limit_bytes: int) -> None:
    """Set a topic's `max.message.bytes`, and wait until its broker says so."""
    servers = cluster.bootstrap_servers
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        changed = {"max.message.bytes": str(limit_bytes)}
        topic = ConfigResource(ConfigResourceType.TOPIC, partition.topic, changed)
        await admin.alter_configs([topic])
    finally:
        await admin.close()

    async def is_set() -> bool:
        settings = KafkaSettings(bootstrap_servers=servers)
        async with KafkaLog(settings) as log:
            (found,) = (await log.describe_topics([partition.topic])).values()
            return found is not None and found.config["max.message.bytes"] == str(limit_bytes)

    await eventually(is_set)
