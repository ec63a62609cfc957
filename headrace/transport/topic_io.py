"""The edges of a process: topics in the place of memory channels.

An outlet of this kind acknowledges the ack handles of what it has written once that is
acknowledged: the next process owes the rest of the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from headrace.consumer.ready_queue import Delivery
from headrace.consumer.source import Source
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.failures import ran_alone
from headrace.delivery.inflight import (
    AssignedPartition,
    InFlightAck,
    ack_all,
    beside_bytes,
    record_bytes,
)
from headrace.delivery.producing import deliver, too_large
from headrace.errors import Code, Rejected
from headrace.log.errors import LogRefused
from headrace.log.port import NewRecord, Producer, Record, TopicPartition
from headrace.protocol.codec import decode_item, decode_result, encode_item, encode_result
from headrace.protocol.messages import Failure, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.burst_limiter import Pace
from headrace.transport.channels import Channel, ChannelWriter, Outlet, join_lists

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_WAITING = 4096
"""Requests that wait until a run can leave; who brings more waits."""


class TopicReceiver:
    """Items or results, read from their topic; see `headrace.transport.channels.Inlet`.

    Args:
        ended: takes requests that are not run any more, as failures; needed where records may
            be suspect.
    """

    def __init__(
        self,
        source: Source,
        decode: Callable[[bytes, InFlightAck], Request],
        ended: Outlet[list[Request]] | None = None,
    ) -> None:
        self._source = source
        self._decode = decode
        self._ended = ended
        self._over: list[Request] = []

    async def receive(self) -> list[Request] | None:
        """Requests of one source partition."""
        deferral = self._source.deferral
        while True:
            if deferral is not None and self._over:
                over, self._over = self._over, []
                requests = await deferral.wait_for_room(over)
            else:
                delivery = await self._source.receive()
                if delivery is None:
                    if self._ended is not None:
                        self._ended.close()
                    return None
                requests = await self._read(delivery)
            if requests:
                return requests

    async def _read(self, delivery: Delivery) -> list[Request]:
        isolation = delivery.isolation
        requests: list[Request] = []
        ended: list[Request] = []
        for record in delivery.records:
            request = self._admit(delivery.assignment, record, isolation)
            if request is None:
                continue
            if isolation is not None and (record.offset, 0) in isolation.condemned:
                request.fail(ran_alone(Stage.BATCHER))
                ended.append(request)
            else:
                requests.append(request)
        if isolation is not None:
            isolation.isolate(requests)
        deferral = self._source.deferral
        if deferral is not None and requests:
            on_trial = isolation is not None and isolation.isolated is not None
            requests, self._over, late = deferral.sort_out(
                requests, again=delivery.again, on_trial=on_trial
            )
            ended += late
        if ended and self._ended is not None:
            await self._ended.send(ended)
        return requests

    def _admit(
        self, assignment: AssignedPartition, record: Record, isolation: Isolation | None
    ) -> Request | None:
        """Return the request of a record; None if it is answered already, or is not one of ours, or
        was set aside.
        """
        ack_handle = admitted(assignment, record, isolation)
        if ack_handle is None:
            return None
        request = decoded(record, ack_handle, self._decode)
        if request is not None and (request.key is not None or request.headers):
            # Decoding copies these out of the record's value, which is kept as well.
            ack_handle.resize(ack_handle.size_bytes + beside_bytes(request.key, request.headers))
        return request


def admitted(
    assignment: AssignedPartition, record: Record, isolation: Isolation | None
) -> InFlightAck | None:
    """Return the ack handle of a record that is to be decoded now; None if it is not to be."""
    if isolation is not None and isolation.isolated is not None:
        return isolation.isolated.ack_handle
    if record.offset in assignment.progress:
        assignment.skip(record.offset)
        return None
    if isolation is not None and isolation.is_accused(record.offset):
        isolation.set_aside(assignment, record)
        return None
    return assignment.admit(record.offset, record_bytes(record))


def decoded(
    record: Record, ack_handle: InFlightAck, decode: Callable[[bytes, InFlightAck], T]
) -> T | None:
    """Return None, and acknowledge the record, if no request can be read from it."""
    try:
        return decode(record.value or b"", ack_handle)
    except Rejected as error:
        log.error(
            Event.INTERNAL_RECORD_UNREADABLE,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=str(error),
        )
        ack_handle.ack()
        return None


def item_inlet(source: Source, ended: Outlet[list[Request]]) -> TopicReceiver:
    """Reads `items`."""
    return TopicReceiver(source, decode_item, ended)


def result_inlet(source: Source) -> TopicReceiver:
    """Reads `results`."""
    return TopicReceiver(source, decode_result)


class TopicSender:
    """Items or results, written to their topic, each to its source partition's number.

    Several writers may share one; it ends when all are closed. `run` is its task.

    One run of requests is under way for each partition. What comes meanwhile leaves together when
    that one is acknowledged, or a little later while many requests pass
    (`headrace.transport.burst_limiter`).

    Args:
        stage: the one that writes, which is the one to have found that something does not fit.
        refused: takes requests that do not fit, as failures; without it they go, as failures,
            to the same topic.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        encode: Callable[[Request], bytes],
        stage: Stage,
        refused: Outlet[list[Request]] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._encode = encode
        self._stage = stage
        self._refused = refused
        self._metrics = metrics
        # Batches are small beside what a produce request can carry.
        self._channel: Channel[list[Request]] = Channel(join_lists)
        self._pace = Pace()
        self._waiting: dict[int, list[Request]] = {}
        self._under_way: set[int] = set()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Owns the writes under way, until all writers are closed and all is acknowledged."""
        async with asyncio.TaskGroup() as tasks:
            while (chunk := await self._channel.receive()) is not None:
                for request in chunk:
                    self._waiting.setdefault(request.partition, []).append(request)
                for partition in self._waiting.keys() - self._under_way:
                    self._under_way.add(partition)
                    name = f"write-{self._topic}-{partition}"
                    tasks.create_task(self._write_runs(partition), name=name)
                while sum(map(len, self._waiting.values())) > MAX_WAITING:
                    self._left.clear()
                    await self._left.wait()
        if self._refused is not None:
            self._refused.close()

    def writer(self) -> ChannelWriter[list[Request]]:
        """A new writer."""
        return self._channel.writer()

    async def _write_runs(self, partition: int) -> None:
        """One after the other, until nothing waits."""
        target = TopicPartition(self._topic, partition)
        while partition in self._waiting:
            if pause_s := self._pace.pause_s(time.monotonic()):
                await asyncio.sleep(pause_s)
            waiting = self._waiting.pop(partition)
            self._pace.left(len(waiting), time.monotonic())
            self._left.set()
            requests: list[Request] = []
            for request in waiting:
                if request.ack_handle.revoked:
                    request.ack_handle.ack()
                else:
                    requests.append(request)
            await self._write_partition(target, requests)
        self._under_way.discard(partition)

    async def _write_partition(self, target: TopicPartition, requests: list[Request]) -> None:
        left = requests
        while left:
            records = [NewRecord(None, self._encode(request)) for request in left]
            refused = await deliver(self._producer, target, records, self._metrics)
            ack_handles = [request.ack_handle for request in left]
            ack_all(
                [each for index, each in enumerate(ack_handles) if index not in refused]
                if refused
                else ack_handles
            )
            unfitting = too_large(target, refused)
            left = [refuse(left[index], target.topic, self._stage) for index in unfitting]
            if left and self._refused is not None:
                await self._refused.send(left)  # which acknowledges them
                return


_ROUTING_HEADERS = frozenset(
    {
        "content-type",
        "kafka_correlationId",
        "kafka_replyPartition",
        "kafka_replyTopic",
        "traceparent",
        "tracestate",
    }
)


def refuse(request: Request, topic: str, stage: Stage) -> Request:
    """The request as a failure, since it does not fit into a record that the stage writes.

    Where the failure does not fit either, the rest goes, piece by piece: the request's value,
    kept for its dead letter; its key, and the headers that no answer needs; all headers.

    Raises:
        LogRefused: nothing is left that could go.
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
        raise LogRefused(f"topic {topic}: expected it to take an error, got too large a record")
    return request


def item_outlet(
    producer: Producer,
    topic: str,
    refused: Outlet[list[Request]],
    metrics: Metrics | None = None,
) -> TopicSender:
    """Writes `items`."""
    return TopicSender(producer, topic, encode_item, Stage.INGEST, refused, metrics)


def result_outlet(producer: Producer, topic: str, metrics: Metrics | None = None) -> TopicSender:
    """Writes `results`."""
    return TopicSender(producer, topic, encode_result, Stage.EXECUTOR, metrics=metrics)
