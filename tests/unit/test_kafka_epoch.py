"""Requests of a transaction against scripted answers of brokers."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import aiokafka.errors as kafka_errors
import pytest
from aiokafka.client import AIOKafkaClient
from msgspec.structs import replace

from headrace.log.errors import LogUnavailable, RecordTooLarge
from headrace.log.kafka import transactions
from headrace.log.kafka.errors import TransactionAbortable, in_port_words
from headrace.log.kafka.producer import RecordBatch
from headrace.log.kafka.topic_cache import TopicLimits
from headrace.log.kafka.transaction_requests import has_second_version
from headrace.log.kafka.transactions import ProducerEpoch
from headrace.log.port import Committed, NewRecord, TopicPartition
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING

ANSWERS, SOURCE = TopicPartition("answers", 0), TopicPartition("requests", 0)
MARKERS_PENDING, NOT_COORDINATOR, FENCED, OTHERS_FAILED = 51, 16, 47, 55
NOT_ENOUGH_REPLICAS, TOO_LARGE, DUPLICATE = 19, 10, 46
FORBIDDEN = 29
ABORTABLE = 120
PRODUCE = 0

NO_PAUSES = replace(TUNING.kafka, transaction_retry=Backoff(first_s=0.0, longest_s=0.0, jitter=0.0))

Answer = int | Exception


SECOND_VERSION = {2: b"\x02\x14transaction.version" + bytes((0, 2, 0, 2, 0))}
"""Tagged fields of an ApiVersions response: the feature and its levels."""


class Client:
    """Answers each kind of request with these codes or errors in turn, and then with success.

    Each end of a transaction returns the next epoch.
    """

    def __init__(
        self, features: Mapping[int, bytes] | None = None, /, **answers: Sequence[Answer]
    ) -> None:
        self._answers = {name: list(each) for name, each in answers.items()}
        self._features = features or {}
        self._epoch = 3
        self.asked: list[str] = []
        self.requests: list[Any] = []
        self.connections: set[object] = set()
        self.lookups = 0
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)

    async def coordinator_lookup(self, kind: object, key: str) -> int:
        self.lookups += 1
        return self.lookups

    def force_metadata_update(self) -> None:
        """Nothing has changed."""

    async def send(self, node: int, request: object, group: object = None) -> Any:
        name = type(request).__name__.removesuffix("Request")
        await asyncio.sleep(0)
        if name == "Features":
            return SimpleNamespace(tags=self._features)
        self.asked.append(name)
        self.requests.append(request)
        self.connections.add(group)
        waiting = self._answers.get(name)
        answer = waiting.pop(0) if waiting else 0
        if isinstance(answer, Exception):
            raise answer
        if name == "Produce":
            return SimpleNamespace(topics=[("answers", [(0, answer, 0, 0, 0)])])
        if name in {"AddPartitionsToTxn", "TxnOffsetCommit"}:
            return SimpleNamespace(errors=[("answers", [(0, answer)])])
        if name == "EndTxn" and not answer:
            self._epoch += 1
        return SimpleNamespace(error_code=answer, producer_id=7, producer_epoch=self._epoch)


def packed(*values: bytes) -> list[list[RecordBatch]]:
    """Return one batch for each value, all for one partition."""
    batches = []
    for value in values:
        limits = TopicLimits(1000, needs_key=False)
        batch = RecordBatch(ANSWERS, limits, 0, 1000, is_transactional=True)
        batch.add([NewRecord(None, value)], 0)
        batches.append(batch)
    return [batches]


def epoch_and_sequence(batch: bytes) -> tuple[int, int]:
    """Return the producer's epoch and the first sequence number in the header of a batch."""
    found: tuple[int, int] = struct.unpack_from(">hi", batch, 51)
    return found


async def transact(client: Client, *values: bytes, times: int = 1) -> None:
    """Transactions of records and offsets, one after the other."""
    epoch = ProducerEpoch(cast(AIOKafkaClient, client), "id", 10_000, 10_000, NO_PAUSES)
    await epoch.enter()
    for _ in range(times):
        await epoch.write(packed(*(values or (b"v",))), "group", {SOURCE: Committed(1)})
        await epoch.commit()


async def test_epoch_sends_records_and_offsets_at_once() -> None:
    """Neither waits here for the other's answer; the end waits for both."""
    client = Client()
    await transact(client)
    assert client.asked[:3] == ["InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn"]
    assert set(client.asked[3:5]) == {"Produce", "TxnOffsetCommit"}
    assert client.asked[5:] == ["EndTxn"]


async def test_second_version_adds_neither_partitions_nor_group() -> None:
    """Brokers add them, when they receive records and offsets."""
    client = Client(SECOND_VERSION)
    await transact(client)
    assert client.asked[0] == "InitProducerId"
    assert set(client.asked[1:3]) == {"Produce", "TxnOffsetCommit"}
    assert client.asked[3:] == ["EndTxn"]


async def test_requests_of_transaction_share_connection() -> None:
    """A broker that has two of them asks the coordinator for one at a time."""
    client = Client(SECOND_VERSION)
    await transact(client)
    assert client.connections == {None}


async def test_second_version_goes_on_with_epoch_of_last_end() -> None:
    """A delayed request of the first transaction is fenced from the second one."""
    client = Client(SECOND_VERSION)
    await transact(client, times=2)
    messages = [request.prepare({}) for request in client.requests[1:]]
    epochs = [each.producer_epoch for each in messages if each.API_KEY != PRODUCE]
    assert epochs == [3, 3, 4, 4]
    batches = [each.topics[0][1][0][1] for each in messages if each.API_KEY == PRODUCE]
    assert [epoch_and_sequence(batch) for batch in batches] == [(3, 0), (4, 0)]


async def test_second_version_retries_records_sent_while_markers_are_written() -> None:
    """A broker refuses them as it refuses AddPartitionsToTxn of the first version."""
    client = Client(SECOND_VERSION, Produce=[MARKERS_PENDING])
    await transact(client)
    assert Counter(client.asked)["Produce"] == 2


async def test_transaction_that_broker_cannot_join_is_unavailable_not_refused() -> None:
    """The same records may succeed in another transaction."""
    client = Client(SECOND_VERSION, Produce=[ABORTABLE])
    with pytest.raises(TransactionAbortable) as caught:
        await transact(client)
    assert isinstance(in_port_words(caught.value, "transaction"), LogUnavailable)


def test_finalized_feature_below_second_version_keeps_first() -> None:
    """A cluster that was upgraded from Kafka 3 has level 0 or 1 until its operator raises it."""
    levels = bytes((0, 1, 0, 0, 0))
    response = SimpleNamespace(tags={2: b"\x02\x14transaction.version" + levels})
    assert not has_second_version(response)
    assert not has_second_version(SimpleNamespace(tags={}))


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
    error = transactions.error_in(answer)
    assert isinstance(error, kafka_errors.TopicAuthorizationFailedError)
    assert error.args == ("b",)
