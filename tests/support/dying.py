"""Pipelines that a record ends, and a parent that starts them again, all in one process.

A `Fatal` from a backend, such as an error of a device, ends its pipeline at once: nothing is
drained, committed or marked as clean, just as if the process had died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from headrace.config import Settings
from headrace.errors import Fatal
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record, TopicPartition
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage, Topic
from headrace.tuning import TUNING, Tuning
from tests.support.claim_store import StandInStore
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Grouping
from tests.support.python_models import add_python_model

POISON = 666.0
MOST_RESTARTS = 40

FATAL = """
from tests.support.dying import Deadly
if (x == 666.0).any():
    return {"y": x.view(Deadly)}
"""


def _end_pipeline(_: object) -> NoReturn:
    raise Fatal("a record has ended this process")


class Deadly(np.ndarray):
    """An output whose check raises `Fatal` inside the backend.

    What a model itself raises is only its request's failure.
    """

    shape: Any = property(_end_pipeline)


def add_dying_model(repository: Path, run: str = FATAL, config: str = "") -> None:
    """A model that doubles `x`, and ends its process when `x` is `POISON`."""
    add_python_model(repository, run, config=f"max_batch_size = 8\n{config}")


def number_value(x: float, id: str, model: str = "model") -> bytes:
    """A request for that model."""
    return encode_request("application/msgpack", model, {"x": np.array([[x]], np.float32)}, id=id)


async def send_numbers(settings: Settings, log: MemoryLog, numbers: Sequence[float]) -> None:
    """One request for each number, with its place as id, over all partitions in turn."""
    values = [number_value(number, str(place)) for place, number in enumerate(numbers)]
    await send_values(settings, log, values)


async def send_values(settings: Settings, log: MemoryLog, values: Sequence[bytes]) -> None:
    """Send requests over all partitions in turn."""
    topic = settings.topic(Topic.REQUESTS)
    async with log.producer() as producer:
        for place, value in enumerate(values):
            record = NewRecord(None, value, ())
            for sent in await producer.send(TopicPartition(topic, place % PARTITIONS), [record]):
                await sent.acknowledged


async def send_claims(
    settings: Settings, log: MemoryLog, store: StandInStore, numbers: Sequence[float]
) -> None:
    """The same requests as those of `send_numbers`, with their values in a store."""
    topic = settings.topic(Topic.REQUESTS)
    async with log.producer() as producer:
        for place, number in enumerate(numbers):
            claim = store.put(f"/{place}", number_value(number, str(place)))
            name = str(place).encode()
            headers = [("x-model", b"model"), ("x-claim", claim), ("kafka_correlationId", name)]
            target = TopicPartition(topic, place % PARTITIONS)
            for sent in await producer.send(target, [NewRecord(None, None, headers)]):
                await sent.acknowledged


async def records_of(settings: Settings, log: MemoryLog, topic: Topic) -> list[Record]:
    """All that a topic holds."""
    name = settings.topic(topic)
    partitions = [TopicPartition(name, number) for number in range(PARTITIONS)]
    found: list[Record] = []
    async with log.reader(partitions) as reader:
        ends = await reader.end_offsets(partitions)
        for partition in partitions:
            reader.seek(partition, 0)
        # Transaction markers have offsets as well: what is there cannot be counted by them.
        while any([await reader.position(each) < ends[each] for each in partitions]):
            for records in (await reader.poll(0.1, 1000)).values():
                found += records
    return found


async def outcomes(settings: Settings, log: MemoryLog) -> dict[int, set[str | float]]:
    """Return each request's answer by its place: a number, or the code of an error."""
    found: dict[int, set[str | float]] = {}
    for record in await records_of(settings, log, Topic.RESPONSES):
        answer = decode_response(record.headers, record.value)
        if isinstance(answer, Answer):
            outcome: str | float = float(answer.outputs["y"][0, 0])
        else:
            outcome = str(answer.error_details.code)
        name = dict(record.headers).get("kafka_correlationId") or (answer.id or "-1").encode()
        found.setdefault(int(name), set()).add(outcome)
    return found


async def restart_until(
    done: Callable[[], Awaitable[bool]],
    settings: Settings,
    log: MemoryLog,
    grouping: Grouping,
    strike: Callable[[Lives], Awaitable[None]] | None = None,
    tuning: Tuning = TUNING,
) -> int:
    """Run a pipeline for each group of stages, and another whenever one ends by itself, until
    `done`; then drain them.

    With `strike` other things go wrong meanwhile.

    Returns:
        How often one was started again.
    """
    lives = Lives(settings, log, tuning)
    stops = [Stop() for _ in grouping]
    async with asyncio.TaskGroup() as tasks:
        for stages, stop in zip(grouping, stops, strict=True):
            tasks.create_task(lives.live(stages, stop), name=f"restart {stages}")
        if strike is not None:
            await strike(lives)
        await eventually(done, recheck_s=0.05)
        for stop in stops:
            stop.request()
    return lives.restarts


class Lives:
    """Pipelines that are started again when they end.

    Attributes:
        restarts: how often one was.
    """

    def __init__(self, settings: Settings, log: MemoryLog, tuning: Tuning = TUNING) -> None:
        self._settings = settings
        self._tuning = tuning
        self._log = log
        self.restarts = 0

    async def restarted(self, times: int) -> None:
        """Wait until so many have been started again."""
        await eventually(lambda: self.restarts >= times)

    async def live(self, stages: Sequence[Stage], stop: Stop) -> None:
        """Run one process after the other, until asked to stop."""
        while not stop.requested.is_set():
            pipeline = Pipeline(self._settings, self._log, stages, tuning=self._tuning)
            serving = asyncio.create_task(pipeline.run(stop), name="pipeline")
            await asyncio.wait([serving])
            if serving.exception() is not None:
                self.restarts += 1
                assert self.restarts <= MOST_RESTARTS


FUSED = tuple(Stage)
