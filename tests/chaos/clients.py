"""The callers: who asks, who reads the answers, and who looks at what is committed.

They come to the broker directly, past the proxy, since what they write down is the truth that the
checker goes by. A request counts as sent when the log holds it: that is read back at the end, and
held against what was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError

from headrace.config import KafkaSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import Retriable
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Gap, Record, TopicPartition
from headrace.tools.dead_letters.reading import OffsetRange, read_spans, spans_of
from tests.chaos.history import (
    NO_NUMBER,
    Answered,
    Committed,
    Fault,
    FaultKind,
    History,
    Kept,
    Sent,
)
from tests.chaos.members import AFTERMATH_MS, now_ms
from tests.chaos.workload import DECOMPRESSED_BYTES, PARTITIONS, Question, number_told
from tests.support.raw_records import NONE, RawRecord, produce_raw, raw_batch

BURST = 400
LOOK_AGAIN_S = 0.25
SILENT_MS = 1250
"""A second without an answer, half of what Headrace's requests have, and the pause before it."""
POLL_MS = 100
SEND_DEADLINE_S = 45.0
CLOSE_DEADLINE_S = 3.0
READ_BACK_DEADLINE_S = 60.0
KEY_CHARACTERS = 32
"""Characters of a key that are written down; they suffice to tell all keys apart."""


class LogDiffers(Exception):
    """The requests in the log are not those that the harness sent, whatever the system does."""


class Sender:
    """Sends questions in bursts of random sizes, so many a second on the whole.

    A question whose record was not acknowledged is not sent again: the log may hold it. A producer
    that does not get on is given up for a new one, since aiokafka's own may end with a broker.
    """

    def __init__(self, bootstrap: str, topic: str, reply_topic: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._reply_topic = reply_topic
        self._sent: list[tuple[int, asyncio.Future[Any]]] = []

    @property
    def acknowledged(self) -> set[int]:
        """The numbers of the questions that the broker said it has."""
        return {
            number
            for number, sent in self._sent
            if sent.done() and not sent.cancelled() and sent.exception() is None
        }

    async def send(
        self, questions: Sequence[Question], per_second: float, rng: random.Random
    ) -> None:
        """All of them, each once."""
        left = deque(questions)
        while left:
            async with self._producing() as producer:
                while left:
                    burst = [left.popleft() for _ in range(min(len(left), rng.randint(1, BURST)))]
                    async with asyncio.timeout(SEND_DEADLINE_S):
                        for question in burst:
                            self._sent.append(
                                (question.number, await self._send(producer, question))
                            )
                    await asyncio.sleep(len(burst) / per_second)
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await producer.flush()

    @asynccontextmanager
    async def _producing(self) -> AsyncIterator[AIOKafkaProducer]:
        """A producer, until the caller is done with it, or it is stuck or fails."""
        producer = await self._started()
        try:
            yield producer
        except (KafkaError, TimeoutError):
            await asyncio.sleep(LOOK_AGAIN_S)
        finally:
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await producer.stop()
            except (KafkaError, TimeoutError):
                pass  # what it had not sent is gone, as its futures say

    async def _started(self) -> AIOKafkaProducer:
        while True:
            producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, enable_idempotence=True)
            try:
                await producer.start()
            except KafkaError:
                await producer.stop()
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                return producer

    async def _send(self, producer: AIOKafkaProducer, question: Question) -> asyncio.Future[Any]:
        headers = [("kafka_correlationId", str(question.number).encode())]
        if question.replies:
            headers.append(("kafka_replyTopic", self._reply_topic.encode()))
        headers += [(name.decode(), value) for name, value in question.headers]
        future: asyncio.Future[Any] = await producer.send(
            self._topic,
            key=question.key.encode(),
            value=question.value,
            partition=question.partition,
            headers=headers,
        )
        return future


