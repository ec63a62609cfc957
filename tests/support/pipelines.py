"""Whole pipelines on one embedded log: topics, models, a caller, and groupings of stages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, NewRecord, Record, TopicPartition
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import STAGES, Stage, Topic
from headrace.tuning import Tuning
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.tuning import EAGER

PARTITIONS = 4
Grouping = Sequence[Sequence[Stage]]


def groupings() -> list[Grouping]:
    """Every way to cut the four stages into processes of neighbours."""
    found: list[Grouping] = []
    for cuts in range(2 ** (len(STAGES) - 1)):
        groups: list[list[Stage]] = [[STAGES[0]]]
        for place, stage in enumerate(STAGES[1:]):
            if cuts >> place & 1:
                groups.append([stage])
            else:
                groups[-1].append(stage)
        found.append([tuple(group) for group in groups])
    return found


def name_of(grouping: Grouping) -> str:
    """Name a grouping as on the command line: `ingest,batcher+executor,responder`."""
    return "+".join(",".join(group) for group in grouping)


def settings_of(repository: Path, **limits: Any) -> Settings:
    """Settings with `digits` in the repository."""
    if not (repository / "digits").exists():
        add_version(repository, "digits", 1, digits())
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": repository},
            "limits": limits,
        }
    )


async def log_for(settings: Settings, request_timeout_s: float = 5.0) -> MemoryLog:
    """An embedded log with all topics."""
    log = MemoryLog(request_timeout_s=request_timeout_s)
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    return log


@asynccontextmanager
async def serving(
    settings: Settings, log: Log, grouping: Grouping, tuning: Tuning = EAGER
) -> AsyncIterator[list[Pipeline]]:
    """A pipeline for each group of stages, ready; drained when the context is left.

    They end all at once, as processes do that an operator stops together.
    """
    async with AsyncExitStack() as stack:
        contexts = [running(Pipeline(settings, log, stages, tuning=tuning)) for stages in grouping]
        pipelines = await asyncio.gather(*[context.__aenter__() for context in contexts])

        async def end(*error: Any) -> None:
            await asyncio.gather(*[context.__aexit__(*error) for context in contexts])

        stack.push_async_exit(end)
        yield list(pipelines)


def digits_request(id: str, value: float = 0.0, version: str | None = None) -> bytes:
    """The value of a request for `digits`, whose pixels all have this value."""
    inputs = {"pixels": np.full((1, 64), value, np.float32)}
    return encode_request("application/msgpack", "digits", inputs, id=id, version=version)


class Caller:
    """Sends numbered requests for `digits` and collects what is answered.

    Args:
        version: named by each request; None: they name none.
    """

    def __init__(self, settings: Settings, log: MemoryLog, version: str | None = None) -> None:
        self._settings = settings
        self._log = log
        self._version = version
        self.sent = 0

    async def send(self, count: int) -> None:
        """Requests whose sum of pixels is 64 times their number."""
        topic = self._settings.topic(Topic.REQUESTS)
        async with self._log.producer() as producer:
            for number in range(self.sent, self.sent + count):
                value = digits_request(str(number), number, self._version)
                record = NewRecord(b"key", value, [("kafka_correlationId", str(number).encode())])
                target = TopicPartition(topic, number % PARTITIONS)
                for sent in await producer.send(target, [record]):
                    await sent.acknowledged
        self.sent += count

    async def answers(self) -> list[Record]:
        """All that `responses` holds."""
        topic = self._settings.topic(Topic.RESPONSES)
        names = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        found: list[Record] = []
        async with self._log.reader(names) as reader:
            for name in names:
                reader.seek(name, 0)
            # Markers of transactions have offsets too, and are no records.
            for name, end in (await reader.end_offsets(names)).items():
                while await reader.position(name) < end:
                    for records in (await reader.poll(0.1, 1000)).values():
                        found += records
        return found

    def answered(self) -> int:
        """How many answers there are."""
        topic = self._settings.topic(Topic.RESPONSES)
        return sum(
            self._log.faults.partitions.end_offset(TopicPartition(topic, number))
            for number in range(PARTITIONS)
        )

    async def all_answered(self, deadline_s: float = 30.0) -> None:
        """Wait until there are as many answers as requests."""
        try:
            await eventually(lambda: self.answered() >= self.sent, deadline_s=deadline_s)
        except AssertionError:
            raise AssertionError(
                f"{self.answered()} answers to {self.sent} requests after {deadline_s} s"
            ) from None

    async def check(self) -> Counter[int]:
        """Every answer is right; returns how often each request was answered."""
        numbers: Counter[int] = Counter()
        for record in await self.answers():
            answer = decode_response(record.headers, record.value)
            assert isinstance(answer, Answer), answer
            number = int(answer.id or -1)
            expected = np.arange(10, dtype=np.float32) * 64 * number
            np.testing.assert_allclose(answer.outputs["scores"][0], expected, rtol=1e-4)
            assert dict(record.headers)["kafka_correlationId"] == str(number).encode()
            numbers[number] += 1
        return numbers
