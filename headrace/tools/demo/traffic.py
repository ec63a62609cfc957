"""Traffic of the demo: the plan of its questions, and the tasks that send them and read answers.

The load is an open loop, in which no request waits for an answer. Requests come at random times (a
Poisson process for each kind), plus bursts, so that batches of many sizes form.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, cycle, takewhile
from random import Random
from typing import NamedTuple

from headrace.client.rpc import ReplyReader, topic_partitions
from headrace.config import Settings
from headrace.log.port import Log, NewRecord, Producer, Record, SentBatch, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.demo.questions import MakeQuestion, Question, Questions, read_answer
from headrace.tools.demo.tally import Tally
from headrace.topics import Topic

DIGITS_MSGPACK_PER_S = 200.0
DIGITS_JSON_PER_S = 100.0
MAX_FILES_PER_S = 40.0
FILES_SHARE = 0.35
"""Share of the file model's capacity on this machine; with the bursts, half of it is used."""

BURST_EVERY_S = 0.5
DIGITS_BURSTS = (8, 16, 32, 64)
FILE_BURSTS = (4, 8, 16)
FILE_BURSTS_SHARE = 0.15
MAX_ROWS = 4
INVALID_AT = (0.2, 0.5, 0.8)
"""Positions of the invalid requests, as shares of the whole time."""

ANSWER_TIMEOUT_S = 15.0
"""Longest wait for answers after the last question."""

_MAX_UNACKNOWLEDGED_BATCHES = 1000
_DEAD_LETTER_CODE = HeaderName.DLT_CODE


# --- the plan ---------------------------------------------------------------------------------


class Due(NamedTuple):
    """Questions to send `at_s` seconds after the start."""

    at_s: float
    questions: tuple[Question, ...]


_Moment = tuple[float, Callable[[], Iterable[Question]]]


def plan_load(
    questions: Questions, seconds: float, seed: int, *, file_capacity_per_s: float
) -> Iterator[Due]:
    """Yield all questions in order of time; they are generated lazily.

    `file_capacity_per_s` is the number of files that the model can classify per second here; with
    0, none are sent. An open loop above that capacity would only show a growing queue.
    """
    random = Random(seed)  # noqa: S311 - arrivals, not secrets

    def some_digits() -> Question:
        return questions.digits_msgpack(random.randint(1, MAX_ROWS))

    streams = [
        _arrivals(some_digits, DIGITS_MSGPACK_PER_S, seconds, random),
        _arrivals(questions.digits_json, DIGITS_JSON_PER_S, seconds, random),
        _bursts(questions.digits_msgpack, DIGITS_BURSTS, BURST_EVERY_S, seconds),
        iter([(part * seconds, questions.invalid) for part in INVALID_AT]),
    ]
    files_per_s = min(FILES_SHARE * file_capacity_per_s, MAX_FILES_PER_S)
    if files_per_s:
        streams.append(_arrivals(questions.file, files_per_s, seconds, random))
        burst_files_per_s = files_per_s * FILE_BURSTS_SHARE / FILES_SHARE
        every_s = sum(FILE_BURSTS) / len(FILE_BURSTS) / burst_files_per_s
        streams.append(_bursts(questions.file, FILE_BURSTS, every_s, seconds))
    for at_s, make in heapq.merge(*streams, key=lambda moment: moment[0]):
        yield Due(at_s, tuple(make()))


def _arrivals(
    make: MakeQuestion, per_s: float, seconds: float, random: Random
) -> Iterator[_Moment]:
    gaps = iter(lambda: random.expovariate(per_s), None)
    for at_s in takewhile(lambda at_s: at_s < seconds, accumulate(gaps)):
        yield at_s, partial(_many, make, 1)


def _bursts(
    make: MakeQuestion, sizes: tuple[int, ...], every_s: float, seconds: float
) -> Iterator[_Moment]:
    at_s = every_s
    for size in cycle(sizes):
        if at_s >= seconds:
            return
        yield at_s, partial(_many, make, size)
        at_s += every_s


def _many(make: MakeQuestion, size: int) -> tuple[Question, ...]:
    return tuple(make() for _ in range(size))


# --- sending and reading ----------------------------------------------------------------------


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

    async def run(self, load: Iterable[Due]) -> None:
        """Send all questions, and wait until every answer and every dead letter is read, or
        `ANSWER_TIMEOUT_S` is over.

        Raises:
            LogUnavailable: the log did not accept a request.
            KeyError, ValueError: an answer violates the protocol.
        """
        requests, responses, dead_letters = [
            await topic_partitions(self._log, self._settings.topic(topic))
            for topic in (Topic.REQUESTS, Topic.RESPONSES, Topic.DEAD_LETTERS)
        ]
        async with (
            self._log.producer() as producer,
            ReplyReader(self._log, responses) as answers,
            ReplyReader(self._log, dead_letters) as letters,
        ):
            await self._send(producer, load, cycle(requests), answers, letters)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    for replies in (answers, letters):
                        while replies.pending:
                            await replies.wait_for_replies()
            except TimeoutError:
                pass  # the tally reports what is missing
        self._tally.surplus_answers = answers.late + answers.foreign
        self._tally.surplus_dead_letters = letters.late + letters.foreign

    async def _send(
        self,
        producer: Producer,
        load: Iterable[Due],
        partitions: Iterator[TopicPartition],
        answers: ReplyReader,
        letters: ReplyReader,
    ) -> None:
        batches: asyncio.Queue[SentBatch | None] = asyncio.Queue(_MAX_UNACKNOWLEDGED_BATCHES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_await_acknowledgements(batches), name="acknowledgements")
            started_s = time.monotonic()
            for due in load:
                due_s = started_s + due.at_s
                if (wait_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                by_partition: dict[TopicPartition, list[NewRecord]] = {}
                for question in due.questions:
                    self._tally.send(question)
                    correlation_id = answers.expect(partial(self._answer, question, due_s))
                    if question.dead_letter:
                        letters.expect(partial(self._dead_letter, question), correlation_id)
                    headers = [
                        *question.record.headers,
                        (HeaderName.CORRELATION_ID, correlation_id),
                    ]
                    record = question.record._replace(headers=headers)
                    by_partition.setdefault(next(partitions), []).append(record)
                for partition, records in by_partition.items():
                    for sent in await producer.send(partition, records):
                        await batches.put(sent)
            await batches.put(None)

    def _answer(self, question: Question, due_s: float, record: Record) -> None:
        answer = read_answer(record, self._file_labels)
        self._tally.answer(question, answer, due_s, time.monotonic())

    def _dead_letter(self, question: Question, record: Record) -> None:
        code = dict(record.headers)[_DEAD_LETTER_CODE] or b""
        self._tally.dead_letter(question, code.decode())


async def _await_acknowledgements(batches: asyncio.Queue[SentBatch | None]) -> None:
    """Wait for acknowledgements in their order, so that a failed one ends the demo."""
    while (sent := await batches.get()) is not None:
        await sent.acknowledged
