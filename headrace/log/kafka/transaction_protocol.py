"""The transaction protocol: the requests of one epoch of a transactional id.

aiokafka's own producer makes one request after the other, each by way of a task, and waits 20 ms,
or 100, while the previous transaction is still ending. Here independent requests run concurrently:
a transaction takes three round trips instead of five.

Every method raises aiokafka's errors, except the port's for records that their topic refuses, and
waits as long as it takes; the caller bounds it in time.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import KafkaError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from headrace.log.errors import LogRefused, RecordRefused
from headrace.log.kafka.admin import require_known_leaders
from headrace.log.kafka.batch import Packed
from headrace.log.kafka.closing import close_client
from headrace.log.kafka.connection import RETRY_BACKOFF_S
from headrace.log.kafka.errors import broker_error, in_port_words
from headrace.log.port import Committed, TopicPartition

_MARKERS_S: Final = 0.002
"""Minimum pause after the end of the last transaction, and the first retry delay, which doubles:
the broker refuses a new transaction while it writes the markers of the last one.
"""
_MAX_MARKERS_S: Final = 0.02
_ALL_REPLICAS: Final = -1
_SEQUENCES: Final = 2**31
"""A partition's sequence numbers wrap around to 0 (`DefaultRecordBatch.incrementSequence`)."""
_COULD_NOT_END = (
    kafka_errors.ConcurrentTransactions,
    kafka_errors.GroupCoordinatorNotAvailableError,
    kafka_errors.GroupLoadInProgressError,
    kafka_errors.NotCoordinatorForGroupError,
)
_NOT_THE_RECORDS = (
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidTxnState,
    kafka_errors.TopicAuthorizationFailedError,
)


