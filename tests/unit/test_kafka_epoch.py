"""Requests of a transaction against scripted answers of brokers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import aiokafka.errors as kafka_errors
import pytest
from aiokafka.client import AIOKafkaClient

from headrace.log.errors import RecordTooLarge
from headrace.log.kafka import transactions
from headrace.log.kafka.producer import RecordBatch
from headrace.log.kafka.topic_cache import TopicLimits
from headrace.log.kafka.transactions import ProducerEpoch
from headrace.log.port import Committed, NewRecord, TopicPartition
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING

ANSWERS, SOURCE = TopicPartition("answers", 0), TopicPartition("requests", 0)
MARKERS_PENDING, NOT_COORDINATOR, FENCED, OTHERS_FAILED = 51, 16, 47, 55
NOT_ENOUGH_REPLICAS, TOO_LARGE, DUPLICATE = 19, 10, 46
FORBIDDEN = 29

NO_PAUSES = replace(TUNING.kafka, transaction_retry=Backoff(first_s=0.0, longest_s=0.0, jitter=0.0))

Answer = int | Exception


class Client:
    """Answers each kind of request with these codes or errors in turn, and then with success."""

    def __init__(self, **answers: Sequence[Answer]) -> None:
        self._answers = {name: list(each) for name, each in answers.items()}
        self.asked: list[str] = []
        self.lookups = 0
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)

    async def coordinator_lookup(self, kind: object, key: str) -> int:
        self.lookups += 1
        return self.lookups

    def force_metadata_update(self) -> None:
        """Nothing has changed."""

    async def send(self, node: int, request: object, group: object = None) -> Any:
        name = type(request).__name__.removesuffix("Request")
        self.asked.append(name)
        await asyncio.sleep(0)
        waiting = self._answers.get(name)
        answer = waiting.pop(0) if waiting else 0
        if isinstance(answer, Exception):
            raise answer
        if name == "Produce":
            return SimpleNamespace(topics=[("answers", [(0, answer, 0, 0, 0)])])
        if name in {"AddPartitionsToTxn", "TxnOffsetCommit"}:
            return SimpleNamespace(errors=[("answers", [(0, answer)])])
        return SimpleNamespace(error_code=answer, producer_id=7, producer_epoch=3)


def packed(*values: bytes) -> list[list[RecordBatch]]:
    """Return one batch for each value, all for one partition."""
    batches = []
    for value in values:
        limits = TopicLimits(1000, needs_key=False)
        batch = RecordBatch(ANSWERS, limits, 0, 1000, is_transactional=True)
        batch.add([NewRecord(None, value)], 0)
        batches.append(batch)
    return [batches]


async def transact(client: Client, *values: bytes) -> None:
    """One transaction of records and offsets."""
    epoch = ProducerEpoch(cast(AIOKafkaClient, client), "id", 10_000, 10_000, NO_PAUSES)
    await epoch.enter()
    await epoch.write(packed(*(values or (b"v",))), "group", {SOURCE: Committed(1)})
    await epoch.commit()


async def test_epoch_sends_records_and_offsets_concurrently() -> None:
    """Neither waits for the other's answer; the end waits for both."""
    client = Client()
    await transact(client)
    assert client.asked[:3] == ["InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn"]
    assert set(client.asked[3:5]) == {"Produce", "TxnOffsetCommit"}
    assert client.asked[5:] == ["EndTxn"]


async def test_epoch_sends_batch_after_previous_acknowledgement() -> None:
    """Their sequence numbers go on, so that a broker takes each once."""
    client = Client(Produce=[NOT_ENOUGH_REPLICAS, DUPLICATE])
    await transact(client, b"first", b"second")
    assert Counter(client.asked)["Produce"] == 3


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("InitProducerId", MARKERS_PENDING),
        ("AddPartitionsToTxn", MARKERS_PENDING),
        ("AddOffsetsToTxn", NOT_COORDINATOR),
        ("TxnOffsetCommit", NOT_COORDINATOR),
        ("EndTxn", NOT_COORDINATOR),
    ],
)
async def test_epoch_retries_retriable_errors(name: str, code: int) -> None:
    """Markers of the last transaction that are still being written, and moved coordinators, are
    retried.
    """
    client = Client(**{name: [code, code]})
    await transact(client)
    assert Counter(client.asked)[name] == 3
    assert client.lookups == (2 if code == MARKERS_PENDING else 4)


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("AddPartitionsToTxn", FENCED, kafka_errors.InvalidProducerEpoch),
        ("AddPartitionsToTxn", FORBIDDEN, kafka_errors.TopicAuthorizationFailedError),
        ("Produce", FENCED, kafka_errors.InvalidProducerEpoch),
        ("Produce", TOO_LARGE, RecordTooLarge),
        ("TxnOffsetCommit", FENCED, kafka_errors.InvalidProducerEpoch),
        ("EndTxn", FENCED, kafka_errors.InvalidProducerEpoch),
    ],
)
async def test_epoch_ends_transaction_on_fatal_error(
    name: str, code: int, error: type[Exception]
) -> None:
    """Nothing is committed after it."""
    client = Client(**{name: [code]})
    with pytest.raises(error):
        await transact(client)
    assert client.asked.count("EndTxn") == (name == "EndTxn")


async def test_transaction_end_with_lost_answer_is_not_sent_twice() -> None:
    """It could arrive late, and end another transaction."""
    client = Client(EndTxn=[kafka_errors.KafkaConnectionError()])
    with pytest.raises(kafka_errors.KafkaConnectionError):
        await transact(client)
    assert client.asked.count("EndTxn") == 1


async def test_coordinator_lookup_with_lost_answer_is_repeated() -> None:
    """It does no harm to ask twice for what a broker knows again, or what only adds to a set."""
    lost = kafka_errors.KafkaConnectionError
    names = ("AddPartitionsToTxn", "AddOffsetsToTxn", "Produce")
    client = Client(**{name: [lost()] for name in names})
    await transact(client)
    assert [client.asked.count(name) for name in names] == [2, 2, 2]


async def test_transactional_offsets_with_lost_answer_are_not_sent_twice() -> None:
    """They could arrive late, and take the place of those of a later transaction."""
    client = Client(TxnOffsetCommit=[kafka_errors.KafkaConnectionError()])
    with pytest.raises(kafka_errors.KafkaConnectionError):
        await transact(client)
    assert client.asked.count("TxnOffsetCommit") == 1
    assert "EndTxn" not in client.asked


def test_fatal_error_outweighs_retriable_ones() -> None:
    """The other partitions were not tried because of it."""
    answer = SimpleNamespace(errors=[("a", [(0, OTHERS_FAILED)]), ("b", [(0, FORBIDDEN)])])
    error = transactions._error_in(answer)
    assert isinstance(error, kafka_errors.TopicAuthorizationFailedError)
    assert error.args == ("b",)
