"""The topics of the embedded log, and the records of their partitions."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from uuid import uuid4

from headrace.log.errors import UnknownPartition
from headrace.log.port import MAX_POLL_BYTES, Gap, NewRecord, Record, TopicInfo, TopicPartition

_LEGAL_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
# Kafka's defaults for the settings that the embedded log has: a record's size is checked, and the
# policy is reported (Kafka does not promise when it compacts; here it never does).
_DEFAULTS = {"max.message.bytes": "1048588", "cleanup.policy": "delete"}

# A record takes more than its key, value and headers: in Kafka's format at most 61 bytes of batch
# header and 21 of its own (https://kafka.apache.org/documentation/#messageformat), here the Python
# objects that hold it.
FRAMING_BYTES = 82
_OBJECT_BYTES = 256

_offset_of = attrgetter("offset")


def payload_bytes(record: NewRecord) -> int:
    """Return the bytes of a record's key, value and headers.

    Raises:
        TypeError: one of them is neither bytes nor None, or a header's name is not a string.
    """
    key, value = record.key, record.value
    size = 0
    if key is not None:
        size += _length(key, "key")
    if value is not None:
        size += _length(value, "value")
    for name, content in record.headers:
        if not isinstance(name, str):
            raise TypeError(f"header name: expected str, got {type(name).__name__}")
        size += len(name)
        if content is not None:
            size += len(content) if type(content) is bytes else _length(content, f"header {name!r}")
    return size


def _length(content: bytes, where: str) -> int:
    if not isinstance(content, bytes):
        raise TypeError(f"{where}: expected bytes or None, got {type(content).__name__}")
    return len(content)


class Partition:
    """The records of one partition.

    Offsets ascend but may have gaps, as compaction and transaction markers leave them in Kafka.

    Args:
        name: which partition it is.
        retention_bytes: the oldest records are dropped when the partition exceeds this; the newest
            record always stays.
    """

    def __init__(self, name: TopicPartition, retention_bytes: int) -> None:
        self.name = name
        self.begin = 0
        self.end = 0
        self._retention_bytes = retention_bytes
        self._records: list[Record] = []
        self._sizes: list[int] = []
        self._dropped = 0  # how many at the front of the list are trimmed but not yet cut off
        self._held_bytes = 0
        self._watchers: set[Callable[[], None]] = set()
        self._open: dict[Hashable, list[tuple[int, int]]] = {}  # offsets, by transaction
        self._unreadable: list[Gap] = []

    @property
    def stable_end(self) -> int:
        """The offset before which no transaction is open (Kafka's last stable offset)."""
        if not self._open:
            return self.end
        return min(spans[0][0] for spans in self._open.values())

    @property
    def held_bytes(self) -> int:
        """The size of the records, including their objects."""
        return self._held_bytes

    def append(
        self,
        records: Sequence[NewRecord],
        sizes: Sequence[int],
        now_ms: int,
        transaction: Hashable | None = None,
    ) -> None:
        """Append records, with the `payload_bytes` of each, and wake the watchers.

        The records of a transaction, and all after them, cannot be read before it has ended.
        """
        if transaction is not None:
            span = (self.end, self.end + len(records))
            self._open.setdefault(transaction, []).append(span)
        topic, partition = self.name
        self._records += [
            Record(
                topic,
                partition,
                offset,
                now_ms if record.timestamp_ms is None else record.timestamp_ms,
                record.key,
                record.value,
                tuple(record.headers),
            )
            for offset, record in enumerate(records, self.end)
        ]
        self.end += len(records)
        self._sizes += sizes
        self._held_bytes += sum(sizes) + _OBJECT_BYTES * len(records)
        self._retain()
        self.wake()

    def end_transaction(self, transaction: Hashable, *, commit: bool) -> None:
        """End an open transaction: its records are kept, or leave a gap. A marker follows."""
        spans = self._open.pop(transaction, [])  # none if they were truncated
        if not commit:
            for start, stop in spans:
                self._remove(start, stop)
        self.skip(1)
        self.wake()

    def read(
        self, offset: int, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> tuple[Sequence[Record], int]:
        """Return records from `offset` on, below the stable end, and their bytes.

        `offset` must not be below `begin`. The last record may exceed the limit of bytes.
        """
        start = self._index(offset)
        stop = start + max_records
        if self._open:
            stop = min(stop, self._index(self.stable_end))
        sizes = self._sizes[start:stop]
        size_bytes = sum(sizes)
        if size_bytes > max_bytes:
            totals = list(accumulate(sizes))
            count = bisect_left(totals, max_bytes) + 1
            return self._records[start : start + count], totals[count - 1]
        return self._records[start:stop], size_bytes

    def trim(self, before_offset: int) -> None:
        """Drop the records below `before_offset`, as retention does.

        Raises:
            ValueError: the offset is beyond the end.
        """
        if before_offset > self.end:
            raise ValueError(
                f"{self.name}: expected an offset up to {self.end}, got {before_offset}"
            )
        if before_offset > self.begin:
            self._drop(self._index(before_offset))
            self.begin = before_offset

    def truncate(self, end_offset: int) -> None:
        """Lose the records from `end_offset` on, open transactions included."""
        if end_offset >= self.end:
            return
        self._remove(max(end_offset, self.begin), self.end)
        self.end = end_offset
        self.begin = min(self.begin, end_offset)
        self._unreadable = [
            gap._replace(end=min(gap.end, end_offset))
            for gap in self._unreadable
            if gap.first < end_offset
        ]
        for transaction, spans in list(self._open.items()):
            left = [(start, min(stop, end_offset)) for start, stop in spans if start < end_offset]
            if left:
                self._open[transaction] = left
            else:
                del self._open[transaction]
        self.wake()

    def skip(self, offsets: int) -> None:
        """Leave a gap: increase the next record's offset by `offsets`."""
        self.end += offsets

    def write_unreadable(self, offsets: int, code: str, reason: str) -> None:
        """Append a batch that no reader can read, and wake the watchers."""
        gap = Gap(self.name, self.end, self.end + offsets, code, reason)
        self._unreadable.append(gap)
        self.end = gap.end
        self.wake()

    def gaps_between(self, first: int, end: int) -> list[Gap]:
        """Return the unreadable offsets from `first` to `end` (exclusive)."""
        return [
            gap._replace(first=max(gap.first, first))
            for gap in self._unreadable
            if gap.end > first and gap.first < end
        ]

    def offset_at(self, timestamp_ms: int) -> int | None:
        """Return the first offset with a timestamp at or after the given one."""
        stable_end = self.stable_end
        for index in range(self._dropped, len(self._records)):
            record = self._records[index]
            if record.offset >= stable_end:
                break
            if record.timestamp >= timestamp_ms:
                return record.offset
        return None

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every append, until `unwatch`."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        self._watchers.discard(wake)

    def wake(self) -> None:
        """Call all watchers, which look again at what they may read."""
        for wake in self._watchers:
            wake()

    def _remove(self, start_offset: int, stop_offset: int) -> None:
        start = max(self._index(start_offset), self._dropped)
        stop = max(self._index(stop_offset), start)
        gone = self._sizes[start:stop]
        self._held_bytes -= sum(gone) + _OBJECT_BYTES * len(gone)
        del self._records[start:stop]
        del self._sizes[start:stop]

    def _index(self, offset: int) -> int:
        records = self._records
        if not records:
            return 0
        guess = offset - records[0].offset
        if 0 <= guess < len(records) and records[guess].offset == offset:
            return guess
        return bisect_left(records, offset, lo=self._dropped, key=_offset_of)

    def _retain(self) -> None:
        if self._held_bytes <= self._retention_bytes:
            return
        excess = self._held_bytes - self._retention_bytes
        index = self._dropped
        stable_end = self.stable_end
        while (
            excess > 0
            and index < len(self._records) - 1
            and self._records[index].offset < stable_end
        ):
            excess -= self._sizes[index] + _OBJECT_BYTES
            index += 1
        self.begin = self._records[index].offset
        self._drop(index)

    def _drop(self, index: int) -> None:
        gone = self._sizes[self._dropped : index]
        self._held_bytes -= sum(gone) + _OBJECT_BYTES * len(gone)
        self._dropped = index
        # Cutting the lists moves all remaining records: do it only once a quarter of the list is
        # trimmed.
        if self._dropped * 4 >= len(self._records):
            del self._records[: self._dropped]
            del self._sizes[: self._dropped]
            self._dropped = 0


@dataclass(frozen=True, slots=True)
class StoredTopic:
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
        self._topics: dict[str, StoredTopic] = {}

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
        self._topics[info.name] = StoredTopic(
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

    def find(self, name: str) -> StoredTopic | None:
        """Return the topic, if there is one; never create it."""
        return self._topics.get(name)

    def use(self, name: str) -> StoredTopic | None:
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

    def topic_of(self, partition: TopicPartition) -> StoredTopic:
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
