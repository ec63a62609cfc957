"""Sends requests and reads their answers.

In an open loop, requests are due at given times, whether earlier ones are answered or not, and
latency counts from the due time: if a pipeline stops for a second, every request due in that second
has the delay in its latency. In a closed loop, a fixed number of requests is in flight, which
measures the capacity of the pipeline.

Each request carries a correlation id of 16 bytes: eight that identify the load, and its number.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.client.replies import CORRELATION_ID
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Log, NewRecord, Producer, Record, Run, TopicPartition
from headrace.tools.bench.arrivals import PoissonArrivals
from headrace.tools.bench.measured import Measured

POLL_S = 0.05
POLL_RECORDS = 2000
SEND_CHUNK = 256
LOOKED_INTO = 8
"""Number of answers per partition and poll that are decoded for their timings."""
UNACKNOWLEDGED = 4096
LONGEST_SLEEP_S = 0.05


class Payload(NamedTuple):
    """A request that is sent repeatedly."""

    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    key: bytes | None = None


class LoadPlan(NamedTuple):
    """Target and duration of a load.

    Attributes:
        requests, responses: topics with their numbers of partitions.
        seconds: how long requests are sent.
        wait_s: how long to wait for the last answers.
        skip_s: latencies are not counted for requests due in this initial period; in a closed loop,
            for requests answered in it.
    """

    requests: TopicPartition
    responses: TopicPartition
    seconds: float
    wait_s: float = 10.0
    skip_s: float = 0.0


class Load:
    """One load; call `open_loop` or `closed_loop` once.

    Args:
        log: an open log.
        course: target and duration.
        payloads: sent in rotation.
    """

    def __init__(self, log: Log, course: LoadPlan, payloads: Sequence[Payload]) -> None:
        if not payloads:
            raise ValueError("payloads: expected at least one, got none")
        self.measured = Measured()
        self._log = log
        self._course = course
        self._payloads: Iterator[Payload] = itertools.cycle(payloads)
        self._prefix = secrets.token_bytes(8)
        self._dues_s = array("d")
        self._answered = bytearray()
        self._began_s = 0.0
        self._closed = False
        self._sending = True
        self._progress = asyncio.Event()
        self._runs: asyncio.Queue[Run | None] = asyncio.Queue(UNACKNOWLEDGED)

    async def open_loop(self, per_s: float, seed: int = 0) -> Measured:
        """Send requests as a Poisson process of this rate. Raises the log's errors."""
        return await self._run(PoissonArrivals(per_s, self._course.seconds, seed), 0)

    async def closed_loop(self, under_way: int) -> Measured:
        """Keep this many requests in flight. Raises the log's errors."""
        if under_way < 1:
            raise ValueError(f"under_way: expected 1 or more, got {under_way}")
        self._closed = True
        return await self._run(None, under_way)

    async def _run(self, arrivals: PoissonArrivals | None, under_way: int) -> Measured:
        topic, count = self._course.responses
        partitions = [TopicPartition(topic, number) for number in range(count)]
        async with self._log.producer() as producer, self._log.reader(partitions) as reader:
            await self._prepare(producer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._acknowledge(), name="bench-acknowledgements")
                reading = tasks.create_task(self._read(reader), name="bench-answers")
                self._began_s = time.monotonic()
                if arrivals is not None:
                    await self._send_open(producer, arrivals)
                else:
                    await self._send_closed(producer, under_way)
                await self._runs.put(None)
                self._sending = False
                await reading
        return self.measured

    async def _prepare(self, producer: Producer) -> None:
        """Let the producer fetch its metadata, so that no request waits for it."""
        topic, count = self._course.requests
        for number in range(count):
            await producer.send(TopicPartition(topic, number), ())

    # --- sending -----------------------------------------------------------------------------

    async def _send_open(self, producer: Producer, arrivals: PoissonArrivals) -> None:
        while (next_s := arrivals.next_s()) is not None:
            now_s = time.monotonic() - self._began_s
            if next_s > now_s:
                await asyncio.sleep(min(next_s - now_s, LONGEST_SLEEP_S))
                continue
            dues_s = arrivals.due(now_s)
            await self._send(producer, dues_s)
            handed_over_s = time.monotonic() - self._began_s
            self.measured.lateness.add([handed_over_s - due_s for due_s in dues_s])
            await asyncio.sleep(0)

    async def _send_closed(self, producer: Producer, under_way: int) -> None:
        chunk = min(under_way, SEND_CHUNK)
        while (now_s := time.monotonic() - self._began_s) < self._course.seconds:
            if self.measured.unanswered + chunk > under_way:
                self._progress.clear()
                try:
                    async with asyncio.timeout(self._course.seconds - now_s):
                        await self._progress.wait()
                except TimeoutError:
                    return
            else:
                await self._send(producer, [now_s] * chunk)

    async def _send(self, producer: Producer, dues_s: Sequence[float]) -> None:
        topic, count = self._course.requests
        shares: list[list[NewRecord]] = [[] for _ in range(count)]
        number = self.measured.sent
        for payload in itertools.islice(self._payloads, len(dues_s)):
            correlation = (CORRELATION_ID, self._prefix + number.to_bytes(8, "big"))
            shares[number % count].append(
                NewRecord(payload.key, payload.value, [*payload.headers, correlation])
            )
            number += 1
        self._dues_s.extend(dues_s)
        self._answered.extend(bytes(len(dues_s)))
        self.measured.sent = number
        for partition, records in enumerate(shares):
            if records:
                for run in await producer.send(TopicPartition(topic, partition), records):
                    await self._runs.put(run)

    async def _acknowledge(self) -> None:
        while (run := await self._runs.get()) is not None:
            await run.acknowledged

    # --- answers -----------------------------------------------------------------------------

    async def _read(self, reader: Consumer) -> None:
        give_up_s = float("inf")
        while self._sending or self.measured.unanswered:
            try:
                polled = await reader.poll(POLL_S, POLL_RECORDS)
            except OffsetOutOfRange as error:  # retention is shorter than we are slow
                for partition, begin in (
                    await reader.beginning_offsets(list(error.positions))
                ).items():
                    reader.seek(partition, begin)
                continue
            now_s = time.monotonic() - self._began_s
            for records in polled.values():
                self._take(records, now_s)
            if polled:
                self._progress.set()
            if not self._sending and give_up_s == float("inf"):
                give_up_s = now_s + self._course.wait_s
            if now_s > give_up_s:
                return

    def _take(self, records: Sequence[Record], now_s: float) -> None:
        measured, prefix, answered = self.measured, self._prefix, self._answered
        latencies_s: list[float] = []
        seen: list[tuple[Record, float]] = []
        for record in records:
            number = _number(record, prefix)
            if number is None or number >= len(answered):
                continue
            if answered[number]:
                measured.duplicates += 1
                continue
            answered[number] = 1
            measured.answered += 1
            due_s = self._dues_s[number]
            measured.statuses[_status(record)] += 1
            if (now_s if self._closed else due_s) >= self._course.skip_s:
                latencies_s.append(now_s - due_s)
                if len(seen) < LOOKED_INTO:
                    seen.append((record, now_s - due_s))
        if latencies_s:
            measured.latency.add(latencies_s)
            measured.counted += len(latencies_s)
            measured.seconds = now_s - self._course.skip_s
        measured.look_into(seen)


def _number(record: Record, prefix: bytes) -> int | None:
    """Return the number of our request that a record answers."""
    for name, value in record.headers:
        if name == CORRELATION_ID and value is not None and value.startswith(prefix):
            return int.from_bytes(value[8:], "big")
    return None


def _status(record: Record) -> str:
    for name, value in record.headers:
        if name == "x-status" and value is not None:
            return value.decode(errors="replace")
    return ""
