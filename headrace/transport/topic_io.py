"""Topics instead of memory channels, at both ends of a process.

A sender acks the requests that it has written once the log has acknowledged their records: from
then on the next process is responsible for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.failures import any_revoked, poisoned_failure
from headrace.delivery.inflight import (
    RECORD_OVERHEAD_BYTES,
    AssignedPartition,
    InFlightAck,
    ack_all,
    key_and_header_bytes,
    record_bytes,
)
from headrace.delivery.producing import deliver, refused_for_size
from headrace.errors import Code, Rejected
from headrace.log.errors import LogRefused
from headrace.log.port import NewRecord, Producer, Record, TopicPartition
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.codec import (
    ChunkLimits,
    decode_items,
    decode_results,
    divide_items,
    divide_results,
    encode_items,
    encode_results,
    refer_all_to_source,
)
from headrace.protocol.headers import HeaderName
from headrace.protocol.messages import Failure, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.burst_limiter import BurstLimiter, input_bytes
from headrace.transport.channels import SendStream, Writer, Writers
from headrace.transport.shared_values import SharedValuesWriter, Value
from headrace.transport.source_values import SourceValues
from headrace.tuning import TUNING, DeliveryTuning, TransportTuning

log = structlog.get_logger(__name__)

T = TypeVar("T")


class TopicReceiver:
    """Receive items or results from their topic; see `headrace.transport.channels.ReceiveStream`.

    Args:
        ended: receives requests that will not run, as failures; needed where records may be
            suspects.
        values: reads the values that requests refer to; None if no value is needed.
    """

    def __init__(
        self,
        source: Source,
        decode: Callable[[bytes, InFlightAck], list[Request]],
        ended: SendStream[list[Request]] | None = None,
        values: SourceValues | None = None,
    ) -> None:
        self._values = values
        self._source = source
        self._decode = decode
        self._ended = ended
        self._deferred: list[Request] = []

    async def receive(self) -> list[Request] | None:
        """Return the next requests, all of one partition; None at the end of the stream."""
        deferral = self._source.deferral
        while True:
            if deferral is not None and self._deferred:
                deferred, self._deferred = self._deferred, []
                requests = await deferral.wait_for_room(deferred)
            else:
                polled = await self._source.receive()
                if polled is None:
                    if self._ended is not None:
                        self._ended.close()
                    return None
                requests = await self._read(polled)
            if requests:
                return requests

    async def _read(self, polled: PolledRecords) -> list[Request]:
        isolation = polled.isolation
        requests: list[Request] = []
        ended: list[Request] = []
        for record in polled.records:
            chunk = self._admit(polled.assignment, record, isolation)
            if isolation is not None:
                poisoned = _fail_poisoned(chunk, record.offset, isolation)
                isolation.isolate(chunk)
                chunk = [one for place, one in enumerate(chunk) if place not in poisoned]
                ended += poisoned.values()
            requests += chunk
        deferral = self._source.deferral
        if deferral is not None and requests:
            requests, self._deferred, late = deferral.charge(
                requests, is_reread=polled.is_reread, is_isolated=polled.is_isolated
            )
            ended += late
        if ended and self._ended is not None:
            await self._ended.send(ended)
        return requests

    def _admit(
        self, assignment: AssignedPartition, record: Record, isolation: Isolation | None
    ) -> list[Request]:
        """Return the requests of a record; none if it is answered already, unreadable or set
        aside.
        """
        ack_handle = admit_record(assignment, record, isolation)
        if ack_handle is None:
            return []
        decode = partial(_decode_of_partition, self._decode, record.partition)
        requests = decode_or_ack(record, ack_handle, decode)
        if requests is None:
            return []
        # The record is done when all its requests are.
        ack_handle.parts = len(requests)
        added_bytes = copied_beside(requests)
        if self._values is not None:
            added_bytes += self._values.missing_bytes(requests)
        if added_bytes:
            ack_handle.resize(ack_handle.size_bytes + added_bytes)
        return requests


def _decode_of_partition(
    decode: Callable[[bytes, InFlightAck], list[Request]],
    partition: int,
    value: bytes,
    ack_handle: InFlightAck,
) -> list[Request]:
    """Decode the requests of a record, which are of the source partition with its own number.

    Raises:
        Rejected: they are of another one, which a topic written next may not have, or they are not
            behind the offsets before them.
    """
    requests = decode(value, ack_handle)
    check_origins(requests, range(partition, partition + 1))
    return requests


def check_origins(requests: Sequence[Request], partitions: range) -> None:
    """Raise `Rejected` unless the source partitions of requests are among these, and each request
    is behind the offset that was delivered before it.
    """
    for request in requests:
        is_behind = -1 <= request.previous < request.offset < 2**63  # a log has no other offsets
        if request.partition not in partitions or not is_behind:
            raise Rejected.mismatch(
                Code.INTERNAL,
                "record",
                expected=f"partition {partitions.start} to {partitions.stop - 1}, and each offset "
                "above the one before it",
                got=f"partition {request.partition}, offset {request.offset} "
                f"after {request.previous}",
            )


def copied_beside(requests: Sequence[Request]) -> int:
    """Return the bytes that the requests of one record use besides that record."""
    # Decoding copies keys and headers from the record's value, which is kept as well.
    beside = sum(
        [
            key_and_header_bytes(request.key, request.headers)
            for request in requests
            if request.key is not None or request.headers
        ]
    )
    return RECORD_OVERHEAD_BYTES * (len(requests) - 1) + beside


def _fail_poisoned(
    requests: Sequence[Request], offset: int, isolation: Isolation
) -> dict[int, Request]:
    """Fail the poisoned requests of a record; return them by their places in it."""
    places = {place for at, place in isolation.poisoned if at == offset}
    if places and not isolation.runs:
        # No model runs here, so what ended the process was the work on the record as a whole.
        places = set(range(len(requests)))
    poisoned = {place: request for place, request in enumerate(requests) if place in places}
    for request in poisoned.values():
        request.fail(poisoned_failure(Stage.BATCHER))
    return poisoned


def admit_record(
    assignment: AssignedPartition, record: Record, isolation: Isolation | None
) -> InFlightAck | None:
    """Return the ack handle of a record that is to be decoded now; None to skip the record."""
    if isolation is not None and isolation.isolated is not None:
        return isolation.isolated.ack_handle
    if record.offset in assignment.progress:
        assignment.skip_answered(record.offset)
        return None
    # Whatever of it is poisoned: its other requests may still have to run alone.
    if isolation is not None and record.offset in isolation.suspects:
        isolation.park_record(assignment, record)
        return None
    return assignment.admit(record.offset, record_bytes(record))


def decode_or_ack(
    record: Record, ack_handle: InFlightAck, decode: Callable[[bytes, InFlightAck], T]
) -> T | None:
    """Decode a record; ack it and return None if it is unreadable."""
    try:
        return decode(record.value or b"", ack_handle)
    except Rejected as error:
        log_unreadable(record, error)
        ack_handle.ack()
        return None


def log_unreadable(record: Record, error: Rejected) -> None:
    """Log that a record of a topic between stages cannot be decoded."""
    log.error(
        Event.INTERNAL_RECORD_UNREADABLE,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=str(error),
    )


def item_receiver(
    source: Source, ended: SendStream[list[Request]], values: SourceValues | None = None
) -> TopicReceiver:
    """Return a receiver of `items`."""
    return TopicReceiver(source, decode_items, ended, values)


def result_receiver(source: Source, values: SourceValues | None = None) -> TopicReceiver:
    """Return a receiver of `results`."""
    return TopicReceiver(source, decode_results, values=values)


class TopicSender:
    """Write items or results to their topic, to the partition with their source's number.

    Several writers may share a sender; it ends when all are closed. `run` is its task.

    One write is in flight for each partition. Requests that arrive meanwhile are written together
    once that write is acknowledged, or slightly later at high rates
    (`headrace.transport.burst_limiter`).

    Args:
        divide: divides requests of one partition into chunks within limits, one for each record.
        encode: returns the record of a chunk.
        stage: the stage that writes; failures of requests that do not fit name it.
        refused: receives requests that do not fit, as failures; if None, they are written as
            failures to the same topic.
        inline_bytes: values from this size on are not written (`refer_to_source`); None writes all.
        shared: where such values are passed to other processes of this machine; None to pass none.
        delivery_tuning: of writes that fail.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        divide: Callable[[Sequence[Request], ChunkLimits], list[list[Request]]],
        encode: Callable[[Sequence[Request]], bytes],
        stage: Stage,
        refused: SendStream[list[Request]] | None = None,
        metrics: Metrics | None = None,
        tuning: TransportTuning = TUNING.transport,
        inline_bytes: int | None = None,
        shared: SharedValuesWriter | None = None,
        delivery_tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._delivery_tuning = delivery_tuning
        self._shared = shared
        self._producer = producer
        self._topic = topic
        self._divide = divide
        self._encode = encode
        self._stage = stage
        self._inline_bytes = inline_bytes
        self._refused = refused
        self._metrics = metrics
        self._writers: Writers[list[Request]] = Writers(self)
        self._tasks = StageTasks()
        self._limiter = BurstLimiter(tuning)
        self._chunk_limits = ChunkLimits(
            tuning.max_record_requests, tuning.max_record_bytes, tuning.max_record_source_bytes
        )
        self._max_waiting = tuning.max_waiting_requests
        self._far_ahead_pause_s = tuning.shared_far_ahead_pause_s
        self._waiting: dict[int, list[Request]] = {}
        self._waiting_count = 0
        self._partitions_in_write: set[int] = set()
        self._taken = asyncio.Event()

    async def run(self) -> None:
        """Write until all writers are closed and all records are acknowledged."""
        async with self._tasks:
            await self._writers.closed()
        if self._refused is not None:
            self._refused.close()

    def writer(self) -> Writer[list[Request]]:
        """Return a new writer."""
        return self._writers.writer()

    def is_full(self) -> bool:
        """Return True while too many requests wait to be written."""
        return self._waiting_count > self._max_waiting

    def send_nowait(self, chunk: list[Request]) -> None:
        """See `SendStream`. Chunks that come while a write is in flight are written together."""
        for request in chunk:
            self._waiting.setdefault(request.partition, []).append(request)
        self._waiting_count += len(chunk)
        for partition in self._waiting.keys() - self._partitions_in_write:
            self._partitions_in_write.add(partition)
            self._tasks.start(self._write_waiting(partition), f"write-{self._topic}-{partition}")

    async def send(self, chunk: list[Request]) -> None:
        """See `SendStream`."""
        while self.is_full():
            self._taken.clear()
            await self._taken.wait()
        self.send_nowait(chunk)
        if self._shared is not None and self._shared.is_far_ahead(time.monotonic()):
            # Short, since other requests wait as well, and those of a slow model stay unread.
            await asyncio.sleep(len(chunk) * self._far_ahead_pause_s)

    async def _write_waiting(self, partition: int) -> None:
        """Write to a partition, one write after the other, until no request waits for it."""
        target = TopicPartition(self._topic, partition)
        while partition in self._waiting:
            if delay_s := self._limiter.delay_s(time.monotonic()):
                await asyncio.sleep(delay_s)
            waiting = self._waiting.pop(partition)
            self._waiting_count -= len(waiting)
            self._limiter.record_write(len(waiting), input_bytes(waiting), time.monotonic())
            self._taken.set()
            if any_revoked(waiting):
                dropped = [one.ack_handle for one in waiting if one.ack_handle.revoked]
                ack_all(dropped)
                if self._metrics is not None:
                    self._metrics.revoked.inc(len(dropped))
                waiting = [one for one in waiting if not one.ack_handle.revoked]
            await self._write_partition(target, waiting)
        self._partitions_in_write.discard(partition)

    async def _write_partition(self, target: TopicPartition, requests: list[Request]) -> None:
        values: dict[Request, Value] = {}
        if self._inline_bytes is not None:
            values = refer_all_to_source(requests, self._inline_bytes)
        chunks = [requests]
        if len(requests) != 1:
            chunks = self._divide(requests, self._chunk_limits)
        if values and self._shared is not None:
            for chunk in chunks:
                self._shared.put(chunk, values, time.monotonic())
        while chunks:
            records = [NewRecord(None, self._encode(chunk)) for chunk in chunks]
            refused = await deliver(
                self._producer, target, records, self._metrics, tuning=self._delivery_tuning
            )
            # Acked only now: `deliver` returns when the log has acknowledged the records.
            ack_all(
                [
                    request.ack_handle
                    for index, chunk in enumerate(chunks)
                    if index not in refused
                    for request in chunk
                ]
            )
            unfitting = [chunks[index] for index in refused_for_size(refused)]
            chunks = [[request] for chunk in unfitting if len(chunk) > 1 for request in chunk]
            oversized = [
                refuse_oversized(chunk[0], target.topic, self._stage)
                for chunk in unfitting
                if len(chunk) == 1
            ]
            if self._refused is None:
                chunks += [[request] for request in oversized]
            elif oversized:
                await self._refused.send(oversized)  # whose receiver acks them


