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
    retriable = False


class FencedProducer(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """A producer with the same transactional id has a newer epoch (KIP-588).

    Coordinators answer so where brokers answer `INVALID_PRODUCER_EPOCH`. aiokafka does not know the
    code.
    """

    errno = 90
    message = "PRODUCER_FENCED"
    retriable = False


class UnstableOffsetCommit(kafka_errors.BrokerResponseError):  # type: ignore[misc]
    """An open transaction commits the offset that was asked for (KIP-447).

    aiokafka does not know the code.
    """

    errno = 88
    message = "UNSTABLE_OFFSET_COMMIT"
    retriable = False


_UNKNOWN_TO_AIOKAFKA = {
    each.errno: each for each in (TransactionAbortable, FencedProducer, UnstableOffsetCommit)
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


def in_port_words(error: KafkaError, what: str) -> HeadraceError:
    """Return the port's error for one of aiokafka's.

    Args:
        error: the error that aiokafka raised.
        what: the operation, which begins the message: `commit for group g`.
    """
    message = f"{what}: {_text(error)}"
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
    return None if kind is kafka_errors.NoError else kind(*details)


def _text(error: KafkaError) -> str:
    """Return the broker's own message if there is one, with the error's name, on one line."""
    words = " ".join(str(part) for part in error.args if part)
    return f"{type(error).__name__} ({words})" if words else type(error).__name__
