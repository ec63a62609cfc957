"""Errors of the log, raised by both adapters."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import Code, Fatal, Rejected, Retriable
from headrace.log.port import TopicPartition


class LogUnavailable(Retriable):
    """No broker answered in time; the operation may or may not have happened."""


class NoLeader(LogUnavailable):
    """A partition has no leader at present; nothing of the operation has happened."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(f"{partition}: it has no leader")
        self.partition = partition


class TransactionTimedOut(LogUnavailable):
    """The transaction did not end within `transaction_timeout_ms`; its outcome is unknown."""


class LogAuthenticationFailed(Fatal):
    """The broker rejected our credentials, or we its certificate."""


class LogRefused(Fatal):
    """The broker refuses the operation and would refuse it again; the message says which."""


class RecordTooLarge(Rejected):
    """The topic does not accept a record, or a batch, of this size."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TOO_LARGE, message)


class RecordRefused(Rejected):
    """The topic does not accept such a record, for example one without a key if it is compacted."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_REQUEST, message)


class RecordsRefused(Rejected):
    """Topics will never accept some records of a transaction, which was not begun.

    Args:
        refused: the error for each refused record, by partition and index.
    """

    def __init__(
        self, refused: Mapping[TopicPartition, Mapping[int, RecordTooLarge | RecordRefused]]
    ) -> None:
        first = next(error for indexes in refused.values() for error in indexes.values())
        count = sum(map(len, refused.values()))
        super().__init__(first.code, f"{count} records are refused, the first: {first.message}")
        self.refused = refused


class UnknownPartition(Rejected):
    """There is no such topic, or it has no such partition; retrying will not create it."""

    def __init__(self, partition: TopicPartition, partitions: int) -> None:
        got = "there is no such topic" if partitions == 0 else f"it has {partitions} partitions"
        super().__init__(
            Code.INVALID_REQUEST, f"{partition}: expected a topic with this partition, but {got}"
        )
        self.partition = partition
        self.partitions = partitions


class TopicForbidden(Rejected):
    """The broker does not allow us to write to the topic, and perhaps not to describe it."""

    def __init__(self, topic: str) -> None:
        super().__init__(Code.INVALID_REQUEST, f"not allowed to write to topic {topic}")
        self.topic = topic


class OffsetOutOfRange(Retriable):
    """A position is outside the range that the log still holds; `poll` raises it until a seek.

    Args:
        positions: the position of each partition concerned.
    """

    def __init__(self, message: str, positions: Mapping[TopicPartition, int] | None = None) -> None:
        super().__init__(message)
        self.positions = dict(positions or {})


class Fenced(Retriable):
    """Another producer with the same transactional id, or a newer generation, took over."""
