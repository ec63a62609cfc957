"""Translate errors of aiokafka and the broker into the port's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiokafka.errors as kafka_errors
from aiokafka.errors import KafkaError

from headrace.errors import HeadraceError
from headrace.log.errors import (
    Fenced,
    LogAuthenticationFailed,
    LogRefused,
    LogUnavailable,
    OffsetOutOfRange,
    RecordTooLarge,
)


class TransactionAbortable(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """The broker could not take part in a transaction, which must be aborted (KIP-890).

    aiokafka does not know the code.
    """

    errno = 120
    message = "TRANSACTION_ABORTABLE"
    description = "the broker could not take part in the transaction, which is aborted"
    retriable = False


class FencedProducer(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """A producer with the same transactional id has a newer epoch (KIP-588).

    Coordinators answer so where brokers answer `INVALID_PRODUCER_EPOCH`. aiokafka does not know the
    code.
    """

    errno = 90
    message = "PRODUCER_FENCED"
    description = "a producer with the same transactional id has taken over"
    retriable = False


class UnstableOffsetCommit(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """An open transaction commits the offset that was asked for (KIP-447).

    aiokafka does not know the code.
    """

    errno = 88
    message = "UNSTABLE_OFFSET_COMMIT"
    description = "an open transaction commits the offset that was asked for"
    retriable = False


class InvalidRecord(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """The topic accepts no such record (KIP-467). aiokafka does not know the code."""

    errno = 87
    message = "INVALID_RECORD"
    description = "a topic with cleanup.policy=compact accepts no record without a key"
    retriable = False


_UNKNOWN_TO_AIOKAFKA = {
    each.errno: each
    for each in (TransactionAbortable, FencedProducer, UnstableOffsetCommit, InvalidRecord)
}
_NOT_ALLOWED = (
    kafka_errors.AuthenticationFailedError,
    kafka_errors.AuthenticationMethodNotSupported,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.IllegalSaslStateError,
    kafka_errors.SaslAuthenticationFailed,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.TransactionalIdAuthorizationFailed,
    kafka_errors.UnsupportedSaslMechanismError,
)
_MOVED_ON = (
    FencedProducer,
    kafka_errors.CommitFailedError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidTxnState,  # the broker, or a successor, has ended the transaction
    kafka_errors.ProducerFenced,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.UnknownMemberIdError,
)
_TOO_LARGE = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.RecordTooLargeError,
)
# aiokafka marks these as final although they pass with time, or with another producer.
_PASSING = (
    kafka_errors.BrokerNotAvailableError,
    kafka_errors.ConcurrentTransactions,
    kafka_errors.InvalidProducerIdMapping,
    kafka_errors.KafkaTimeoutError,
    kafka_errors.KafkaUnavailableError,
    kafka_errors.OutOfOrderSequenceNumber,
    kafka_errors.ProducerClosed,
    kafka_errors.ReplicaNotAvailableError,
    TransactionAbortable,
    kafka_errors.UnknownProducerId,
    UnstableOffsetCommit,
)

_SENTENCES: dict[type[KafkaError], str] = {
    kafka_errors.RequestTimedOutError: "expected an answer within the request's timeout, got none",
    kafka_errors.KafkaTimeoutError: (
        "expected the partition's leader to accept the records in time, but it has none, "
        "or its broker did not answer"
    ),
    kafka_errors.KafkaConnectionError: "expected an answer, but the connection was lost",
    kafka_errors.ProducerClosed: "expected an open producer, but it was closed meanwhile",
    kafka_errors.NotEnoughReplicasError: (
        "expected at least min.insync.replicas replicas in sync, got fewer"
    ),
    kafka_errors.NotEnoughReplicasAfterAppendError: (
        "expected at least min.insync.replicas replicas to have the records, got fewer"
    ),
    kafka_errors.UnknownTopicOrPartitionError: "the broker has no such topic or partition",
    kafka_errors.LeaderNotAvailableError: "the partition has no leader at present",
    kafka_errors.NotLeaderForPartitionError: "expected the partition's leader, got another broker",
    kafka_errors.GroupCoordinatorNotAvailableError: "there is no coordinator at present",
    kafka_errors.NotCoordinatorForGroupError: "expected the coordinator, got another broker",
    kafka_errors.GroupLoadInProgressError: "the coordinator is still loading its state",
    kafka_errors.KafkaStorageError: "the broker's log directory has failed, or its disk is full",
    kafka_errors.TopicAuthorizationFailedError: "the broker does not allow this on the topic",
    kafka_errors.GroupAuthorizationFailedError: "the broker does not allow this on the group",
    kafka_errors.ClusterAuthorizationFailedError: "the broker does not allow this on the cluster",
    kafka_errors.TransactionalIdAuthorizationFailed: (
        "the broker does not allow this on the transactional id"
    ),
    kafka_errors.RebalanceInProgressError: "the consumer group has begun a rebalance",
    kafka_errors.IllegalGenerationError: "the consumer group has a newer generation",
    kafka_errors.UnknownMemberIdError: "the consumer group has removed this member",
    kafka_errors.InvalidSessionTimeoutError: (
        "expected kafka.session_timeout_ms between the broker's group.min.session.timeout.ms "
        "and group.max.session.timeout.ms"
    ),
    kafka_errors.InvalidTransactionTimeout: (
        "expected kafka.transaction_timeout_ms to be at most the broker's "
        "transaction.max.timeout.ms"
    ),
    kafka_errors.InvalidProducerEpoch: (
        "a producer with the same transactional id has taken over, "
        "or the broker has aborted its transaction"
    ),
}
"""What happened, for those that brokers and aiokafka raise without a text of their own."""


def in_port_words(error: KafkaError, what: str) -> HeadraceError:
    """Return the port's error for one of aiokafka's.

    Args:
        error: the error that aiokafka raised.
        what: the operation, which begins the message: `commit for group g`.
    """
    message = f"{what}: {error_text(error)}"
    if isinstance(error, _NOT_ALLOWED):
        return LogAuthenticationFailed(message)
    if isinstance(error, _MOVED_ON):
        return Fenced(message)
    if isinstance(error, _TOO_LARGE):
        return RecordTooLarge(message)
    if isinstance(error, kafka_errors.OffsetOutOfRangeError):
        return OffsetOutOfRange(message)
    if error.retriable or isinstance(error, _PASSING) or type(error) is KafkaError:
        return LogUnavailable(message)
    return LogRefused(message)


@asynccontextmanager
async def answered(what: str, deadline_s: float) -> AsyncIterator[None]:
    """Bound the body in time and translate aiokafka's errors into the port's.

    Raises:
        LogUnavailable: the deadline passed first, among the other errors of `in_port_words`.
    """
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise LogUnavailable(f"{what}: no answer within {deadline_s:g} s") from error
    except KafkaError as error:
        raise in_port_words(error, what) from error


def broker_error(code: int, *details: object) -> KafkaError | None:
    """Return the error for a code in a broker's response; None for success."""
    kind = _UNKNOWN_TO_AIOKAFKA.get(code) or kafka_errors.for_code(code)
    if kind.errno != code:  # aiokafka does not know it
        details = (*details, f"error code {code}")
    return None if kind is kafka_errors.NoError else kind(*details)


def error_text(error: KafkaError) -> str:
    """Return what happened, with the details and the error's name, on one line."""
    details = " ".join(str(part) for part in error.args if part)
    if isinstance(error, kafka_errors.KafkaConnectionError) and details:
        sentence = ""  # aiokafka's says what happened, and to which broker
    else:
        # A description of aiokafka's explains a code, but not beside a broker's own text.
        described = getattr(error, "description", "").rstrip(".")
        sentence = _SENTENCES.get(type(error)) or ("" if details else described)
    name = type(error).__name__
    if not sentence:
        return f"{details} ({name})" if details else name
    return f"{sentence} ({name}: {details})" if details else f"{sentence} ({name})"
