"""Measurement of event loop turns on a running pipeline: n requests at once, repeatedly, with
nothing else to do in between.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import cycle
from statistics import median
from typing import NamedTuple

import msgspec

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Consumer, Log, NewRecord, Producer, TopicPartition
from headrace.tools.replay.opening import open_recording
from headrace.tools.replay.selection import Selection
from headrace.tools.replay.service_times import fitted
from headrace.tools.replay.simulated_loop import LoopTime, apart_from_stalls
from headrace.topics import Topic

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TURNS = 150
"""Turns per size: six seconds, of which the loop works for two."""
WARM_UP_TURNS = 40
FREEZE_AFTER_TURNS = 50
"""Number of turns after which the embedded log's records are frozen out of garbage collection: with
a broker they would not be objects of this process, and traversing them takes long.
"""
LOOK_EVERY_S = 0.003
ANSWER_DEADLINE_S = 30.0


class _Parameters(msgspec.Struct):
    queue_us: int
    batch_us: int
    compute_us: int


class _Answer(msgspec.Struct):
    parameters: _Parameters


_decode = msgspec.msgpack.Decoder(_Answer).decode


class MeasuredTurns(NamedTuple):
    """Measured turns, in order of time.

    Attributes:
        answered_us: for each turn its size, and the median latency reported by its answers.
        busy_us: for each turn its size, and the processor time of the event loop's thread for all
            work on its requests, from writing them to the embedded log to acknowledging their ack
            handles.
    """

    answered_us: list[tuple[int, float]]
    busy_us: list[tuple[int, float]]

    def and_then(self, later: MeasuredTurns) -> MeasuredTurns:
        """Return these turns followed by later ones."""
        return MeasuredTurns(self.answered_us + later.answered_us, self.busy_us + later.busy_us)

    def loop_time(self) -> LoopTime:
        """Return T(n) and U(n), and the delays of turns."""
        free, stalls = apart_from_stalls(self.answered_us)
        return LoopTime(fitted(free), fitted(self.busy_us), stalls)


async def measure_turns(log: Log, settings: Settings, values: Sequence[bytes]) -> MeasuredTurns:
    """Measure turns with requests of these values, in MessagePack, to one model.

    Objects that exist meanwhile are excluded from garbage collection for the rest of the process,
    which is expected to measure and then end.

    Args:
        log: an empty embedded log, served by a pipeline in this process.
        settings: of that pipeline.
        values: of request records.

    Raises:
        ConfigurationError: a request was not answered, or failed.
    """
    turns = cycle(values)
    busy_us: list[tuple[int, float]] = []
    partitions = _partitions(settings, Topic.RESPONSES)
    async with log.producer() as producer, log.reader(partitions) as reader:
        sent = 0
        for size in _sizes():
            began_s = time.thread_time()
            await _send(producer, settings, [next(turns) for _ in range(size)])
            sent += size
            looking_s = await _answered(reader, partitions, sent)
            # Pending acknowledgements belong to this turn, and must not delay the next one.
            await asyncio.sleep(LOOK_EVERY_S)
            busy_us.append((size, 1e6 * (time.thread_time() - began_s - looking_s)))
            if len(busy_us) % FREEZE_AFTER_TURNS == 0:
                gc.freeze()
    answered_us = await _told(log, settings, [size for size, _ in busy_us])
    return MeasuredTurns(answered_us[WARM_UP_TURNS:], busy_us[WARM_UP_TURNS:])


def _sizes() -> Iterator[int]:
    """Yield sizes round-robin, so that a temporary slowdown affects all sizes equally."""
    yield from (1,) * WARM_UP_TURNS
    for _ in range(TURNS):
        yield from SIZES


def _partitions(settings: Settings, topic: Topic) -> list[TopicPartition]:
    name = settings.topic(topic)
    return [TopicPartition(name, number) for number in range(settings.topics.partitions)]


async def _send(producer: Producer, settings: Settings, values: Sequence[bytes]) -> None:
    """Send the requests at once, spread over the partitions."""
    for target, value in zip(cycle(_partitions(settings, Topic.REQUESTS)), values, strict=False):
        await producer.send(target, [NewRecord(None, value)])


async def _answered(reader: Consumer, partitions: Sequence[TopicPartition], count: int) -> float:
    """Wait for `count` answers. Returns the processor time of polling, in seconds."""
    give_up_s = time.monotonic() + ANSWER_DEADLINE_S
    looking_s = 0.0
    while True:
        began_s = time.thread_time()
        answered = sum((await reader.end_offsets(partitions)).values())
        looking_s += time.thread_time() - began_s
        if answered >= count:
            return looking_s
        if time.monotonic() > give_up_s:
            raise ConfigurationError(
                f"expected {count} answers within {ANSWER_DEADLINE_S:g} s, to measure the event "
                "loop, got fewer"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def _told(log: Log, settings: Settings, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Return each turn's size and the median of its answers' latencies, in microseconds."""
    partitions = len(_partitions(settings, Topic.RESPONSES))
    latencies_us: dict[int, list[int]] = {number: [] for number in range(partitions)}
    topic = settings.topic(Topic.RESPONSES)
    async with (
        open_recording(log, topic, Selection()) as answers,
        aclosing(answers.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                try:
                    said = _decode(record.value or b"").parameters
                except msgspec.MsgspecError as error:
                    raise ConfigurationError(
                        f"{topic}: expected an answer with its times, to measure the event "
                        f"loop, got {error}"
                    ) from error
                latency_us = said.queue_us + said.batch_us + said.compute_us
                latencies_us[record.partition].append(latency_us)
    taken = {number: iter(each) for number, each in latencies_us.items()}
    return [
        (size, float(median(next(taken[place % partitions]) for place in range(size))))
        for size in sizes
    ]
