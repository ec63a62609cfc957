"""Batches of a producer against scripted answers of brokers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import aiokafka.errors as kafka_errors
import pytest
from msgspec.structs import replace

from headrace.errors import HeadraceError
from headrace.log.errors import (
    LogAuthenticationFailed,
    LogUnavailable,
    RecordTooLarge,
    TopicForbidden,
)
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.producer import KafkaProducer, PartitionQueue, PendingBatch, Sender
from headrace.log.kafka.topic_cache import TopicLimits
from headrace.log.port import NewRecord, TopicPartition
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING, KafkaTuning

ONE, TWO, THREE = (TopicPartition("answers", number) for number in range(3))
NOT_LEADER, TOO_LARGE, NOT_ENOUGH_REPLICAS, FORBIDDEN, OUT_OF_ORDER, DUPLICATE = (
    6,
    10,
    19,
    29,
    45,
    46,
)
LOADING = 14
UNKNOWN_TOPIC = 3

AT_ONCE = Backoff(first_s=0.0, longest_s=0.0, jitter=0.0)
TUNED = replace(TUNING.kafka, request_retry_s=0.0, producer_id_retry=AT_ONCE)

Answer = int | Exception | None
"""An error code, the failure of a request, or no answer for the partition."""


class Sent(NamedTuple):
    """A batch as a broker gets it."""

    node: int
    producer_id: int
    sequence: int
    records: int


class Brokers:
    """Answers the requests of one client, and is its cluster.

    Args:
        answers: of each partition, in turn; then success.
        identity: of the requests for a producer id, in turn; then success.
        throttle_time_ms: of each answer to a produce request.

    Attributes:
        requests: the batches of each produce request, by partition.
        leaders: the leader of each partition; the others have none.
        may_answer: while cleared, no request is answered, except those for a producer id.
        first_request: set by the first produce request.
        asked_for_metadata: set by a request for metadata.
    """

    def __init__(
        self,
        answers: Mapping[TopicPartition, Sequence[Answer]] | None = None,
        identity: Sequence[int | Exception] = (),
        throttle_time_ms: int = 0,
    ) -> None:
        self._throttle_time_ms = throttle_time_ms
        self._answers = {each: list(all_) for each, all_ in (answers or {}).items()}
        self._identity = list(identity)
        self._next_producer_id = 1
        self.requests: list[dict[TopicPartition, Sent]] = []
        self.leaders = {ONE: 1, TWO: 1, THREE: 1}
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.first_request = asyncio.Event()
        self.asked_for_metadata = asyncio.Event()
        self._partitions = {0, 1, 2}
        self.cluster = SimpleNamespace(
            leader_for_partition=self.leaders.get, partitions_for_topic=lambda _: self._partitions
        )

    def delete_partition(self, partition: TopicPartition) -> None:
        """From now on metadata is without it."""
        self._partitions.remove(partition.partition)
        del self.leaders[partition]

    def get_random_node(self) -> int:
        """The only broker that is known to give producer ids."""
        return 0

    def force_metadata_update(self) -> None:
        """The leaders stay as they are."""
        self.asked_for_metadata.set()

    async def send(self, node: int, request: Any) -> Any:
        """Answer a request."""
        await asyncio.sleep(0)
        if type(request).__name__ == "InitProducerIdRequest":
            return self._identify()
        if type(request).__name__ == "DescribeConfigsRequest":
            await self.may_answer.wait()
            return SimpleNamespace(resources=[])
        message = request.prepare({0: (0, 7)})
        batches = {
            TopicPartition(topic, number): _sent(node, content)
            for topic, parts in message.topics
            for number, content in parts
        }
        self.requests.append(batches)
        self.first_request.set()
        await self.may_answer.wait()
        codes = {each: self._answer(each) for each in batches}
        for failure in codes.values():
            if isinstance(failure, Exception):
                raise failure
        parts = [
            (each.partition, code, 0, 0, 0) for each, code in codes.items() if code is not None
        ]
        return SimpleNamespace(topics=[("answers", parts)], throttle_time_ms=self._throttle_time_ms)

    def _identify(self) -> Any:
        answer = self._identity.pop(0) if self._identity else 0
        if isinstance(answer, Exception):
            raise answer
        found = SimpleNamespace(
            error_code=answer, producer_id=self._next_producer_id, producer_epoch=0
        )
        self._next_producer_id += answer == 0
        return found

    def _answer(self, partition: TopicPartition) -> Answer:
        waiting = self._answers.get(partition)
        return waiting.pop(0) if waiting else 0

    @property
    def sent(self) -> list[Sent]:
        """The batches of all requests."""
        return [batch for request in self.requests for batch in request.values()]


def _sent(node: int, content: bytes) -> Sent:
    producer_id, _epoch, sequence, records = struct.unpack_from(">qhii", content, 43)
    return Sent(node, producer_id, sequence, records)


def connection_to(
    brokers: Brokers,
    tuning: KafkaTuning = TUNED,
    refusal: HeadraceError | None = None,
    request_timeout_s: float = 5.0,
) -> Connection:
    """The connection of one client; `refusal` is what connecting once more would raise."""

    async def open_client() -> Brokers:
        return brokers

    async def close_client(_: object) -> None:
        """Nothing to close."""

    async def refused() -> HeadraceError | None:
        return refusal

    connection = SimpleNamespace(
        tuning=tuning,
        codec=0,
        request_timeout_s=request_timeout_s,
        settings=SimpleNamespace(request_timeout_ms=5000, linger_ms=0),
        open_client=open_client,
        close_client=close_client,
        refusal=refused,
    )
    return cast(Connection, connection)


@asynccontextmanager
async def sending(
    brokers: Brokers, tuning: KafkaTuning = TUNED, refusal: HeadraceError | None = None
) -> AsyncIterator[Sender]:
    """A sender that has started; `refusal` is what connecting once more would raise."""
    sender = Sender(connection_to(brokers, tuning, refusal), lambda: 0.0)
    await sender.start()
    try:
        yield sender
    finally:
        await sender.close()


def add(
    queue: PartitionQueue, records: int = 1, value: bytes = b"v", deadline_s: float = 5.0
) -> PendingBatch:
    """Give a partition a batch that is due."""
    limits = TopicLimits(100_000, needs_key=False)

    def overdue(_: PendingBatch) -> HeadraceError:
        return LogUnavailable("overdue")

    batch = PendingBatch(queue.partition, limits, 0, 100_000, deadline_s, overdue)
    batch.add([NewRecord(None, value)] * records, 0)
    batch.is_due = True
    queue.open_batch = batch
    return batch


async def test_batch_is_acknowledged_after_answer() -> None:
    """Not before: a broker may still refuse it."""
    brokers = Brokers()
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        batch = add(queue, 3)
        sender.send_soon(queue)
        await brokers.first_request.wait()

        assert not batch.ended.done()
        brokers.may_answer.set()
        await batch.acknowledged

    assert brokers.sent == [Sent(node=1, producer_id=1, sequence=0, records=3)]


async def test_batches_that_come_meanwhile_share_next_request() -> None:
    """One request is in flight for each broker."""
    brokers = Brokers()
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        queues = [PartitionQueue(each) for each in (ONE, TWO, THREE)]
        first = add(queues[0])
        sender.send_soon(queues[0])
        await brokers.first_request.wait()
        later = [add(each) for each in queues]
        for each in queues:
            sender.send_soon(each)
        brokers.may_answer.set()
        for batch in (first, *later):
            await batch.acknowledged

    assert [set(each) for each in brokers.requests] == [{ONE}, {ONE, TWO, THREE}]


async def test_sequence_numbers_count_records_of_partition() -> None:
    """They wrap around at the largest number of 32 bits."""
    brokers = Brokers()
    async with sending(brokers) as sender:
        queue, other = PartitionQueue(ONE), PartitionQueue(TWO)
        for records in (2, 3, 1):
            batch = add(queue, records)
            sender.send_soon(queue)
            await batch.acknowledged
        batch = add(other)
        sender.send_soon(other)
        await batch.acknowledged

    assert [each.sequence for each in brokers.sent] == [0, 2, 5, 0]


@pytest.mark.parametrize(
    "failure",
    [NOT_ENOUGH_REPLICAS, NOT_LEADER, kafka_errors.KafkaConnectionError("lost")],
)
async def test_batch_is_sent_again_as_it_was_before_next(failure: Answer) -> None:
    """The broker knows by producer id and sequence number whether it has the batch already."""
    brokers = Brokers({ONE: [failure]})
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        first = add(queue, 2)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        second = add(queue)
        sender.send_soon(queue)
        await first.acknowledged
        await second.acknowledged

    again = Sent(node=1, producer_id=1, sequence=0, records=2)
    assert brokers.sent == [again, again, Sent(1, 1, 2, 1)]


async def test_batch_that_broker_has_already_is_acknowledged() -> None:
    """The first answer was lost; the second says that the numbers are known."""
    brokers = Brokers({ONE: [kafka_errors.RequestTimedOutError(), DUPLICATE]})
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        batch = add(queue)
        sender.send_soon(queue)
        await batch.acknowledged

    assert brokers.sent == [Sent(node=1, producer_id=1, sequence=0, records=1)] * 2


@pytest.mark.parametrize("code", [TOO_LARGE, OUT_OF_ORDER])
async def test_batches_after_failed_one_have_new_producer_id(code: int) -> None:
    """Its sequence numbers are used up: the broker would refuse the next as out of order."""
    brokers = Brokers({ONE: [code]})
    async with sending(brokers) as sender:
        queue, other = PartitionQueue(ONE), PartitionQueue(TWO)
        failed = add(queue)
        sender.send_soon(queue)
        with pytest.raises(RecordTooLarge if code == TOO_LARGE else LogUnavailable):
            await failed.acknowledged
        for each in (queue, other):
            batch = add(each)
            sender.send_soon(each)
            await batch.acknowledged

    assert [(each.producer_id, each.sequence) for each in brokers.sent] == [(1, 0), (2, 0), (2, 0)]


async def test_forbidden_topic_keeps_producer_id() -> None:
    """A caller that names forbidden topics does not slow the others down."""
    brokers = Brokers({ONE: [FORBIDDEN]})
    async with sending(brokers) as sender:
        forbidden, other = PartitionQueue(ONE), PartitionQueue(TWO)
        refused = add(forbidden)
        sender.send_soon(forbidden)
        with pytest.raises(TopicForbidden):
            await refused.acknowledged
        batch = add(other)
        sender.send_soon(other)
        await batch.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1, 1]


async def test_partition_without_answer_fails() -> None:
    """Nobody knows whether the broker has its batch."""
    brokers = Brokers({ONE: [None]})
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        batch = add(queue)
        sender.send_soon(queue)
        with pytest.raises(LogUnavailable, match="expected an answer for each partition"):
            await batch.acknowledged


async def test_batch_is_sent_once_its_leader_is_known() -> None:
    """Until then metadata is asked for."""
    brokers = Brokers()
    brokers.leaders[ONE] = -1
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        batch = add(queue)
        sender.send_soon(queue)
        await brokers.asked_for_metadata.wait()
        brokers.leaders[ONE] = 2
        await batch.acknowledged

    assert [each.node for each in brokers.sent] == [2]


async def test_batch_follows_leader_that_moves_while_it_waits() -> None:
    """It waited for a request to the former leader, and goes to the new one."""
    brokers = Brokers()
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        busy, moved = PartitionQueue(ONE), PartitionQueue(TWO)
        first = add(busy)
        sender.send_soon(busy)
        await brokers.first_request.wait()
        waiting = add(moved)
        sender.send_soon(moved)
        brokers.leaders[TWO] = 2
        brokers.may_answer.set()
        await first.acknowledged
        await waiting.acknowledged

    assert [each.node for each in brokers.sent] == [1, 2]


async def test_retried_batch_follows_new_leader() -> None:
    """The refusal of the former leader makes the client ask for metadata."""
    brokers = Brokers({ONE: [NOT_LEADER]})
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        batch = add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        brokers.leaders[ONE] = 2
        await batch.acknowledged

    assert [each.node for each in brokers.sent] == [1, 2]
    assert brokers.asked_for_metadata.is_set()


@pytest.mark.parametrize("answer", [0, UNKNOWN_TOPIC])
async def test_batches_of_deleted_topic_fail_at_once(answer: Answer) -> None:
    """Those that were sent, and those that were not; whoever sends again learns of the deletion."""
    brokers = Brokers({ONE: [answer]})
    async with sending(brokers) as sender:
        queue, other = PartitionQueue(ONE), PartitionQueue(TWO)
        first = add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        brokers.delete_partition(ONE)
        second = add(queue)
        sender.send_soon(queue)
        if answer:
            with pytest.raises(LogUnavailable, match="no longer know"):
                await first.acknowledged
        with pytest.raises(LogUnavailable, match="no longer know"):
            await second.acknowledged
        kept = add(other)
        sender.send_soon(other)
        await kept.acknowledged

    # The numbers of a batch that was sent are used up.
    assert [each.producer_id for each in brokers.sent] == ([1, 2] if answer else [1, 1])


async def test_request_holds_no_more_than_its_limit() -> None:
    """A broker closes the connection at a larger one; a batch that is larger goes alone."""
    brokers = Brokers()
    tuning = replace(TUNED, max_request_bytes=3000)
    async with sending(brokers, tuning) as sender:
        queues = [PartitionQueue(each) for each in (ONE, TWO, THREE)]
        batches = [
            add(queue, value=bytes(size))
            for queue, size in zip(queues, (4000, 1200, 1200), strict=True)
        ]
        for queue in queues:
            sender.send_soon(queue)
        for batch in batches:
            await batch.acknowledged

    assert [set(each) for each in brokers.requests] == [{ONE}, {TWO, THREE}]


async def test_batch_that_is_due_while_producer_is_throttled_is_not_sent() -> None:
    """The broker would read it from the connection later, after it was given up."""
    brokers = Brokers(throttle_time_ms=3_600_000)
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        first = add(queue)
        sender.send_soon(queue)
        await first.acknowledged
        second = add(queue, deadline_s=0.05)
        sender.send_soon(queue)
        with pytest.raises(LogUnavailable, match="overdue"):
            await second.acknowledged

    assert len(brokers.sent) == 1


async def test_batch_that_is_overdue_under_a_quota_says_so() -> None:
    """A broker may delay a client for minutes, also after its quota was raised."""
    brokers = Brokers(throttle_time_ms=3_600_000)
    tuning = replace(TUNED, flush_timeout_s=0.0)
    async with KafkaProducer(connection_to(brokers, tuning, request_timeout_s=0.1)) as producer:
        (first,) = await producer.send(ONE, [NewRecord(None, b"v")])
        await first.acknowledged
        (overdue,) = await producer.send(ONE, [NewRecord(None, b"v")])
        with pytest.raises(LogUnavailable, match=r"delays this client by its quota, .* 3600 s"):
            await overdue.acknowledged


async def test_send_without_room_under_a_quota_says_so() -> None:
    """The batch before it waits for the end of the delay."""
    brokers = Brokers(throttle_time_ms=3_600_000)
    tuning = replace(TUNED, max_batch_bytes=100, flush_timeout_s=0.0)
    async with KafkaProducer(connection_to(brokers, tuning, request_timeout_s=0.1)) as producer:
        (first,) = await producer.send(ONE, [NewRecord(None, bytes(80))])
        await first.acknowledged
        with pytest.raises(LogUnavailable, match=r"the batch before was not sent .* its quota"):
            await producer.send(ONE, [NewRecord(None, bytes(80))] * 2)


async def test_batch_after_overdue_one_waits_for_its_answer() -> None:
    """Otherwise the later records could be written before the earlier ones."""
    brokers = Brokers()
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        overdue = add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        overdue.fail(LogUnavailable("overdue"))
        sender.renew_producer_id()
        following = add(queue)
        sender.send_soon(queue)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(brokers.requests) == 1

        brokers.may_answer.set()
        await following.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1, 2]


async def test_refusal_of_overdue_batch_keeps_producer_id() -> None:
    """Those that follow have a new one since the deadline; another would only delay them."""
    brokers = Brokers({ONE: [NOT_ENOUGH_REPLICAS]})
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        queue, other = PartitionQueue(ONE), PartitionQueue(THREE)
        overdue = add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        overdue.fail(LogUnavailable("overdue"))
        sender.renew_producer_id()
        brokers.leaders[THREE] = 2
        meanwhile = add(other)
        sender.send_soon(other)
        for _ in range(20):
            await asyncio.sleep(0)
        brokers.may_answer.set()
        await meanwhile.acknowledged
        following = add(queue)
        sender.send_soon(queue)
        await following.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1, 2, 2]


async def test_overdue_batch_is_not_sent_again() -> None:
    """Its caller has been told that it failed, and may have sent the records anew."""
    brokers = Brokers({ONE: [NOT_ENOUGH_REPLICAS]})
    brokers.may_answer.clear()
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        overdue = add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
        overdue.fail(LogUnavailable("overdue"))
        brokers.may_answer.set()
        following = add(queue, 2)
        sender.send_soon(queue)
        await following.acknowledged

    assert [each.records for each in brokers.sent] == [1, 2]


async def test_batch_that_is_overdue_unsent_keeps_producer_id() -> None:
    """It has used up no sequence numbers; another producer id would only delay the others."""
    brokers = Brokers()
    brokers.leaders[ONE] = -1
    connection = connection_to(brokers, request_timeout_s=0.1)
    async with KafkaProducer(connection) as producer:
        (overdue,) = await producer.send(ONE, [NewRecord(None, b"v")])
        with pytest.raises(LogUnavailable):
            await overdue.acknowledged
        (other,) = await producer.send(TWO, [NewRecord(None, b"v")])
        await other.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1]


async def test_batches_after_sent_one_that_is_overdue_have_new_producer_id() -> None:
    """Nobody knows whether the broker has its sequence numbers."""
    brokers = Brokers()
    connection = connection_to(brokers, request_timeout_s=0.1)
    async with KafkaProducer(connection) as producer:
        (overdue,) = await producer.send(ONE, [NewRecord(None, b"v")])
        brokers.may_answer.clear()
        with pytest.raises(LogUnavailable):
            await overdue.acknowledged
        brokers.may_answer.set()
        (other,) = await producer.send(TWO, [NewRecord(None, b"v")])
        await other.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1, 2]


async def test_send_that_waits_for_room_fails_as_producer_closes() -> None:
    """Nothing will make room any more."""
    brokers = Brokers()
    tuning = replace(TUNED, max_batch_bytes=100, flush_timeout_s=0.0)
    async with KafkaProducer(connection_to(brokers, tuning)) as producer:
        record = NewRecord(None, bytes(80))
        await producer.send(ONE, [record])
        brokers.may_answer.clear()
        await brokers.first_request.wait()
        waiting = asyncio.create_task(producer.send(ONE, [record, record]), name="send")
        await asyncio.sleep(0)

    with pytest.raises(LogUnavailable, match="the producer was closed"):
        await waiting


async def test_first_send_to_topic_fails_as_producer_closes() -> None:
    """Its client would not hear of the topic any more."""
    brokers = Brokers()
    brokers.may_answer.clear()
    async with KafkaProducer(connection_to(brokers)) as producer:
        asking = asyncio.create_task(producer.send(ONE, [NewRecord(None, b"v")]), name="send")
        await asyncio.sleep(0)

    with pytest.raises(LogUnavailable, match="the producer was closed"):
        await asking


async def test_producer_id_is_asked_for_until_broker_gives_one() -> None:
    """A broker that has just started, or is out of reach, gives none yet."""
    brokers = Brokers(
        {ONE: [OUT_OF_ORDER]}, [0, LOADING, kafka_errors.KafkaConnectionError("lost")]
    )
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        failed = add(queue)
        sender.send_soon(queue)
        with pytest.raises(LogUnavailable):
            await failed.acknowledged
        batch = add(queue)
        sender.send_soon(queue)
        await batch.acknowledged

    assert [each.producer_id for each in brokers.sent] == [1, 2]


async def test_batches_fail_once_brokers_refuse_us() -> None:
    """The broker's reason is told, instead of a deadline that has passed."""
    brokers = Brokers({ONE: [OUT_OF_ORDER]}, [0, kafka_errors.KafkaConnectionError("lost")])
    async with sending(brokers, refusal=LogAuthenticationFailed("wrong password")) as sender:
        queue = PartitionQueue(ONE)
        failed = add(queue)
        sender.send_soon(queue)
        with pytest.raises(LogUnavailable):
            await failed.acknowledged
        batch = add(queue)
        sender.send_soon(queue)
        with pytest.raises(LogAuthenticationFailed, match="wrong password"):
            await batch.acknowledged


async def test_batches_fail_if_no_producer_id_can_be_asked_for() -> None:
    """Such as while the file with a token cannot be read; the next batch tries again."""
    brokers = Brokers({ONE: [OUT_OF_ORDER]}, [0, ValueError("the token is no text")])
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        for reason in ("sequence", "the token is no text"):
            failed = add(queue)
            sender.send_soon(queue)
            with pytest.raises(LogUnavailable, match=reason):
                await failed.acknowledged
        batch = add(queue)
        sender.send_soon(queue)
        await batch.acknowledged


async def test_closed_sender_sends_nothing() -> None:
    """Neither what waits for another attempt, nor what comes later."""
    brokers = Brokers({ONE: [NOT_ENOUGH_REPLICAS]})
    async with sending(brokers) as sender:
        queue = PartitionQueue(ONE)
        add(queue)
        sender.send_soon(queue)
        await brokers.first_request.wait()
    sender.send_soon(queue)
    for _ in range(20):
        await asyncio.sleep(0)

    assert len(brokers.requests) == 1
