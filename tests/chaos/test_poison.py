"""A model that kills its process on one certain input, under load, beside other kills."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.errors import Code
from headrace.protocol.codec import Answer, decode_response
from headrace.tools.local_kafka import LocalKafka
from tests.support.dying import POISON, add_dying_model, number_value
from tests.support.processes import create_topics, environment
from tests.support.restarting import Restarting

PARTITIONS = 4
FUSED = "ingest,batcher,executor,responder"

ABORTS = """
import os
if (x == 666.0).any():
    os.abort()
"""


HOLDS_THE_LOCK = """
import ctypes
if (x == 666.0).any():
    ctypes.PyDLL(None).sleep(1000)
"""
IGNORES_CANCEL = """
while (x == 666.0).any():
    time.sleep(0.1)
"""


class Outcomes:
    """Answers of the requests, and the dead letters, as they come."""

    def __init__(self, answers: AIOKafkaConsumer, letters: AIOKafkaConsumer) -> None:
        self._answers = answers
        self._letters = letters
        self.answered: dict[int, set[str | float]] = {}
        self.count = 0

    async def read(self) -> None:
        """Return the records that have come since."""
        polled = await self._answers.getmany(timeout_ms=200)
        for record in [record for records in polled.values() for record in records]:
            answer = decode_response(record.headers, record.value)
            if isinstance(answer, Answer):
                outcome: str | float = float(answer.outputs["y"][0, 0])
            else:
                outcome = str(answer.error_details.code)
            self.count += 1
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
            bootstrap_servers=bootstrap_servers,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
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


class Deaths(NamedTuple):
    """How a model ends its process on the poison, and under which settings.

    Attributes:
        kills: how often the process is killed from outside besides.
    """

    run: str
    requests: int
    kills: int = 0
    config: str = ""
    stages: tuple[str, ...] = (FUSED,)
    settings: Mapping[str, str] = MappingProxyType({})


DEATHS = {
    "aborts-apart": Deaths(
        ABORTS, 1_000, kills=1, stages=("ingest,batcher", "executor", "responder")
    ),
    "aborts-in-two-processes-exactly-once": Deaths(
        ABORTS,
        1_000,
        kills=1,
        stages=(FUSED, FUSED),
        settings={"DELIVERY__GUARANTEE": "exactly_once"},
    ),
    "holds-the-interpreter-lock": Deaths(
        HOLDS_THE_LOCK, 500, settings={"LIMITS__MAX_STALL_S": "1.5"}
    ),
    "ignores-that-it-is-cancelled": Deaths(
        IGNORES_CANCEL, 20, config="max_execution_s = 0.5", settings={"DELIVERY__MAX_ATTEMPTS": "1"}
    ),
}


def tell(deaths: Deaths, processes: list[Restarting], took_s: float) -> None:
    """Print the figures that were measured."""
    restarts = sum(process.restarts for process in processes)
    killed = sum(process.killed for process in processes)
    print(  # noqa: T201 - it is to be seen
        f"\none culprit among {deaths.requests}: {restarts} restarts in {took_s:.1f} s, "
        f"{killed} of them killed from outside"
    )
    for process in processes:
        print("  ", process.stages, "; ".join(process.lives))  # noqa: T201 - see above


@pytest.mark.timeout(180)
@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS.keys())
async def test_poison_record_under_random_kills_becomes_dead_letter(
    kafka: LocalKafka,
    unique_name: str,
    tmp_path: Path,
    deaths: Deaths,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All others are answered rightly, while the processes are killed from outside as well."""
    random = Random(unique_name)
    models = tmp_path / "models"
    add_dying_model(models, deaths.run, deaths.config)
    settings = environment(kafka.bootstrap_servers, unique_name, models, **deaths.settings)
    await create_topics(settings)
    poison = random.randrange(deaths.requests)
    numbers = [float(place % 500) for place in range(deaths.requests)]
    numbers[poison] = POISON

    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(outcomes(kafka.bootstrap_servers, unique_name))
        processes = [
            await stack.enter_async_context(Restarting(each, settings, tmp_path / f"{number}"))
            for number, each in enumerate(deaths.stages)
        ]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        sending = produce(kafka.bootstrap_servers, f"{unique_name}.requests", numbers)
        tasks.create_task(sending, name="produce")
        kill_at_s = sorted(began_s + random.uniform(3, 12) for _ in range(deaths.kills))
        async with asyncio.timeout(150):
            while len(found.answered) < deaths.requests:
                await found.read()
                if kill_at_s and time.monotonic() >= kill_at_s[0]:
                    kill_at_s.pop(0)
                    random.choice(processes).kill()
        took_s = time.monotonic() - began_s
        letters = await found.dead_letters()

    with capsys.disabled():
        tell(deaths, processes, took_s)
    assert found.answered.pop(poison) == {Code.MODEL_FAILED}
    assert found.answered == {
        place: {2 * number} for place, number in enumerate(numbers) if place != poison
    }
    if "DELIVERY__GUARANTEE" in deaths.settings:
        assert found.count == deaths.requests
    assert letters == [number_value(POISON, str(poison))]
