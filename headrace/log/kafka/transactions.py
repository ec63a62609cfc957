"""The transactional producer: one transaction for each commit, and the meaning of its failures.

After any failure the producer is closed at once: only a successor, which fences it, can learn the
outcome of the transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, zip_longest
from typing import Any, Final, Self

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import KafkaError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from headrace.errors import HeadraceError, Rejected, drop_tracebacks
from headrace.log.errors import (
    Fenced,
    LogRefused,
    LogUnavailable,
    NoLeader,
    RecordRefused,
    RecordsRefused,
    RecordTooLarge,
    TopicForbidden,
    TransactionTimedOut,
)
from headrace.log.kafka import transaction_requests as requests
from headrace.log.kafka._aiokafka import build_batch, close_client
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import (
    TransactionAbortable,
    answered,
    broker_error,
    error_text,
    in_port_words,
)
from headrace.log.kafka.producer import SEQUENCES, RecordBatch
from headrace.log.kafka.topic_cache import TopicCache, require_known_leaders, require_leaders
from headrace.log.port import Committed, Membership, NewRecord, TopicPartition
from headrace.tuning import TUNING, KafkaTuning

_ALL_REPLICAS: Final = -1
_COULD_NOT_END = (
    kafka_errors.ConcurrentTransactions,
    kafka_errors.GroupCoordinatorNotAvailableError,
    kafka_errors.GroupLoadInProgressError,
    kafka_errors.NotCoordinatorForGroupError,
)
_NOT_ABOUT_RECORDS = (
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidTxnState,
    kafka_errors.TopicAuthorizationFailedError,
    TransactionAbortable,
)
_FINAL = (
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.OffsetMetadataTooLargeError,
    kafka_errors.TransactionalIdAuthorizationFailed,
)


class KafkaTransactionalProducer:
    """A producer with a transactional id, entered with `async with`; see the port."""

    def __init__(
        self, connection: Connection, topics: TopicCache, transactional_id: str, group: str
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._id = transactional_id
        self._group = group
        # The broker ends the transaction after its timeout in any case.
        self._deadline_s = connection.settings.transaction_timeout_ms / 1000
        self._epoch: ProducerEpoch | None = None

    async def __aenter__(self) -> Self:
        settings = self._connection.settings
        epoch = ProducerEpoch(
            await self._connection.open_client(),
            self._id,
            settings.transaction_timeout_ms,
            settings.request_timeout_ms,
            self._connection.tuning,
        )
        try:
            async with answered(f"enter {self._id}", self._connection.request_timeout_s):
                await epoch.enter()
        except BaseException as error:
            await epoch.close()
            if isinstance(error.__cause__, _FINAL):
                raise LogRefused(str(error)) from error
            raise
        self._epoch = epoch
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See the port. Requests in flight are aborted."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            await epoch.close()

    def _require_usable(self) -> ProducerEpoch:
        if self._epoch is None:
            raise RuntimeError(f"{self._id}: the producer was not entered, has failed or is closed")
        return self._epoch

    # Committing

    @property
    def is_usable(self) -> bool:
        """See the port."""
        return self._epoch is not None

    async def commit_transaction(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None = None,
    ) -> None:
        """See the port. Waits up to `transaction_timeout_ms` for the outcome."""
        epoch = self._require_usable()
        has_begun = False
        try:
            async with self._translating_errors():
                batches = await self._pack(epoch.client, records)
                if not batches and not offsets:
                    return
                # Check before the transaction begins: the epoch stays usable after an error here.
                await require_leaders(
                    epoch.client, records.keys(), self._connection.tuning.topic_timeout_s
                )
                has_begun = True
                await epoch.write(batches, self._group, offsets, membership)
                await epoch.commit()
        except BaseException as error:
            if not has_begun and isinstance(error, Rejected | NoLeader):
                raise  # no transaction has begun, so the epoch stays usable
            # Never reuse an epoch whose outcome is unknown: a late EndTxn could end its next
            # transaction (KAFKA-17754).
            self._epoch = None
            await epoch.close()  # even if closed before: a connection may be new
            if isinstance(error, RecordTooLarge | RecordRefused):  # the cached limits were wrong
                for partition in records:
                    self._topics.forget_limits(partition.topic)
            raise

    async def _pack(
        self, client: AIOKafkaClient, records: Mapping[TopicPartition, Sequence[NewRecord]]
    ) -> Sequence[Sequence[RecordBatch]]:
        """Return the batches of each partition, in order.

        Raises:
            RecordsRefused: lists all records that their topics never accept.
        """
        tuning = self._connection.tuning
        batches = []
        refused: dict[TopicPartition, dict[int, RecordTooLarge | RecordRefused]] = {}
        for partition, chunk in records.items():
            if not chunk:
                continue
            limits = self._topics.cached_limits(client, partition)
            limits = limits or await self._topics.fetch_limits(client, partition)
            new_batch = partial(
                RecordBatch,
                partition,
                limits,
                self._connection.codec,
                tuning.max_batch_bytes,
                is_transactional=True,
            )
            of_partition = [new_batch()]
            # Answers are encoded when they are read: few enough at a time to stay in the caches.
            for first in range(0, len(chunk), tuning.packed_records):
                part, start = chunk[first : first + tuning.packed_records], 0
                while start < len(part):
                    start, refusal = of_partition[-1].add(part, start)
                    if refusal is not None:
                        refused.setdefault(partition, {})[first + start] = refusal
                        self._topics.recheck_limits(partition.topic)
                        start += 1
                    elif start < len(part):
                        of_partition.append(new_batch())
            batches.append(of_partition)
            if len(chunk) > tuning.packed_records:
                await asyncio.sleep(0)  # other tasks have a turn between much work
        if refused:
            raise RecordsRefused(refused)
        return batches

    @asynccontextmanager
    async def _translating_errors(self) -> AsyncIterator[None]:
        """Bound a commit in time, and translate its failures into the port's errors."""
        what = f"transaction of {self._id}"
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TimeoutError as error:
            drop_tracebacks(error)
            raise TransactionTimedOut(
                f"{what}: expected its end within {self._deadline_s:g} s "
                "(kafka.transaction_timeout_ms), got none"
            ) from error
        except (KafkaError, AssertionError, asyncio.InvalidStateError) as error:
            drop_tracebacks(error)  # frames of its requests refer to it, and to the records
            raise _translate_error(error, what) from error


