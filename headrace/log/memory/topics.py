"""The topics of the embedded log: their settings and partitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from headrace.log.errors import UnknownPartition
from headrace.log.memory.partition import Partition
from headrace.log.port import TopicInfo, TopicPartition

_LEGAL_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
# Kafka's defaults for the settings that the embedded log has: a record's size is checked, and the
# policy is reported (Kafka does not promise when it compacts; here it never does).
_DEFAULTS = {"max.message.bytes": "1048588", "cleanup.policy": "delete"}


@dataclass(frozen=True, slots=True)
class Topic:
    """An existing topic."""

    info: TopicInfo
    partitions: tuple[Partition, ...]
    max_message_bytes: int
    is_compacted: bool


class Topics:
    """All topics, by name.

    Args:
        retention_bytes: the most that each partition holds; a topic's `retention.bytes` may say
            less, never more.
        auto_create_partitions: create topics on first use, with this many partitions, as a broker
            with `auto.create.topics.enable` does; None refuses unknown topics.
        created: called with the name of every new topic.
    """

    def __init__(
        self,
        retention_bytes: int,
        auto_create_partitions: int | None,
        created: Callable[[str], None],
    ) -> None:
        self._retention_bytes = retention_bytes
        self._auto_create_partitions = auto_create_partitions
        self._created = created
        self._topics: dict[str, Topic] = {}

    def create(self, info: TopicInfo) -> bool:
        """Create a topic; False if there is one of this name.

        Raises:
            ValueError: Kafka would not accept the name, the partitions or a setting.
        """
        if info.name in self._topics:
            return False
        if not _LEGAL_NAME.fullmatch(info.name):
            raise ValueError(f"topic name: expected {_LEGAL_NAME.pattern}, got {info.name!r}")
        if info.partitions < 1:
            raise ValueError(f"{info.name}: expected at least 1 partition, got {info.partitions}")
        config = _DEFAULTS | dict(info.config)
        retention_bytes = self._retention_of(config)
        self._topics[info.name] = Topic(
            info._replace(config=config, topic_id=str(uuid4())),
            tuple(
                Partition(TopicPartition(info.name, number), retention_bytes)
                for number in range(info.partitions)
            ),
            int(config["max.message.bytes"]),
            "compact" in config["cleanup.policy"].split(","),
        )
        self._created(info.name)
        return True

    def delete(self, name: str) -> None:
        """Delete a topic, if there is one of this name."""
        self._topics.pop(name, None)

    def replace(self, name: str) -> None:
        """Replace a topic by one of the same name and partitions, which are empty and stay
        assigned.
        """
        topic = self._topics[name]
        for partition in topic.partitions:
            partition.truncate(0)
        info = topic.info._replace(topic_id=str(uuid4()))
        self._topics[name] = replace(topic, info=info)

    def find(self, name: str) -> Topic | None:
        """Return the topic, if there is one; never create it."""
        return self._topics.get(name)

    def use(self, name: str) -> Topic | None:
        """Return the topic; create an unknown one if that is allowed."""
        topic = self._topics.get(name)
        if topic is None and self._auto_create_partitions is not None:
            self.create(TopicInfo(name, self._auto_create_partitions, {}))
            topic = self._topics[name]
        return topic

    def count(self, name: str) -> int:
        """Return a topic's number of partitions; 0 if it does not exist."""
        topic = self._topics.get(name)
        return 0 if topic is None else topic.info.partitions

    def topic_of(self, partition: TopicPartition) -> Topic:
        """Return `use(topic)`, after checking that it has this partition.

        Raises:
            UnknownPartition: there is no such topic or partition.
        """
        topic = self.use(partition.topic)
        if topic is None:
            raise UnknownPartition(partition, 0)
        if not 0 <= partition.partition < topic.info.partitions:
            raise UnknownPartition(partition, topic.info.partitions)
        return topic

    def partition(self, partition: TopicPartition) -> Partition:
        """Return one partition. Raises `UnknownPartition`, see `topic_of`."""
        return self.topic_of(partition).partitions[partition.partition]

    def _retention_of(self, config: Mapping[str, str]) -> int:
        wanted = int(config.get("retention.bytes", "-1"))
        return self._retention_bytes if wanted < 0 else min(wanted, self._retention_bytes)
