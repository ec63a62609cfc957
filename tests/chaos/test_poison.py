"""A model that kills its process on one certain input, under load, beside other kills."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.codec import Answer, decode_response
from headrace.errors import Code
from headrace.local_kafka import LocalKafka
from tests.support.dying import POISON, add_dying_model, number_value
from tests.support.processes import environment, headrace
from tests.support.restarting import Restarting

COUNT = 10_000
PARTITIONS = 4
FUSED = "ingest,batcher,executor,responder"
KILLS = 3

ABORTS = """
import os
if (x == 666.0).any():
    os.abort()
"""


class Outcomes:
    """What each request was answered, and what was kept as a dead letter, as it comes."""

    def __init__(self, answers: AIOKafkaConsumer, letters: AIOKafkaConsumer) -> None:
        self._answers = answers
        self._letters = letters
        self.answered: dict[int, set[str | float]] = {}

    async def read(self) -> None:
        """What has come since."""
        polled = await self._answers.getmany(timeout_ms=200)
        for record in [record for records in polled.values() for record in records]:
            answer = decode_response(record.headers, record.value)
            if isinstance(answer, Answer):
                outcome: str | float = float(answer.outputs["y"][0, 0])
            else:
                outcome = str(answer.error_details.code)
            self.answered.setdefault(int(answer.id or -1), set()).add(outcome)

    async def dead_letters(self) -> list[bytes]:
        """The values of all."""
        polled = await self._letters.getmany(timeout_ms=1000)
        return [record.value for records in polled.values() for record in records]


@asynccontextmanager
async def outcomes(bootstrap_servers: str, namespace: str) -> AsyncIterator[Outcomes]:
    """Readers of a namespace's answers and dead letters, from the beginning."""
    async with (
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
        ) as answers,
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
        ) as letters,
    ):
        for consumer, topic in ((answers, "responses"), (letters, "dead-letters")):
            consumer.assign(
                [TopicPartition(f"{namespace}.{topic}", number) for number in range(PARTITIONS)]
            )
        yield Outcomes(answers, letters)


async def produce(bootstrap_servers: str, topic: str, numbers: list[float]) -> None:
    """All of them within a few seconds, in turn over the partitions."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers, linger_ms=5) as producer:
        for place, number in enumerate(numbers):
            value = number_value(number, str(place))
            await producer.send(topic, value, partition=place % PARTITIONS)
            if place % 100 == 99:
                await asyncio.sleep(0.02)


@pytest.mark.timeout(180)
async def test_the_one_that_aborts_is_a_dead_letter_and_all_others_are_answered(
    kafka: LocalKafka, unique_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten thousand requests, one `os.abort()`, a few kills from outside: one dead letter."""
    random = Random(unique_name)
    models = tmp_path / "models"
    add_dying_model(models, ABORTS)
    settings = environment(kafka.bootstrap_servers, unique_name, models)
    await headrace(["topics", "create"], settings)
    poison = random.randrange(COUNT)
    numbers = [POISON if place == poison else float(place % 500) for place in range(COUNT)]

    began_s = time.monotonic()
    async with (
        outcomes(kafka.bootstrap_servers, unique_name) as found,
        Restarting(FUSED, settings, tmp_path / "output") as process,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(
            produce(kafka.bootstrap_servers, f"{unique_name}.requests", numbers), name="produce"
        )
        kill_at_s = [began_s + random.uniform(3, 12) for _ in range(KILLS)]
        async with asyncio.timeout(150):
            while len(found.answered) < COUNT:
                await found.read()
                if kill_at_s and time.monotonic() >= min(kill_at_s):
                    kill_at_s.remove(min(kill_at_s))
                    process.kill()
        took_s = time.monotonic() - began_s
        letters = await found.dead_letters()

    with capsys.disabled():
        print(  # noqa: T201 - the measurement is to be seen
            f"\none culprit among {COUNT}: {process.restarts} restarts in {took_s:.1f} s, "
            f"{process.killed} of them killed from outside"
        )
    assert found.answered.pop(poison) == {Code.MODEL_FAILED}
    assert found.answered == {
        place: {2 * number} for place, number in enumerate(numbers) if place != poison
    }
    assert letters == [number_value(np.float32(POISON).item(), str(poison))]
