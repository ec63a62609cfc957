"""Destinations of a replay: a topic, a capture file, or a pipeline in this process.

A copy keeps the original's key, value and headers, except the headers that a new time, place or run
invalidates.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.client.rpc import ReplyReader, last_header, topic_partitions
from headrace.config import Settings
from headrace.errors import Retriable
from headrace.log.errors import RecordRefused, RecordTooLarge
from headrace.log.partitioner import partition_for_key
from headrace.log.port import Log, NewRecord, Producer, Record, SentBatch, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.replay.capture import CaptureWriter
from headrace.tools.replay.recording import identity, record_bytes
from headrace.topics import Topic

# --- headers of copies ---------------------------------------------------------------------------


_MAX_DIGITS = 15  # of a deadline, by the contract; Python refuses to read thousands


@dataclass(frozen=True, slots=True)
class Marking:
    """Differences between copies and their originals.

    Attributes:
        run_id: of this run.
        keep_reply: keep the reply topic and partition; otherwise the callers of the originals do
            not get the copies' answers.
        reply_to: reply topic of all copies; overrides `keep_reply`.
    """

    run_id: str
    keep_reply: bool = False
    reply_to: str | None = None

    def copy_of(self, record: Record, now_ms: int) -> NewRecord:
        """Return the record to send; the log that takes it sets its timestamp.

        `x-deadline-ms` is moved by the time since the original's timestamp, so that the copy has as
        much time as its original had; an unreadable one is kept. `x-timeout-ms` counts from the
        copy's own timestamp anyway. The marks replace those of an earlier replay or redrive.
        """
        headers = [
            (name, self._moved(value, record, now_ms) if name == HeaderName.DEADLINE_MS else value)
            for name, value in record.headers
            if not self._is_replaced(name)
        ]
        if self.reply_to is not None:
            headers.append((HeaderName.REPLY_TOPIC, self.reply_to.encode()))
        headers.append((HeaderName.REPLAY_OF, identity(record).encode()))
        headers.append((HeaderName.REPLAY_RUN, self.run_id.encode()))
        return NewRecord(record.key, record.value, headers)

    def _is_replaced(self, name: str) -> bool:
        if name in {HeaderName.REPLY_TOPIC, HeaderName.REPLY_PARTITION}:
            return self.reply_to is not None or not self.keep_reply
        return name in {HeaderName.REPLAY_OF, HeaderName.REPLAY_RUN, HeaderName.REPLAY_LETTER}

    @staticmethod
    def _moved(value: bytes | None, record: Record, now_ms: int) -> bytes | None:
        if value is None or not value.isdigit() or len(value) > _MAX_DIGITS or record.timestamp < 0:
            return value
        return b"%d" % (int(value) + now_ms - record.timestamp)


# --- sinks ---------------------------------------------------------------------------------------


MAX_PENDING_RECORDS = 8192
MAX_PENDING_BYTES = 16 * 1024 * 1024
"""Limit of unanswered bytes. The embedded log drops the oldest records beyond its retention, 64 MiB
per partition, whether they have been read or not.
"""

ANSWER_TIMEOUT_S = 60.0
"""How long to wait for the next answer before giving up the rest."""


class Unanswered(Retriable):
    """The pipeline has not answered for a while."""


class Sink(Protocol):
    """Accepts records in order of time."""

    async def send(self, records: Sequence[Record]) -> Sequence[SentBatch]:
        """Hand over records; return the batches to await until they are safe."""
        ...

    async def finish(self) -> None:
        """Wait for the results, after everything was handed over and is safe."""
        ...


class _Named:
    """An acknowledgement of copies; an error that refuses them names their originals."""

    def __init__(self, originals: str, acknowledged: Awaitable[None]) -> None:
        self._originals = originals
        self._acknowledged = acknowledged

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield from self._acknowledged.__await__()
        except (RecordTooLarge, RecordRefused) as error:
            raise type(error)(f"{self._originals}: {error.message}") from error


class TopicSink:
    """Sends marked copies into a topic.

    A record goes to its own partition's number modulo the topic's, so the order within a partition
    is kept.

    Args:
        producer: writes the copies.
        target: name of the topic, and the number of its partitions.
        marking: what the headers of the copies say of the replay.
        by_key: choose the partition of a record with a key as Kafka's clients do.
        now_ms: current time for deadlines, in epoch milliseconds.
    """

    def __init__(
        self,
        producer: Producer,
        target: tuple[str, int],
        marking: Marking,
        now_ms: Callable[[], int],
        *,
        by_key: bool = False,
    ) -> None:
        self.topic, self._partitions = target
        self._producer = producer
        self._marking = marking
        self._now_ms = now_ms
        self._by_key = by_key

    async def prepare(self) -> None:
        """Let the producer fetch the topic's metadata, so that no record waits for it."""
        for number in range(self._partitions):
            await self._producer.send(TopicPartition(self.topic, number), ())

    def _partition_of(self, record: Record) -> TopicPartition:
        """Return the partition of the record's copy."""
        if self._by_key and record.key is not None:
            return TopicPartition(self.topic, partition_for_key(record.key, self._partitions))
        return TopicPartition(self.topic, record.partition % self._partitions)

    async def send(self, records: Sequence[Record]) -> Sequence[SentBatch]:
        """See `Sink`."""
        now_ms = self._now_ms()
        by_partition: dict[TopicPartition, list[Record]] = {}
        for record in records:
            by_partition.setdefault(self._partition_of(record), []).append(record)
        batches: list[SentBatch] = []
        for partition, originals in by_partition.items():
            copies = [self._copy_of(each, now_ms) for each in originals]
            start = 0
            for sent in await self._producer.send(partition, copies):
                first = identity(originals[start])
                named = first if sent.size == 1 else f"{sent.size} records from {first} on"
                batches.append(SentBatch(sent.size, _Named(named, sent.acknowledged)))
                start += sent.size
        return batches

    def _copy_of(self, record: Record, now_ms: int) -> NewRecord:
        return self._marking.copy_of(record, now_ms)

    async def finish(self) -> None:
        """Do nothing: records in a topic have no results to wait for."""