class ProducerEpoch:
    """One epoch: entering begins it and fences the former epoch; closing ends it.

    Args:
        client: a connected client, used by this epoch alone and closed with it.
        transactional_id: the id.
        transaction_timeout_ms: after this the broker aborts a transaction by itself.
        request_timeout_ms: how long a broker may wait for its replicas.
    """

    def __init__(
        self,
        client: AIOKafkaClient,
        transactional_id: str,
        transaction_timeout_ms: int,
        request_timeout_ms: int,
    ) -> None:
        self.client = client
        self._id = transactional_id
        self._transaction_timeout_ms = transaction_timeout_ms
        self._request_timeout_ms = request_timeout_ms
        self._producer_id, self._epoch = -1, -1
        self._sequences: dict[TopicPartition, int] = defaultdict(int)
        self._coordinators: dict[CoordinationType, int] = {}
        self._ended_s = 0.0  # monotonic
        self._closed = False

    async def enter(self) -> None:
        """Get the epoch. Any transaction that the former epoch left open has ended by then."""
        request = InitProducerIdRequest(self._id, self._transaction_timeout_ms)
        answer = await self._ask(CoordinationType.TRANSACTION, self._id, request)
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch

    async def close(self) -> None:
        """Close the sockets. Requests in flight fail and are not retried."""
        self._closed = True
        await close_client(self.client)

    # A transaction: `write`, then `commit`

    async def write(
        self,
        lanes: Sequence[Sequence[Packed]],
        group: str,
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        """Write the batches of each partition in their order, and the group's offsets.

        Both are sent concurrently, since neither counts before the transaction is committed.

        Raises:
            RecordTooLarge, RecordRefused: a broker refuses a batch.
            LogUnavailable: a partition has lost its leader.
        """
        since_end_s = time.monotonic() - self._ended_s
        if since_end_s < _MARKERS_S:
            await asyncio.sleep(_MARKERS_S - since_end_s)
        steps: dict[str, Coroutine[Any, Any, None]] = {}
        if lanes:
            steps["records"] = self._write_records(lanes)
        if offsets:
            steps["offsets"] = self._write_offsets(group, offsets)
        # Returns after all responses, so that the caller commits only what the brokers have.
        await _side_by_side(steps)

    async def commit(self) -> None:
        """Commit the transaction. After an error its outcome is unknown.

        The request is retried only if the coordinator answered that it could not end the
        transaction. It is not retried after a lost response: it could arrive late, and end a later
        transaction (KAFKA-17754).
        """
        request = EndTxnRequest(*self._identity, transaction_result=True)
        kind, pauses = CoordinationType.TRANSACTION, _pauses_s()
        while True:
            node = await self._coordinator(kind, self._id)
            error = _error_in(await self._send(node, request, ConnectionGroup.COORDINATION))
            if error is None:
                self._ended_s = time.monotonic()
                return
            if not isinstance(error, _COULD_NOT_END):
                raise error
            await self._pause_after(error, kind, pauses)

    @property
    def _identity(self) -> tuple[str, int, int]:
        return self._id, self._producer_id, self._epoch

    async def _write_offsets(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        # The transaction coordinator must know the group before the offsets go to it.
        await self._ask(
            CoordinationType.TRANSACTION, self._id, AddOffsetsToTxnRequest(*self._identity, group)
        )
        topics: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (topic, number), (offset, metadata) in offsets.items():
            topics[topic].append((number, offset, metadata))
        request = TxnOffsetCommitRequest(
            self._id, group, self._producer_id, self._epoch, list(topics.items())
        )
        # Do not retry after a lost response: a late request would overwrite the offsets of a later
        # transaction.
        await self._ask(CoordinationType.GROUP, group, request, if_lost=False)

    async def _write_records(self, lanes: Sequence[Sequence[Packed]]) -> None:
        """Write one batch of each partition at a time: the first of all, then the second of all."""
        topics: dict[str, list[int]] = defaultdict(list)
        for lane in lanes:
            topics[lane[0].partition.topic].append(lane[0].partition.partition)
        request = AddPartitionsToTxnRequest(*self._identity, list(topics.items()))
        # The transaction coordinator must know the partitions before any batch is sent.
        await self._ask(CoordinationType.TRANSACTION, self._id, request)
        # One batch per partition at a time keeps their order.
        for rank in zip_longest(*lanes):
            waiting: dict[TopicPartition, bytes] = {}
            for packed in filter(None, rank):
                builder, sequence = packed.builder, self._sequences[packed.partition]
                builder._set_producer_state(self._producer_id, self._epoch, sequence)
                waiting[packed.partition] = builder._build()
                following = (sequence + builder.record_count()) % _SEQUENCES
                self._sequences[packed.partition] = following
            await self._deliver(waiting)

    async def _deliver(self, waiting: dict[TopicPartition, bytes]) -> None:
        """Send batches to the leaders of their partitions; retry until all are acknowledged.

        Retrying writes nothing twice: a broker recognizes a batch by its sequence number.
        """
        pauses = _pauses_s()
        while True:
            by_node: dict[int, list[TopicPartition]] = defaultdict(list)
            for partition in waiting:
                leader = self.client.cluster.leader_for_partition(partition)
                if leader is None:
                    self.client.force_metadata_update()
                else:
                    by_node[leader].append(partition)
            await _side_by_side(
                {
                    f"produce-{node}": self._deliver_to(node, partitions, waiting)
                    for node, partitions in by_node.items()
                }
            )
            if not waiting:
                return
            await asyncio.sleep(next(pauses))
            require_known_leaders(self.client, waiting)

    async def _deliver_to(
        self, node: int, partitions: Iterable[TopicPartition], waiting: dict[TopicPartition, bytes]
    ) -> None:
        """Send batches to one broker; remove those that it acknowledges from `waiting`."""
        errors: list[KafkaError] = []
        topics: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for partition in partitions:
            topics[partition.topic].append((partition.partition, waiting[partition]))
        request = ProduceRequest(
            self._id, _ALL_REPLICAS, self._request_timeout_ms, list(topics.items())
        )
        try:
            answer = await self._send(node, request)
        except KafkaError as unreached:
            errors.append(unreached.with_traceback(None))  # its frames hold the batches
        else:
            for topic, acknowledged in answer.topics:
                for number, code, *_ in acknowledged:
                    error = broker_error(code, topic)
                    if error is None or isinstance(error, kafka_errors.DuplicateSequenceNumber):
                        waiting.pop(TopicPartition(topic, number), None)
                    else:
                        errors.append(error)
        for error in errors:
            if not error.retriable:
                raise _in_record_words(error)
            if error.invalid_metadata:
                self.client.force_metadata_update()

    # Coordinators

    async def _ask(
        self, kind: CoordinationType, key: str, request: Any, *, if_lost: bool = True
    ) -> Any:
        """Send a request to the coordinator of an id or a group; retry until it succeeds.

        Args:
            kind: the kind of coordinator.
            key: the id, or the group.
            request: the request.
            if_lost: whether to retry if the outcome is unknown; otherwise the error is raised.
        """
        pauses = _pauses_s()
        while True:
            is_sent = False
            try:
                node = await self._coordinator(kind, key)
                is_sent = True
                answer = await self._send(node, request, ConnectionGroup.COORDINATION)
                error = _error_in(answer)
            except KafkaError as unreached:
                if is_sent and not if_lost:
                    raise
                error = unreached
            if error is None:
                return answer
            await self._pause_after(error, kind, pauses)

    async def _coordinator(self, kind: CoordinationType, key: str) -> int:
        node = self._coordinators.get(kind)
        if node is None:
            node = self._coordinators[kind] = await self.client.coordinator_lookup(kind, key)
        return node

    async def _pause_after(
        self, error: KafkaError, kind: CoordinationType, pauses: Iterator[float]
    ) -> None:
        """Wait if the error is transient, and look up the coordinator again; else raise it."""
        pause_s = next(pauses)
        if isinstance(error, kafka_errors.ConcurrentTransactions):
            await asyncio.sleep(min(pause_s, _MAX_MARKERS_S))
            return
        if not error.retriable:
            raise error
        self._coordinators.pop(kind, None)
        await asyncio.sleep(pause_s)

    async def _send(
        self, node: int, request: Any, group: ConnectionGroup = ConnectionGroup.DEFAULT
    ) -> Any:
        if self._closed:  # aiokafka's client would connect again
            raise kafka_errors.ProducerClosed
        return await self.client.send(node, request, group=group)


def _pauses_s() -> Iterator[float]:
    """Yield the pauses between retries. A broker that asks the coordinator for two of our requests
    at once fails one of them, which passes at once.
    """
    pause_s = _MARKERS_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, RETRY_BACKOFF_S)


def _in_record_words(error: KafkaError) -> Exception:
    """Return the port's error for a refused batch, unless the error concerns the whole
    transaction.
    """
    if isinstance(error, _NOT_THE_RECORDS):
        refusal: Exception = error
        return refusal
    translated = in_port_words(error, "send in a transaction")
    return RecordRefused(str(translated)) if isinstance(translated, LogRefused) else translated


def _error_in(answer: Any) -> KafkaError | None:
    """Return the error in a coordinator's response; of several, preferably one that is not
    transient.
    """
    if not hasattr(answer, "errors"):
        return broker_error(answer.error_code)
    found = [
        error
        for topic, partitions in answer.errors
        for _, code in partitions
        if (error := broker_error(code, topic)) is not None
    ]
    return min(found, key=_passes, default=None)


def _passes(error: KafkaError) -> bool:
    """True if the error is transient, or only reports that the broker skipped this partition
    because another failed.
    """
    passing = kafka_errors.ConcurrentTransactions | kafka_errors.OperationNotAttempted
    return bool(error.retriable) or isinstance(error, passing)


async def _side_by_side(steps: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
    """Run coroutines concurrently. The first failure cancels the others and is raised.

    Unlike a task group this leaves no reference cycle through the error, which would keep the
    records of a failed transaction until the next run of the garbage collector.
    """
    if len(steps) == 1:
        (alone,) = steps.values()
        await alone
        return
    tasks = [asyncio.create_task(step, name=f"transaction-{name}") for name, step in steps.items()]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        errors = [task.exception() for task in tasks if not task.cancelled()]
        tasks.clear()
    failed = next(filter(None, errors), None)
    errors.clear()
    try:
        if failed is not None:
            raise failed
    finally:
        del failed
