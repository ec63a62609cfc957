"""Sends the questions and reads the answers: a producer and two consumers of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Log, Producer, Record, Run, TopicPartition
from headrace.tools.demo.answers import read_answer
from headrace.tools.demo.load import Due
from headrace.tools.demo.questions import CORRELATION_ID, Question
from headrace.tools.demo.tally import Tally
from headrace.topics import Topic

ANSWER_TIMEOUT_S = 15.0
"""How long after the last question an answer may take."""

_POLL_S = 0.2
_MAX_RECORDS = 1000
_MAX_UNACKNOWLEDGED_RUNS = 1000
_DEAD_LETTER_CODE = "kafka_dlt-exception-fqcn"


class Traffic:
    """Sends all questions of a plan and counts the results; the topics must be new.

    Args:
        log: an open log.
        file_labels: the names of the magika model's outputs, in their order.
    """

    def __init__(
        self, log: Log, settings: Settings, tally: Tally, file_labels: Sequence[str]
    ) -> None:
        self._log = log
        self._settings = settings
        self._tally = tally
        self._file_labels = file_labels
        self._complete = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self, load: Iterable[Due]) -> None:
        """Run until everything is answered and every dead letter is read, or the time is over.

        Raises:
            LogUnavailable: the log did not accept a request.
            KeyError, ValueError: an answer violates the protocol.
        """
        async with self._log.producer() as producer, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(producer, Topic.RESPONSES, self._answer), name="answers")
            tasks.create_task(
                self._read(producer, Topic.DEAD_LETTERS, self._dead_letter), name="dead letters"
            )
            await tasks.create_task(self._send(producer, load), name="questions")
            self._check_complete()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._complete.wait()
            except TimeoutError:
                pass  # The tally reports what is missing.
            self._stopped.set()

    async def _send(self, producer: Producer, load: Iterable[Due]) -> None:
        runs: asyncio.Queue[Run | None] = asyncio.Queue(_MAX_UNACKNOWLEDGED_RUNS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_confirm(runs), name="acknowledgements")
            partitions = await self._partitions(producer, Topic.REQUESTS)
            turns = cycle(partitions)
            started_s = time.monotonic()
            for due in load:
                due_s = started_s + due.at_s
                if (wait_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                shares: dict[TopicPartition, list[Question]] = {}
                for question in due.questions:
                    self._complete.clear()
                    self._tally.ask(question, due_s)
                    shares.setdefault(next(turns), []).append(question)
                for partition, share in shares.items():
                    for run in await producer.send(partition, [each.record for each in share]):
                        await runs.put(run)
            await runs.put(None)

    async def _read(self, producer: Producer, topic: Topic, take: Callable[[Record], None]) -> None:
        partitions = await self._partitions(producer, topic)
        async with self._log.reader(partitions) as reader:
            for partition, offset in (await reader.beginning_offsets(partitions)).items():
                reader.seek(partition, offset)
            while not self._stopped.is_set():
                for records in (await reader.poll(_POLL_S, _MAX_RECORDS)).values():
                    for record in records:
                        take(record)
                self._check_complete()

    def _answer(self, record: Record) -> None:
        self._tally.answer(read_answer(record, self._file_labels), time.monotonic())

    def _dead_letter(self, record: Record) -> None:
        headers = dict(record.headers)
        code = headers[_DEAD_LETTER_CODE] or b""
        self._tally.dead_letter(headers[CORRELATION_ID] or b"", code.decode())

    def _check_complete(self) -> None:
        if self._tally.is_complete:
            self._complete.set()

    async def _partitions(self, producer: Producer, topic: Topic) -> list[TopicPartition]:
        name = self._settings.topic(topic)
        count = await producer.partitions_for(name)
        if count is None:
            raise ConfigurationError(f"{name}: expected a topic, got none")
        return [TopicPartition(name, number) for number in range(count)]


async def _confirm(runs: asyncio.Queue[Run | None]) -> None:
    """Wait for acknowledgements in their order, so that a failed one ends the demo."""
    while (run := await runs.get()) is not None:
        await run.acknowledged
