"""What the log raises, in both adapters."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import Code, Fatal, Rejected, Retriable
from headrace.log.port import TopicPartition


class LogUnavailable(Retriable):
    """No broker answered in time; what was asked may or may not have happened."""


class NoLeader(LogUnavailable):
    """A partition has no leader for now; nothing of what was asked has happened."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(f"{partition}: it has no leader")
        self.partition = partition


class TransactionTimedOut(LogUnavailable):
    """The transaction did not end within `transaction_timeout_ms`; its outcome is unknown."""


class LogAuthenticationFailed(Fatal):
    """The broker refused our credentials, or we its certificate."""


class LogRefused(Fatal):
    """The broker refuses what was asked and would refuse it again; the message says what."""


class RecordTooLarge(Rejected):
    """The topic takes no record, or no batch, of this size."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TOO_LARGE, message)


class RecordRefused(Rejected):
    """The topic takes no such record: one without a key, say, where it is compacted."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_REQUEST, message)


class RecordsRefused(Rejected):
    """Topics take some records of a transaction at no time; nothing of it has begun.

    Args:
        refused: the records by partition and index, and why each is refused.
    """

    def __init__(
        self, refused: Mapping[TopicPartition, Mapping[int, RecordTooLarge | RecordRefused]]
    ) -> None:
        first = next(error for indexes in refused.values() for error in indexes.values())
        count = sum(map(len, refused.values()))
        super().__init__(first.code, f"{count} records are refused, the first: {first.message}")
        self.refused = refused


class UnknownPartition(Rejected):
    """There is no such topic, or it has no such partition; asking again will not make one."""

    def __init__(self, partition: TopicPartition, partitions: int) -> None:
        got = "there is no such topic" if partitions == 0 else f"it has {partitions} partitions"
        super().__init__(
            Code.INVALID_REQUEST, f"{partition}: expected a topic with this partition, but {got}"
        )
        self.partition = partition


class TopicForbidden(Rejected):
    """The broker lets us neither write to the topic nor, perhaps, know of it."""

    def __init__(self, topic: str) -> None:
        super().__init__(Code.INVALID_REQUEST, f"not allowed to write to topic {topic}")
        self.topic = topic


class OffsetOutOfRange(Retriable):
    """A position lies outside what the log still holds; `poll` raises it until one seeks.

    Args:
        positions: the partitions that it concerns, and where each one stood.
    """

    def __init__(self, message: str, positions: Mapping[TopicPartition, int] | None = None) -> None:
        super().__init__(message)
        self.positions = dict(positions or {})


class Fenced(Retriable):
    """Another producer with the same transactional id, or a newer generation, took over."""