class CaptureSink:
    """Writes unchanged records into an open capture file."""

    def __init__(self, writer: CaptureWriter) -> None:
        self._writer = writer

    async def send(self, records: Sequence[Record]) -> Sequence[SentBatch]:
        """See `Sink`. Records are in the file once a frame is full, or at the end."""
        await asyncio.to_thread(self._writer.add, records)
        return ()

    async def finish(self) -> None:
        """Do nothing: leaving the writer writes the index."""


class PipelineSink(TopicSink):
    """Sends copies as requests to a pipeline, and counts its answers; made by `into_pipeline`.

    Attributes:
        statuses: number of answers by `x-status`.
    """

    def __init__(
        self,
        producer: Producer,
        target: tuple[str, int],
        marking: Marking,
        now_ms: Callable[[], int],
        *,
        by_key: bool,
        replies: ReplyReader,
    ) -> None:
        super().__init__(producer, target, marking, now_ms, by_key=by_key)
        self.statuses: Counter[str] = Counter()
        self._replies = replies
        self._pending_bytes = 0

    async def send(self, records: Sequence[Record]) -> Sequence[SentBatch]:
        """See `Sink`. Waits while too much is unanswered, whatever the pace."""
        while self._replies.pending and (
            self._replies.pending > MAX_PENDING_RECORDS or self._pending_bytes > MAX_PENDING_BYTES
        ):
            await self._wait_for_answers()
        return await super().send(records)

    async def finish(self) -> None:
        """Wait until all requests are answered. Raises `Unanswered`."""
        while self._replies.pending:
            await self._wait_for_answers()

    def _copy_of(self, record: Record, now_ms: int) -> NewRecord:
        """Return a copy with a correlation id of its own instead of the original's."""
        copy = super()._copy_of(record, now_ms)
        size = record_bytes(record)
        self._pending_bytes += size
        correlation_id = self._replies.expect(partial(self._answered, size))
        headers = [header for header in copy.headers if header[0] != HeaderName.CORRELATION_ID]
        return copy._replace(headers=[*headers, (HeaderName.CORRELATION_ID, correlation_id)])

    def _answered(self, size: int, answer: Record) -> None:
        self._pending_bytes -= size
        self.statuses[(last_header(answer.headers, HeaderName.STATUS) or b"").decode()] += 1

    async def _wait_for_answers(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._replies.wait_for_replies()
        except TimeoutError:
            raise Unanswered(
                f"{self._replies.pending} requests are not answered, "
                f"the last answer came {ANSWER_TIMEOUT_S:g} s ago"
            ) from None


@asynccontextmanager
async def into_pipeline(
    log: Log,
    settings: Settings,
    marking: Marking,
    now_ms: Callable[[], int],
    *,
    by_key: bool,
) -> AsyncIterator[PipelineSink]:
    """Yield a sink for the pipeline on this log, and read the answers meanwhile."""
    requests = await topic_partitions(log, settings.topic(Topic.REQUESTS))
    responses = await topic_partitions(log, settings.topic(Topic.RESPONSES))
    async with log.producer() as producer, ReplyReader(log, responses) as replies:
        target = requests[0].topic, len(requests)
        yield PipelineSink(producer, target, marking, now_ms, by_key=by_key, replies=replies)
