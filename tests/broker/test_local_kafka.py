"""The local broker is a real Kafka that comes, goes and keeps its data."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from headrace.local_kafka import LocalKafka


async def _create_topic(bootstrap_servers: str, topic: str, replicas: int = 1) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, replicas)])
    finally:
        await admin.close()


async def _send(topic: str, value: bytes, **client: object) -> None:
    producer = AIOKafkaProducer(**client)
    await producer.start()
    try:
        await producer.send_and_wait(topic, value)
    finally:
        await producer.stop()


async def _receive(topic: str, **client: object) -> bytes:
    consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **client)
    await consumer.start()
    try:
        record = await consumer.getone()
    finally:
        await consumer.stop()
    assert record.value is not None
    return bytes(record.value)


async def test_a_record_comes_back(kafka: LocalKafka, unique_name: str) -> None:
    """What is sent to a topic is read from it by a member of a group."""
    servers = kafka.bootstrap_servers
    await _create_topic(servers, unique_name)
    await _send(unique_name, b"there and back", bootstrap_servers=servers)
    received = await _receive(unique_name, bootstrap_servers=servers, group_id=unique_name)
    assert received == b"there and back"