class RawSender:
    """Sends batches that no client library writes, each once.

    Where a batch is not acknowledged, the log may hold it: that is read back.

    Attributes:
        topic: of requests.
        questions: those that were in the batches.
        acknowledged: the numbers of those that the broker said it has.
    """

    def __init__(self, bootstrap: str, topic: str, first_number: int) -> None:
        self._bootstrap = bootstrap
        self.topic = topic
        self._first_number = first_number
        self.questions: list[Question] = []
        self.acknowledged: set[int] = set()

    async def send(
        self, partition: int, asked: Sequence[Callable[[int], Question]], codec: int = NONE
    ) -> None:
        """Send one batch of questions, each made from the number that it gets."""
        first = self._first_number + len(self.questions)
        questions = [
            ask(number)._replace(partition=partition) for number, ask in enumerate(asked, first)
        ]
        self.questions += questions
        if await self.send_records(partition, [_raw(each) for each in questions], codec):
            self.acknowledged |= {each.number for each in questions}

    async def send_records(self, partition: int, records: Sequence[RawRecord], codec: int) -> bool:
        """Send one batch of any records; whether the broker said that it has it."""
        make = partial(raw_batch, records, codec=codec, timestamp_ms=now_ms())
        place = TopicPartition(self.topic, partition)
        try:
            await produce_raw(self._bootstrap, place, await asyncio.to_thread(make))
        except (KafkaError, TimeoutError):
            return False
        return True


def _raw(question: Question) -> RawRecord:
    correlation = (b"kafka_correlationId", b"%d" % question.number)
    return RawRecord(question.value, question.key.encode(), [correlation, *question.headers])


async def read_back(
    bootstrap: str,
    topic: str,
    questions: Sequence[Question],
    acknowledged: set[int],
    deleted: Sequence[Sent] = (),
) -> list[Sent]:
    """Return the questions that the log holds, and those of its records that cannot be read; and
    those that it held before they were deleted.

    Raises:
        LogDiffers: it lost an acknowledged record or holds one twice.
    """
    by_number = {question.number: question for question in questions}
    found: list[Sent] = []
    records, gaps = await _stored(bootstrap, topic)
    for record in records:
        question = by_number[int(dict(record.headers)["kafka_correlationId"] or b"")]
        key = question.key[:KEY_CHARACTERS]
        where = (record.partition, record.offset)
        size_bytes = len(record.value or b"")
        found.append(
            Sent(record.timestamp, question.number, *where, key, question.statuses, size_bytes)
        )
    unreadable = [
        Sent(now_ms(), NO_NUMBER, gap.partition.partition, offset, "", ())
        for gap in gaps
        for offset in range(gap.first, gap.end)
    ]
    # A broker that was killed may have forgotten a deletion.
    known = {each.identity for each in deleted}
    found = [*deleted, *(each for each in found + unreadable if each.identity not in known)]
    readable = [each.number for each in found if each.statuses]
    numbers = set(readable)
    if not numbers >= acknowledged:
        raise LogDiffers(f"the broker lost {sorted(acknowledged - numbers)[:5]}")
    if len(numbers) != len(readable):
        raise LogDiffers("the broker holds a request twice")
    return found


