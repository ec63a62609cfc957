"""A load on an embedded log, answered by a loop that the test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record, TopicInfo, TopicPartition
from headrace.tools.bench.load import Load, LoadPlan, LoadRequest
from tests.support.conditions import eventually

REQUESTS, RESPONSES = TopicPartition("requests", 2), TopicPartition("responses", 2)
PLAN = LoadPlan(REQUESTS, RESPONSES, seconds=0.4, wait_s=5.0)


class Answering:
    """Copies requests to answers, once `open` is set; `drop` and `twice` name requests by turn."""

    def __init__(self, log: MemoryLog, *, drop: int = -1, twice: int = -1) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.seen: list[Record] = []
        self._log = log
        self._drop = drop
        self._twice = twice

    async def run(self) -> None:
        """Answer requests until cancelled."""
        partitions = [TopicPartition("requests", number) for number in range(2)]
        async with self._log.reader(partitions) as reader, self._log.producer() as producer:
            for partition in partitions:
                reader.seek(partition, 0)
            while True:
                polled = await reader.poll(0.05, 100)
                await self.open.wait()
                for partition, records in polled.items():
                    answers: list[NewRecord] = []
                    for record in records:
                        number = len(self.seen)
                        self.seen.append(record)
                        headers = [*record.headers, ("x-status", b"ok")]
                        answer = NewRecord(None, b"\x80", headers)
                        answers += [answer] * (1 + (number == self._twice) - (number == self._drop))
                    await producer.send(TopicPartition("responses", partition.partition), answers)


@asynccontextmanager
async def answering(drop: int = -1, twice: int = -1) -> AsyncIterator[tuple[MemoryLog, Answering]]:
    """A log with somebody who answers."""
    async with MemoryLog() as log:
        topics = [TopicInfo(name, count, {}) for name, count in (REQUESTS, RESPONSES)]
        await log.create_topics(topics, replication_factor=1)
        answers = Answering(log, drop=drop, twice=twice)
        task = asyncio.create_task(answers.run(), name="answering")
        try:
            yield log, answers
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_load_counts_every_request_once() -> None:
    """Sent, answered, by status, and in the histogram; payloads take turns with their headers."""
    async with answering(twice=3) as (log, answers):
        payloads = [LoadRequest(b"one", (("x-tenant", b"a"),)), LoadRequest(b"two", key=b"k")]
        measured = await Load(log, PLAN, payloads).open_loop(500.0)

    assert measured.sent == measured.answered == measured.counted == len(measured.latency)
    assert measured.sent == len(answers.seen) > 50
    assert measured.statuses == {"ok": measured.sent}
    assert measured.duplicates == 1
    assert {(record.value, record.key) for record in answers.seen} == {
        (b"one", None),
        (b"two", b"k"),
    }


async def test_load_counts_stall_in_latency_of_every_due_request() -> None:
    """Latency counts from the due time, and requests go on being sent: no omission."""
    async with answering() as (log, answers):
        answers.open.clear()
        asyncio.get_running_loop().call_later(0.4, answers.open.set)
        measured = await Load(log, PLAN, [LoadRequest(b"")]).open_loop(500.0)

    # Due evenly over 0.4 s in which nothing was answered: half of them waited 0.2 s and more.
    assert measured.latency.percentile_s(50) > 0.15
    assert measured.unanswered == 0


async def test_load_waits_for_missing_answer_and_reports_it() -> None:
    """The load waits up to the given time, and then counts the request as unanswered."""
    async with answering(drop=0) as (log, _):
        plan = PLAN._replace(wait_s=0.1)
        measured = await Load(log, plan, [LoadRequest(b"")]).open_loop(300.0)

    assert measured.unanswered == 1


async def test_closed_load_keeps_constant_number_in_flight() -> None:
    """A closed loop never sends more than its number, and sends again for each answer."""
    async with answering() as (log, answers):
        answers.open.clear()
        load = Load(log, PLAN, [LoadRequest(b"")])
        running = asyncio.create_task(load.closed_loop(8), name="load")
        await eventually(lambda: load.measured.sent >= 8)
        sent = load.measured.sent
        answers.open.set()
        measured = await running

    assert sent == 8
    assert measured.sent > 8
    assert measured.unanswered == 0


async def test_closed_load_goes_on_while_one_answer_is_missing() -> None:
    """Each answer lets a further request be sent; none waits until all are answered."""
    async with answering(drop=0) as (log, _):
        plan = PLAN._replace(wait_s=0.1)
        measured = await Load(log, plan, [LoadRequest(b"")]).closed_loop(8)

    assert measured.unanswered == 1
    assert measured.sent > 8


async def test_invalid_loads_are_refused() -> None:
    """A load without requests, or with none in flight, is refused."""
    async with answering() as (log, _):
        with pytest.raises(ValueError, match="at least one"):
            Load(log, PLAN, [])
        with pytest.raises(ValueError, match="1 or more"):
            await Load(log, PLAN, [LoadRequest(b"")]).closed_loop(0)