_ROUTING_HEADERS = frozenset(
    {
        HeaderName.CONTENT_TYPE,
        HeaderName.CORRELATION_ID,
        HeaderName.REPLY_PARTITION,
        HeaderName.REPLY_TOPIC,
        HeaderName.TRACEPARENT,
        HeaderName.TRACESTATE,
    }
)


def refuse_oversized(request: Request, topic: str, stage: Stage) -> Request:
    """Turn a request into a failure because it does not fit into a record of the stage.

    If the failure does not fit either, each further call drops one more part: the request's value
    (kept for its dead letter); its key and the headers that no answer needs; all headers.

    Raises:
        LogRefused: there is nothing left to drop.
    """
    if request.failure is None:
        request.outputs = None
        request.fail(
            Failure(Code.TOO_LARGE, f"the request does not fit into a record of {topic}", stage)
        )
    elif request.value is not None:
        request.value = None
    elif request.key is not None or not all(one[0] in _ROUTING_HEADERS for one in request.headers):
        request.key = None
        request.headers = [one for one in request.headers if one[0] in _ROUTING_HEADERS]
    elif request.headers:
        request.headers = []
    else:
        raise LogRefused(
            f"topic {topic}: expected max.message.bytes to have room for at least the error of a "
            "request, but it is smaller: raise it"
        )
    return request


def item_sender(
    producer: Producer,
    topic: str,
    refused: SendStream[list[Request]],
    metrics: Metrics | None = None,
    tuning: TransportTuning = TUNING.transport,
    inline_bytes: int | None = None,
    shared: SharedValuesWriter | None = None,
    delivery_tuning: DeliveryTuning = TUNING.delivery,
) -> TopicSender:
    """Return a sender of `items`; the last three are as for `TopicSender`."""
    return TopicSender(
        producer,
        topic,
        divide_items,
        encode_items,
        Stage.INGEST,
        refused,
        metrics,
        tuning,
        inline_bytes,
        shared,
        delivery_tuning,
    )


def result_sender(
    producer: Producer,
    topic: str,
    metrics: Metrics | None = None,
    tuning: TransportTuning = TUNING.transport,
    delivery_tuning: DeliveryTuning = TUNING.delivery,
) -> TopicSender:
    """Return a sender of `results`."""
    return TopicSender(
        producer,
        topic,
        divide_results,
        encode_results,
        Stage.EXECUTOR,
        metrics=metrics,
        tuning=tuning,
        delivery_tuning=delivery_tuning,
    )