async def delete_records(bootstrap: str, topic: str, partition: int, end: int) -> None:
    """Delete all records below an offset."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        before = RecordsToDelete(before_offset=end)
        await admin.delete_records({KafkaPartition(topic, partition): before})
    finally:
        await admin.close()


async def read_kept(bootstrap: str, topic: str) -> list[Kept]:
    """The requests of which the log holds a dead letter."""
    letters, _ = await _stored(bootstrap, topic)
    return [_kept(letter) for letter in letters]


def _kept(letter: Record) -> Kept:
    headers = dict(letter.headers)
    (partition,) = struct.unpack(">i", headers["kafka_dlt-original-partition"] or b"")
    (offset,) = struct.unpack(">q", headers["kafka_dlt-original-offset"] or b"")
    return Kept(partition, offset)


async def _stored(bootstrap: str, topic: str) -> tuple[list[Record], list[Gap]]:
    """All that a topic holds now, and what of it cannot be read.

    aiokafka's own consumer raises an error at the names of headers that this reader takes.
    """
    found: list[Record] = []
    gaps: list[Gap] = []
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    async with (
        KafkaLog(_settings(bootstrap), decompressed_bytes=DECOMPRESSED_BYTES) as log,
        log.reader(partitions) as reader,
        asyncio.timeout(READ_BACK_DEADLINE_S),
    ):
        spans: dict[TopicPartition, OffsetRange] = {}
        while not spans:
            with suppress(Retriable):  # a broker that was restarted does not lead partitions yet
                spans = await spans_of(reader, partitions)
        async for records in read_spans(reader, spans, gaps.append):
            found += records
    return found, gaps


def _settings(bootstrap: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=bootstrap, request_timeout_ms=3000)


def unheld(questions: Sequence[Question], held: Sequence[Sent]) -> list[Question]:
    """The questions that the log does not hold."""
    numbers = {each.number for each in held}
    return [question for question in questions if question.number not in numbers]


@asynccontextmanager
async def reading(bootstrap: str, topics: Sequence[str]) -> AsyncIterator[AIOKafkaConsumer]:
    """A `read_committed` reader of whole topics from their beginning, in no group."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        request_timeout_ms=5000,
    )
    await consumer.start()
    try:
        consumer.assign(
            [KafkaPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
        )
        yield consumer
    finally:
        await consumer.stop()


async def read_answers(
    bootstrap: str,
    topics: Sequence[str],
    history: History,
    resolve: Callable[[bytes], bytes | None],
) -> None:
    """Write down every answer as it comes, until cancelled.

    `resolve` returns the value that a claim refers to; None if it is not there.
    """
    async with reading(bootstrap, topics) as consumer:
        while True:
            polled = await consumer.getmany(timeout_ms=POLL_MS)
            for record in (record for records in polled.values() for record in records):
                history.add(_answered(record, resolve))


def _answered(record: Any, resolve: Callable[[bytes], bytes | None]) -> Answered:
    headers = dict(record.headers)
    claim = headers.get("x-claim") if record.value is None else None
    _, partition, offset = headers["x-request"].decode().rsplit("/", 2)
    return Answered(
        record.timestamp,
        record.topic,
        record.partition,
        record.offset,
        int(partition),
        int(offset),
        int(headers.get("kafka_correlationId", NO_NUMBER)),
        number_told(record.value if claim is None else resolve(claim), headers["content-type"]),
        headers["x-status"].decode(),
    )


async def watch_commits(bootstrap: str, group: str, topic: str, history: History) -> None:
    """Write down what the group has committed whenever it has changed, until cancelled.

    Nobody asks the broker more steadily, so that its silences are written down here as well: on a
    machine that is short of cores it may be silent although nobody struck it.
    """
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    known: dict[TopicPartition, AckedOffsets] = {}
    async with KafkaLog(_settings(bootstrap)) as log:
        heard_ms = now_ms()
        while True:
            try:
                found = await log.committed(group, partitions)
            except Retriable:  # a broker that restarts; what it missed it sees the next time
                found = {}
            at_ms = now_ms()
            if at_ms - heard_ms > SILENT_MS:
                history.add(Fault(heard_ms, at_ms + AFTERMATH_MS, FaultKind.BROKER_SILENT, ()))
            heard_ms = at_ms
            for partition, committed in found.items():
                progress = None if committed is None else AckedOffsets.from_committed(committed)
                if progress is not None and known.get(partition) != progress:
                    known[partition] = progress
                    base, ranges = progress.base, tuple(progress.ranges)
                    history.add(Committed(at_ms, partition.partition, base, ranges))
            await asyncio.sleep(LOOK_AGAIN_S)
