"""A sink that is a pipeline in this process: sends requests to its embedded log, counts answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

from headrace.client.replies import last_header
from headrace.config import Settings
from headrace.errors import ConfigurationError, Retriable
from headrace.log.port import Consumer, Log, Producer, Record, Run, TopicPartition
from headrace.tools.replay.recording import record_bytes
from headrace.tools.replay.sinks import TopicSink
from headrace.topics import Topic

MAX_WAITING_RECORDS = 8192
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Limit of unanswered bytes. The embedded log drops the oldest records beyond its retention, 64 MiB
per partition, whether they have been read or not.
"""

ANSWER_TIMEOUT_S = 60.0
"""How long to wait for the next answer before giving up the rest."""

POLL_S = 0.1
POLL_RECORDS = 1000


class Unanswered(Retriable):
    """The pipeline has not answered for a while."""


class Asked(NamedTuple):
    """A request in flight. `sent_s` is on the monotonic clock."""

    original: Record
    size: int
    sent_s: float


OnAnswer: TypeAlias = Callable[[Record, Record, float], None]
"""Called with the original, its answer, and the seconds between sending and answer."""


class PipelineSink:
    """Sends copies as requests to a pipeline; made by `into_pipeline`.

    Attributes:
        statuses: number of answers by `x-status`.
    """

    def __init__(self, requests: TopicSink, on_answer: OnAnswer | None) -> None:
        self.statuses: Counter[str] = Counter()
        self._requests = requests
        self._on_answer = on_answer
        self._waiting: dict[str, Asked] = {}
        self._waiting_bytes = 0
        self._next_offsets: Counter[TopicPartition] = Counter()
        self._progress = asyncio.Event()
        self._stopping = False

    async def send(self, records: Sequence[Record]) -> Sequence[Run]:
        """See `Sink`. Waits while too much is unanswered, whatever the pace."""
        while self._waiting and (
            len(self._waiting) > MAX_WAITING_RECORDS or self._waiting_bytes > MAX_WAITING_BYTES
        ):
            await self._next_answers()
        sent_s = time.monotonic()
        for record in records:
            # This is the only producer of the log, so the copy's offset is known beforehand.
            partition = self._requests.partition_of(record)
            name = f"{partition}/{self._next_offsets[partition]}"
            self._next_offsets[partition] += 1
            size = record_bytes(record)
            self._waiting[name] = Asked(record, size, sent_s)
            self._waiting_bytes += size
        return await self._requests.send(records)

    async def finish(self) -> None:
        """Wait until all requests are answered. Raises `Unanswered`."""
        while self._waiting:
            await self._next_answers()

    async def read(self, answers: Consumer) -> None:
        """Read answers until `stop`."""
        while not self._stopping:
            for records in (await answers.poll(POLL_S, POLL_RECORDS)).values():
                for record in records:
                    self._take(record)
                self._progress.set()

    def stop(self) -> None:
        """End `read` at its next poll."""
        self._stopping = True

    def _take(self, answer: Record) -> None:
        name = (last_header(answer.headers, "x-request") or b"").decode()
        asked = self._waiting.pop(name, None)
        if asked is None:
            return  # a second copy, which at-least-once delivery allows
        self._waiting_bytes -= asked.size
        self.statuses[(last_header(answer.headers, "x-status") or b"").decode()] += 1
        if self._on_answer is not None:
            self._on_answer(asked.original, answer, time.monotonic() - asked.sent_s)

    async def _next_answers(self) -> None:
        self._progress.clear()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._progress.wait()
        except TimeoutError:
            raise Unanswered(
                f"{len(self._waiting)} requests are not answered, "
                f"the last answer came {ANSWER_TIMEOUT_S:g} s ago"
            ) from None


@asynccontextmanager
async def into_pipeline(
    log: Log,
    settings: Settings,
    make_sink: Callable[[Producer, tuple[str, int]], TopicSink],
    on_answer: OnAnswer | None = None,
) -> AsyncIterator[PipelineSink]:
    """Run a sink for the pipeline on this log, and read the answers meanwhile.

    The log is a new embedded one without other producers; `make_sink` makes the `TopicSink` for a
    producer and a target.
    """
    topics = [settings.topic(Topic.REQUESTS), settings.topic(Topic.RESPONSES)]
    found = await log.describe_topics(topics)
    counts = []
    for topic in topics:
        info = found[topic]
        if info is None:
            raise ConfigurationError(f"{topic}: expected a topic, but there is none of this name")
        counts.append(info.partitions)
    partitions = [TopicPartition(topics[1], number) for number in range(counts[1])]
    async with log.producer() as producer, log.reader(partitions) as answers:
        sink = PipelineSink(make_sink(producer, (topics[0], counts[0])), on_answer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sink.read(answers), name="replay-answers")
            try:
                yield sink
            finally:
                sink.stop()
