"""Errors of aiokafka in the words of an operator."""

from __future__ import annotations

import aiokafka.errors as kafka_errors
import pytest
from aiokafka.errors import KafkaError

from headrace.log.kafka.errors import FencedProducer, broker_error, in_port_words


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            kafka_errors.RequestTimedOutError(),
            "expected an answer within the request's timeout, got none (RequestTimedOutError)",
        ),
        (
            kafka_errors.KafkaTimeoutError(),
            "expected the partition's leader to accept the records in time",
        ),
        (
            kafka_errors.KafkaConnectionError(),
            "expected an answer, but the connection was lost (KafkaConnectionError)",
        ),
        (
            kafka_errors.NotEnoughReplicasError(),
            "expected at least min.insync.replicas replicas in sync, got fewer",
        ),
        (
            kafka_errors.PolicyViolationError(),
            "Request parameters do not satisfy the configured policy (PolicyViolationError)",
        ),
        (FencedProducer(), "a producer with the same transactional id has taken over"),
    ],
)
def test_error_without_text_says_what_happened(error: KafkaError, sentence: str) -> None:
    """A bare class name of a client library tells an operator nothing."""
    assert str(in_port_words(error, "commit")).startswith(f"commit: {sentence}")


def test_error_with_text_keeps_it() -> None:
    """It has the address of the broker."""
    lost = kafka_errors.KafkaConnectionError("Connection at 10.0.0.1:9092 closed")
    assert str(in_port_words(lost, "commit")) == (
        "commit: Connection at 10.0.0.1:9092 closed (KafkaConnectionError)"
    )


def test_error_with_details_has_both() -> None:
    """A topic, or another detail of a broker's answer, is no sentence by itself."""
    refused = kafka_errors.TopicAuthorizationFailedError("orders")
    assert str(in_port_words(refused, "read")) == (
        "read: the broker does not allow this on the topic (TopicAuthorizationFailedError: orders)"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            87,  # INVALID_RECORD
            "a topic with cleanup.policy=compact accepts no record without a key (InvalidRecord)",
        ),
        (9999, "error code 9999 (UnknownError)"),
    ],
)
def test_code_unknown_to_aiokafka_says_what_happened(code: int, text: str) -> None:
    """Without its number, nobody could look up a code."""
    error = broker_error(code)
    assert error is not None
    assert text in str(in_port_words(error, "send"))
