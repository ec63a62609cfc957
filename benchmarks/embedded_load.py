"""Open-loop load on a pipeline with the embedded log in this process."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import cycle
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.ticking import TICK_BYTES
from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, NewRecord, Record, TopicPartition
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.replay.jobs import open_recording
from headrace.tools.replay.recording import Selection
from headrace.topics import Topic

PARTITIONS = 4
ANSWER_DEADLINE_S = 120.0
LOOK_EVERY_S = 0.05
KEPT_BYTES = 1 << 34
"""Retention of a partition, large enough to read a whole run afterwards."""
FREEZE_EVERY_S = 0.5
"""Interval at which the records of the embedded log are hidden from the garbage collector. With a
broker they would not be objects of this process, and scanning them takes long.
"""


class LoadStep(NamedTuple):
    """One load: its share of the capacity, rate, duration and seed."""

    share: float
    per_s: float
    seconds: float
    seed: int


@asynccontextmanager
async def running_pipeline(settings: Settings) -> AsyncIterator[Log]:
    """Yield an empty log, and run a pipeline that serves it."""
    async with MemoryLog(retention_bytes=KEPT_BYTES) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)):
            yield log


async def send_load(
    log: Log, settings: Settings, values: Sequence[bytes], load: LoadStep, due: list[int]
) -> None:
    """Send a request at each tick, and append the due times in epoch microseconds to `due`."""
    command = ("-m", "benchmarks.ticking", str(load.per_s), str(load.seconds), str(load.seed))
    ticking = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    assert ticking.stdout is not None
    topic, turns = settings.topic(Topic.REQUESTS), cycle(values)
    rest, freeze_s = b"", time.monotonic()
    async with log.producer() as producer:
        while ticks := await ticking.stdout.read(1 << 16):
            if time.monotonic() >= freeze_s:
                gc.freeze()
                freeze_s = time.monotonic() + FREEZE_EVERY_S
            ticks = rest + ticks
            whole = len(ticks) // TICK_BYTES * TICK_BYTES
            ticks, rest = ticks[:whole], ticks[whole:]
            for due_us in np.frombuffer(ticks, "<i8").tolist():
                target = TopicPartition(topic, len(due) % PARTITIONS)
                due.append(due_us)
                await producer.send(target, [NewRecord(None, next(turns), (), due_us // 1000)])
    await ticking.wait()


async def wait_for_answers(log: Log, settings: Settings, count: int) -> None:
    """Wait until the log holds `count` answers. Raises `TimeoutError`."""
    give_up_s = time.monotonic() + ANSWER_DEADLINE_S
    while await count_records(log, settings, Topic.RESPONSES) < count:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"{count} requests, and not all are answered")
        await asyncio.sleep(LOOK_EVERY_S)


async def count_records(log: Log, settings: Settings, topic: Topic) -> int:
    """Return the number of records written to a topic."""
    name = settings.topic(topic)
    partitions = [TopicPartition(name, number) for number in range(PARTITIONS)]
    async with log.reader(partitions) as reader:
        return sum((await reader.end_offsets(partitions)).values())


async def reported_latencies_us(log: Log, settings: Settings, skipped: int) -> NDArray[np.int64]:
    """Return the times from reading a request until its answer was encoded, as the answers report
    them, without the first `skipped` ones.
    """
    found: list[int] = []
    async with _answers(log, settings) as records:
        async for record in records:
            said = msgspec.msgpack.decode(record.value or b"")["parameters"]
            found.append(said["queue_us"] + said["compute_us"] + said["batch_us"])
    return np.array(found[skipped:], dtype=np.int64)


@asynccontextmanager
async def _answers(log: Log, settings: Settings) -> AsyncIterator[AsyncIterator[Record]]:
    async with (
        open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers,
        aclosing(answers.chunks()) as chunks,
    ):
        yield (record async for chunk in chunks for record in chunk)