def _translate_error(error: Exception, what: str) -> HeadraceError:
    """Return the port's error; unless known to be refused or fenced, the outcome is unknown."""
    if isinstance(error, kafka_errors.TopicAuthorizationFailedError):
        return TopicForbidden(error.args[0])
    if isinstance(error, _FINAL):
        return LogRefused(f"{what}: {error_text(error)}")
    if isinstance(error, KafkaError):
        translated = in_port_words(error, what)
        if isinstance(translated, Fenced):
            return translated
        return LogUnavailable(f"{what}: {error_text(error)}")
    return LogUnavailable(f"{what}: {error!r}")


# --- the protocol ------------------------------------------------------------------------------


class ProducerEpoch:
    """One epoch of a transactional id: entering begins it and fences the former; closing ends it.

    aiokafka's own producer makes one request after the other, each by way of a task, and waits 20
    ms, or 100, while the previous transaction is still ending. Here independent requests run
    concurrently: a transaction takes three round trips instead of five, or two where the cluster
    has the second version of transactions (`headrace.log.kafka.transaction_requests`). There each
    commit begins a new epoch of the same id, which this object continues with.

    Every method raises aiokafka's errors, except the port's for records that their topic refuses,
    and waits as long as it takes; the caller bounds it in time.

    Args:
        client: a connected client, used by this epoch alone and closed with it.
        transactional_id: the id.
        transaction_timeout_ms: after this the broker aborts a transaction by itself.
        request_timeout_ms: how long a broker may wait for its replicas.
        tuning: the pauses between retries.
    """

    def __init__(
        self,
        client: AIOKafkaClient,
        transactional_id: str,
        transaction_timeout_ms: int,
        request_timeout_ms: int,
        tuning: KafkaTuning = TUNING.kafka,
    ) -> None:
        self.client = client
        self._id = transactional_id
        self._transaction_timeout_ms = transaction_timeout_ms
        self._request_timeout_ms = request_timeout_ms
        self._tuning = tuning
        self._producer_id, self._epoch = -1, -1
        self._has_second_version = False
        self._sequences: dict[TopicPartition, int] = defaultdict(int)
        self._coordinators: dict[CoordinationType, int] = {}
        self._ended_s = 0.0  # monotonic
        self._closed = False

    async def enter(self) -> None:
        """Get the epoch. Any transaction that the former epoch left open has ended by then."""
        request = InitProducerIdRequest(self._id, self._transaction_timeout_ms)
        answer = await self._ask_coordinator(CoordinationType.TRANSACTION, self._id, request)
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
        node = await self._coordinator(CoordinationType.TRANSACTION, self._id)
        features = await self._send(node, requests.FeaturesRequest())
        self._has_second_version = requests.has_second_version(features)

    async def close(self) -> None:
        """Close the sockets. Requests in flight fail and are not retried."""
        self._closed = True
        await close_client(self.client, self._tuning.close_timeout_s)

    # A transaction: `write`, then `commit`

    async def write(
        self,
        batches: Sequence[Sequence[RecordBatch]],
        group: str,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None = None,
    ) -> None:
        """Write the batches of each partition in their order, and the group's offsets.

        Both are sent at once, since neither counts before the transaction is committed. A broker
        that gets both answers them one after the other, see `_send`.

        Raises:
            RecordTooLarge, RecordRefused: a broker refuses a batch.
            LogUnavailable: a partition has lost its leader.
        """
        since_end_s = time.monotonic() - self._ended_s
        markers_s = self._tuning.transaction_retry.first_s
        if since_end_s < markers_s:
            await asyncio.sleep(markers_s - since_end_s)
        steps: dict[str, Coroutine[Any, Any, None]] = {}
        if batches:
            steps["records"] = self._write_records(batches)
        if offsets:
            steps["offsets"] = self._write_offsets(group, offsets, membership)
        # Returns after all responses, so that the caller commits only what the brokers have.
        await _run_concurrently(steps)

    async def commit(self) -> None:
        """Commit the transaction. After an error its outcome is unknown.

        The request is retried only if the coordinator answered that it could not end the
        transaction. It is not retried after a lost response: it could arrive late, and end a later
        transaction (KAFKA-17754).
        """
        request = (
            requests.EndTxnRequest(self._identity)
            if self._has_second_version
            else EndTxnRequest(*self._identity, transaction_result=True)
        )
        kind, pauses = CoordinationType.TRANSACTION, self._pauses_s()
        while True:
            node = await self._coordinator(kind, self._id)
            answer = await self._send(node, request)
            error = error_in(answer)
            if error is None:
                self._ended_s = time.monotonic()
                if self._has_second_version:
                    self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
                    self._sequences.clear()  # they begin at 0 in each epoch
                return
            if not isinstance(error, _COULD_NOT_END):
                raise error
            await self._pause_after(error, kind, pauses)

    @property
    def _identity(self) -> tuple[str, int, int]:
        return self._id, self._producer_id, self._epoch

    async def _write_offsets(
        self,
        group: str,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None,
    ) -> None:
        if not self._has_second_version:
            # The transaction coordinator must know the group before the offsets go to it.
            await self._ask_coordinator(
                CoordinationType.TRANSACTION,
                self._id,
                AddOffsetsToTxnRequest(*self._identity, group),
            )
        request = requests.TxnOffsetCommitRequest(
            self._identity, group, offsets, membership, is_second_version=self._has_second_version
        )
        # Do not retry after a lost response: a late request would overwrite the offsets of a later
        # transaction.
        await self._ask_coordinator(CoordinationType.GROUP, group, request, if_lost=False)

    async def _write_records(self, batches: Sequence[Sequence[RecordBatch]]) -> None:
        """Write one batch of each partition at a time: the first of all, then the second of all."""
        if not self._has_second_version:
            topics: dict[str, list[int]] = defaultdict(list)
            for first, *_ in batches:
                topics[first.partition.topic].append(first.partition.partition)
            request = AddPartitionsToTxnRequest(*self._identity, list(topics.items()))
            # The transaction coordinator must know the partitions before any batch is sent.
            await self._ask_coordinator(CoordinationType.TRANSACTION, self._id, request)
        # One batch per partition at a time keeps their order.
        for rank in zip_longest(*batches):
            waiting: dict[TopicPartition, bytes] = {}
            for batch in filter(None, rank):
                builder, sequence = batch.builder, self._sequences[batch.partition]
                waiting[batch.partition] = build_batch(
                    builder, self._producer_id, self._epoch, sequence
                )
                following = (sequence + builder.record_count()) % SEQUENCES
                self._sequences[batch.partition] = following
            await self._deliver(waiting)

    async def _deliver(self, waiting: dict[TopicPartition, bytes]) -> None:
        """Send batches to the leaders of their partitions; retry until all are acknowledged.

        Retrying writes nothing twice: a broker recognizes a batch by its sequence number.

        Raises:
            LogUnavailable: a partition has lost its leader, or its topic has been deleted.
        """
        pauses = self._pauses_s()
        found_s = time.monotonic()
        while True:
            by_node: dict[int, list[TopicPartition]] = defaultdict(list)
            absent: TopicPartition | None = None
            for partition in waiting:
                leader = self.client.cluster.leader_for_partition(partition)
                if leader is None:
                    absent = partition
                    self.client.force_metadata_update()
                else:
                    by_node[leader].append(partition)
            await _run_concurrently(
                {
                    f"produce-{node}": self._deliver_to(node, partitions, waiting)
                    for node, partitions in by_node.items()
                }
            )
            if not waiting:
                return
            if absent is None:
                found_s = time.monotonic()
            elif time.monotonic() - found_s > self._tuning.topic_timeout_s:
                # The next transaction finds that out before it begins, and refuses these records.
                raise LogUnavailable(f"{absent}: brokers have no such topic or partition any more")
            await asyncio.sleep(next(pauses))
            require_known_leaders(self.client, waiting)

    async def _deliver_to(
        self, node: int, partitions: Iterable[TopicPartition], waiting: dict[TopicPartition, bytes]
    ) -> None:
        """Send batches to one broker, in as many requests as their size takes."""
        together: list[TopicPartition] = []
        size = 0
        for partition in partitions:
            if together and size + len(waiting[partition]) > self._tuning.max_request_bytes:
                await self._deliver_together(node, together, waiting)
                together, size = [], 0
            together.append(partition)
            size += len(waiting[partition])
        await self._deliver_together(node, together, waiting)

    async def _deliver_together(
        self, node: int, partitions: Iterable[TopicPartition], waiting: dict[TopicPartition, bytes]
    ) -> None:
        """Send batches in one request; remove those that are acknowledged from `waiting`."""
        errors: list[KafkaError] = []
        topics: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for partition in partitions:
            topics[partition.topic].append((partition.partition, waiting[partition]))
        produce = requests.ProduceRequest if self._has_second_version else ProduceRequest
        request = produce(self._id, _ALL_REPLICAS, self._request_timeout_ms, list(topics.items()))
        try:
            answer = await self._send(node, request)
        except KafkaError as unreached:
            errors.append(unreached.with_traceback(None))  # its frames hold the batches
        else:
            for topic, acknowledged, *_tags in answer.topics:
                for number, code, *_rest in acknowledged:
                    error = broker_error(code, topic)
                    if error is None or isinstance(error, kafka_errors.DuplicateSequenceNumber):
                        waiting.pop(TopicPartition(topic, number), None)
                    else:
                        errors.append(error)
        for error in errors:
            if not _is_transient(error):
                raise _translate_batch_error(error)
            if error.invalid_metadata:
                self.client.force_metadata_update()

    # Coordinators

    async def _ask_coordinator(
        self, kind: CoordinationType, key: str, request: Any, *, if_lost: bool = True
    ) -> Any:
        """Send a request to the coordinator of an id or a group; retry until it succeeds.

        Args:
            kind: the kind of coordinator.
            key: the id, or the group.
            request: the request.
            if_lost: whether to retry if the outcome is unknown; otherwise the error is raised.
        """
        pauses = self._pauses_s()
        while True:
            is_sent = False
            try:
                node = await self._coordinator(kind, key)
                is_sent = True
                answer = await self._send(node, request)
                error = error_in(answer)
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
            await asyncio.sleep(min(pause_s, self._tuning.markers_longest_s))
            return
        if not error.retriable:
            raise error
        self._coordinators.pop(kind, None)
        await asyncio.sleep(pause_s)

    async def _send(self, node: int, request: Any) -> Any:
        """Send a request to a broker, over one connection for requests of all kinds.

        A broker takes the requests of one connection one after the other. Over two it would ask the
        coordinator to add the partitions of records and of offsets at the same time, and refuse one
        of them for that.
        """
        if self._closed:  # aiokafka's client would connect again
            raise kafka_errors.ProducerClosed
        return await self.client.send(node, request)

    def _pauses_s(self) -> Iterator[float]:
        """Yield the pauses between retries."""
        return map(self._tuning.transaction_retry.pause_s, count())


def _translate_batch_error(error: KafkaError) -> Exception:
    """Return the port's error for a refused batch, unless the error concerns the whole
    transaction.
    """
    if isinstance(error, _NOT_ABOUT_RECORDS):
        refusal: Exception = error
        return refusal
    translated = in_port_words(error, "send in a transaction")
    return RecordRefused(str(translated)) if isinstance(translated, LogRefused) else translated


def error_in(answer: Any) -> KafkaError | None:
    """Return the error in a coordinator's response; of several, preferably one that is not
    transient.
    """
    if not hasattr(answer, "errors"):
        return broker_error(answer.error_code)
    found = [
        error
        for topic, partitions, *_ in answer.errors
        for _, code, *_ in partitions
        if (error := broker_error(code, topic)) is not None
    ]
    return min(found, key=_is_transient, default=None)


def _is_transient(error: KafkaError) -> bool:
    """True if the error is transient, or only reports that the broker skipped this partition
    because another failed.
    """
    passing = kafka_errors.ConcurrentTransactions | kafka_errors.OperationNotAttempted
    return bool(error.retriable) or isinstance(error, passing)


async def _run_concurrently(steps: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
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
