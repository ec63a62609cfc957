"""Executor events: written by executors, read by the batchers of other processes.

They announce an executor's models and its completed batches. Events that occur while a record is
being written go into the next one, so the number of records depends on the speed of the log and not
on the number of batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from headrace.delivery.producing import deliver
from headrace.errors import Rejected, Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.partitioner import partition_for_key
from headrace.log.port import Consumer, Log, NewRecord, Producer, Record, TopicPartition
from headrace.models.version import ModelVersion
from headrace.protocol.codec.events import decode_event, encode_event
from headrace.protocol.events import Completion, ExecutorEvent, HostedModel, UnreadyVersion
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.logs import Event
from headrace.transport.topic_io import log_unreadable
from headrace.tuning import TUNING, DeliveryTuning, TransportTuning

log = structlog.get_logger(__name__)


class ExecutorIdentity(NamedTuple):
    """Name of an executor, and how long it may be silent.

    Attributes:
        executor: a name that no other process has or had.
        silent_after_s: silence after which the consumer group, and so batchers, consider it dead.
    """

    executor: str
    silent_after_s: float


class _Stay:
    """Batch in this executor: its number of unfinished requests, and when it arrived."""

    __slots__ = ("left", "since_s")

    def __init__(self, left: int, since_s: float) -> None:
        self.left = left
        self.since_s = since_s


class ExecutorHeartbeat:
    """Write an executor's announcements.

    Args:
        topic: name and number of partitions of the events topic.
        partitions: returns the partitions of `batches` that this process reads now.
        models: returns the versions that are ready now.
        delivery_tuning: of writes that fail.
    """

    def __init__(
        self,
        producer: Producer,
        topic: TopicPartition,
        identity: ExecutorIdentity,
        partitions: Callable[[], list[int]],
        models: Callable[[], Sequence[ModelVersion]],
        tuning: TransportTuning = TUNING.transport,
        delivery_tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tuning = tuning
        self._delivery_tuning = delivery_tuning
        self._producer = producer
        self._identity = identity
        self._partitions = partitions
        self._models = models
        key = identity.executor.encode()
        self._key, self._target = key, TopicPartition(topic[0], partition_for_key(key, topic[1]))
        self._announced_partitions: list[int] = []
        self._unfinished: dict[str, _Stay] = {}
        self._completions: list[Completion] = []
        self._last_end_s = 0.0
        self._news = asyncio.Event()
        self._closed = False

    def received(self, batch: Batch) -> None:
        """Record a batch that was read; a completion will be announced for it."""
        self._unfinished[batch.batch_id] = _Stay(len(batch.requests), time.monotonic())

    def finished(self, batch_id: str, requests: Sequence[Request]) -> None:
        """Record that these requests of a batch, or of a part of it, have ended."""
        root = batch_id
        while root not in self._unfinished:
            root, _, part = root.rpartition(".")
            if not part:
                return
        stay = self._unfinished[root]
        stay.left -= len(requests)
        if stay.left > 0:
            return
        del self._unfinished[root]
        now_s = time.monotonic()
        whole = root == batch_id and all(one.failure is None for one in requests)
        first = requests[0]
        busy_s = now_s - max(stay.since_s, self._last_end_s)
        self._last_end_s = now_s
        self._completions.append(
            Completion(
                batch_id=root,
                model=first.model,
                version=first.version,
                shape_class=list(first.shape_class),
                rows=first.batch.rows if whole else 0,
                compute_us=first.batch.compute_us if whole else 0,
                stay_us=int((now_s - stay.since_s) * 1e6),
                busy_us=int(busy_s * 1e6),
            )
        )
        if busy_s >= self._tuning.completion_delay_s:
            self._news.set()
        elif len(self._completions) == 1:
            asyncio.get_running_loop().call_later(self._tuning.completion_delay_s, self._news.set)

    def close(self) -> None:
        """Announce the remaining completions and that the executor leaves."""
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        """Write announcements until closed."""
        while not self._closed:
            await self._announce()
            await self._wait_for_news()
        await self._announce()

    async def _wait_for_news(self) -> None:
        end_s = time.monotonic() + self._tuning.heartbeat_s
        while time.monotonic() < end_s and self._partitions() == self._announced_partitions:
            try:
                async with asyncio.timeout(self._tuning.assignment_check_s):
                    await self._news.wait()
            except TimeoutError:
                continue
            return

    async def _announce(self) -> None:
        self._news.clear()
        self._announced_partitions = self._partitions()
        completions, self._completions = self._completions, []
        event = ExecutorEvent(
            executor=self._identity.executor,
            silent_after_ms=int(self._identity.silent_after_s * 1000),
            partitions=self._announced_partitions,
            models=[_hosted(version) for version in self._models()],
            completions=completions,
            leaving=self._closed,
        )
        record = NewRecord(self._key, encode_event(event))
        await deliver(self._producer, self._target, [record], tuning=self._delivery_tuning)


def _hosted(version: ModelVersion) -> HostedModel:
    return HostedModel(
        name=version.name,
        version=version.version,
        instances=version.config.instances,
        max_batch_size=version.max_batch_size,
        batching_off=version.batching_off,
        memory_bytes={device: sum(taken) for device, taken in version.memory_bytes.items()},
    )


class ControlHeartbeat:
    """Write how far a process has followed the control topic, at once and every second.

    Args:
        producer: of this process.
        topic: name and number of partitions of the events topic.
        process: a name that no other process has or had.
        models: returns the versions that are ready now.
        followed: returns the generation, the wanted versions that are not ready, and whether it
            still follows.
        stages: of the process.
        delivery_tuning: of writes that fail.
    """

    def __init__(
        self,
        producer: Producer,
        topic: TopicPartition,
        process: str,
        models: Callable[[], Sequence[ModelVersion]],
        followed: Callable[[], tuple[int, Sequence[UnreadyVersion], bool]],
        tuning: TransportTuning = TUNING.transport,
        stages: Sequence[str] = (),
        delivery_tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._delivery_tuning = delivery_tuning
        self._stages = [*map(str, stages)]
        self._producer = producer
        self._process = process
        self._key = process.encode()
        self._target = TopicPartition(topic[0], partition_for_key(self._key, topic[1]))
        self._models = models
        self._followed = followed
        self._tuning = tuning

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            news = self._make_event()
            record = NewRecord(self._key, encode_event(news))
            await deliver(self._producer, self._target, [record], tuning=self._delivery_tuning)
            await self._wait_for_news(news)

    async def _wait_for_news(self, last: ExecutorEvent) -> None:
        checks = round(self._tuning.heartbeat_s / self._tuning.assignment_check_s)
        for _ in range(checks):
            await asyncio.sleep(self._tuning.assignment_check_s)
            if self._make_event() != last:
                return

    def _make_event(self) -> ExecutorEvent:
        generation, unready, is_following = self._followed()
        return ExecutorEvent(
            executor=self._process,
            silent_after_ms=int(self._tuning.heartbeat_s * 1000),
            models=[_hosted(version) for version in self._models()],
            generation=generation,
            unready=[each.line for each in unready],
            stages=self._stages,
            failed=[each.key for each in unready if not each.is_under_way],
            rejected=[each.key for each in unready if each.is_rejected],
            is_following=is_following,
        )


class ExecutorEventReader:
    """Read the events topic from its end. Every batcher reads all of it, so it joins no group.

    Args:
        topic: its name and number of partitions.
        pause_s: pause after each poll with events, so that later ones share a fetch; 0 for none.
    """

    def __init__(
        self,
        log_: Log,
        topic: TopicPartition,
        tuning: TransportTuning = TUNING.transport,
        pause_s: float = 0.0,
    ) -> None:
        self._tuning = tuning
        self._pause_s = pause_s
        self._log = log_
        self._partitions = [TopicPartition(topic[0], number) for number in range(topic[1])]
        self._closed = False

    def close(self) -> None:
        """End `run` soon."""
        self._closed = True

    async def run(self, on_events: Callable[[list[ExecutorEvent]], None]) -> None:
        """Read until closed.

        Args:
            on_events: called with the new events, several times a second even if there are none.
        """
        async with self._log.reader(self._partitions) as reader:
            while not self._closed:
                records = await self._poll(reader)
                on_events([each for record in records if (each := _decode_or_skip(record))])
                if records and self._pause_s:
                    await asyncio.sleep(self._pause_s)

    async def _poll(self, reader: Consumer) -> list[Record]:
        try:
            polled = await reader.poll(self._tuning.events_poll_s, self._tuning.max_polled_events)
        except OffsetOutOfRange:  # retention was faster: only new events matter
            await self._seek_to_end(reader)
            return []
        return [record for records in polled.values() for record in records]

    async def _seek_to_end(self, reader: Consumer) -> None:
        try:
            ends = await reader.end_offsets(self._partitions)
        except Retriable as error:  # the next poll raises `OffsetOutOfRange` again
            log.warning(Event.SEEK_DELAYED, reason=str(error))
            await asyncio.sleep(self._tuning.events_retry_s)
            return
        for partition, end in ends.items():
            reader.seek(partition, end)


def _decode_or_skip(record: Record) -> ExecutorEvent | None:
    try:
        return decode_event(record.value or b"")
    except Rejected as error:
        log_unreadable(record, error)
        return None
