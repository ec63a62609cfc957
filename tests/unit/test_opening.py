"""Choosing a log by the settings."""

from __future__ import annotations

from headrace.config import make_settings
from headrace.log.kafka.log import KafkaLog
from headrace.runtime.log_factory import open_log
from headrace.topics import Topic


async def test_embedded_log_opens_with_topics() -> None:
    """Without a broker a log with all topics, as planned, is opened."""
    settings = make_settings({"topics": {"partitions": 2}})
    async with open_log(settings) as log:
        found = await log.describe_topics([settings.topic(topic) for topic in Topic])
    partitions = {name: info and info.partitions for name, info in found.items()}
    assert partitions.pop(settings.topic(Topic.CONTROL)) == 1
    assert set(partitions.values()) == {2}


async def test_opening_embedded_log_twice_gives_separate_logs() -> None:
    """Two embedded logs share nothing."""
    settings = make_settings({})
    async with open_log(settings) as one, open_log(settings) as other:
        assert one is not other


async def test_kafka_is_opened_without_asking_broker() -> None:
    """With brokers configured nothing is sent before the log is used."""
    settings = make_settings({"kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    async with open_log(settings) as log:
        assert isinstance(log, KafkaLog)
