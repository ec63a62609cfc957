"""Send requests at a rate or at a number in flight, and measure their answers.

In an open loop, requests are due at given times, whether earlier ones are answered or not, and
latency counts from the due time: if a pipeline stops for a second, every request due in that second
has the delay in its latency. In a closed loop, a fixed number of requests is in flight, which
measures the capacity of the pipeline.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from headrace.client.rpc import ReplyReader, last_header
from headrace.log.port import Log, NewRecord, Producer, Record, SentBatch, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.bench.measured import LoadResult

# --- arrivals ------------------------------------------------------------------------------------


CHUNK = 1024


class PoissonArrivals:
    """Due times of independent callers, which do not wait for each other's answers.

    Args:
        per_s: average rate per second.
        seconds: duration.
        seed: equal seeds give equal times.

    Raises:
        ValueError: the rate is not a positive number.
    """

    def __init__(self, per_s: float, seconds: float, seed: int = 0) -> None:
        if not (per_s > 0 and math.isfinite(per_s)):
            raise ValueError(
                f"rate: expected a positive number of requests per second, got {per_s}"
            )
        self._per_s = per_s
        self._seconds = seconds
        self._random = np.random.default_rng(seed)
        self._last_s = 0.0
        self._pending: list[float] = []
        self._next = 0
        self._ended = False

    def due(self, now_s: float, most: float = math.inf) -> list[float]:
        """Return the due times up to now that were not returned yet, in seconds from the beginning:
        the first ones, if they are more than `most`.
        """
        taken: list[float] = []
        while len(taken) < most and (next_s := self.next_s()) is not None and next_s <= now_s:
            taken.append(next_s)
            self._next += 1
        return taken

    def next_s(self) -> float | None:
        """Return the next due time; None if there are no more."""
        if self._next >= len(self._pending) and not self._ended:
            self._draw()
        return self._pending[self._next] if self._next < len(self._pending) else None

    def _draw(self) -> None:
        gaps = self._random.exponential(1 / self._per_s, CHUNK)
        times = self._last_s + np.cumsum(gaps)
        self._last_s = float(times[-1])
        self._ended = self._last_s > self._seconds
        self._pending = times[times <= self._seconds].tolist()
        self._next = 0


# --- the load ------------------------------------------------------------------------------------


SEND_CHUNK = 256
DECODED_PER_ROUND = 8
"""Number of answers per round of reading that are decoded for their timings."""
MAX_UNACKNOWLEDGED_BATCHES = 4096
LONGEST_SLEEP_S = 0.05


class LoadRequest(NamedTuple):
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
        plan: target and duration.
        payloads: sent in rotation.
    """

    def __init__(self, log: Log, plan: LoadPlan, payloads: Sequence[LoadRequest]) -> None:
        if not payloads:
            raise ValueError("payloads: expected at least one, got none")
        self.measured = LoadResult()
        self._plan = plan
        self._payloads: Iterator[LoadRequest] = itertools.cycle(payloads)
        self._log = log
        topic, count = plan.responses
        self._replies = ReplyReader(log, [TopicPartition(topic, each) for each in range(count)])
        self._latencies_s: list[float] = []
        self._to_decode: list[tuple[Record, float]] = []
        self._began_s = 0.0
        self._closed = False
        self._progress = asyncio.Event()
        self._sent: asyncio.Queue[SentBatch | None] = asyncio.Queue(MAX_UNACKNOWLEDGED_BATCHES)

    async def open_loop(self, per_s: float, seed: int = 0) -> LoadResult:
        """Send requests as a Poisson process of this rate. Raises the log's errors."""
        return await self._run(PoissonArrivals(per_s, self._plan.seconds, seed), 0)

    async def closed_loop(self, in_flight: int) -> LoadResult:
        """Keep this many requests in flight, or an eighth fewer, so that several are sent at a
        time. Raises the log's errors.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight: expected 1 or more, got {in_flight}")
        self._closed = True
        return await self._run(None, in_flight)

    async def _run(self, arrivals: PoissonArrivals | None, in_flight: int) -> LoadResult:
        async with self._log.producer() as producer, self._replies:
            await self._prepare(producer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._acknowledge(), name="bench-acknowledgements")
                counting = tasks.create_task(self._count_replies(), name="bench-answers")
                self._began_s = time.monotonic()
                if arrivals is not None:
                    await self._send_open(producer, arrivals)
                else:
                    await self._send_closed(producer, in_flight)
                await self._sent.put(None)
                await self._wait_for_last_answers()
                counting.cancel()
        self._add_up()
        return self.measured

    async def _prepare(self, producer: Producer) -> None:
        """Let the producer fetch its metadata, so that no request waits for it."""
        topic, count = self._plan.requests
        for number in range(count):
            await producer.send(TopicPartition(topic, number), ())

    # --- sending -----------------------------------------------------------------------------

    async def _send_open(self, producer: Producer, arrivals: PoissonArrivals) -> None:
        while (next_s := arrivals.next_s()) is not None:
            now_s = time.monotonic() - self._began_s
            if next_s > now_s:
                await asyncio.sleep(min(next_s - now_s, LONGEST_SLEEP_S))
                continue
            dues_s = arrivals.due(now_s, SEND_CHUNK)  # at too high a rate there are ever more
            await self._send(producer, dues_s)
            handed_over_s = time.monotonic() - self._began_s
            self.measured.lateness.add([handed_over_s - due_s for due_s in dues_s])
            await asyncio.sleep(0)

    async def _send_closed(self, producer: Producer, in_flight: int) -> None:
        chunk = min(max(1, in_flight // 8), SEND_CHUNK)
        while (now_s := time.monotonic() - self._began_s) < self._plan.seconds:
            if self.measured.unanswered + chunk > in_flight:
                self._progress.clear()
                try:
                    async with asyncio.timeout(self._plan.seconds - now_s):
                        await self._progress.wait()
                except TimeoutError:
                    return
            else:
                await self._send(producer, [now_s] * chunk)

    async def _send(self, producer: Producer, dues_s: Sequence[float]) -> None:
        topic, count = self._plan.requests
        by_partition: list[list[NewRecord]] = [[] for _ in range(count)]
        number = self.measured.sent
        for due_s, payload in zip(dues_s, self._payloads, strict=False):
            correlation_id = self._replies.expect(partial(self._answered, due_s))
            headers = [*payload.headers, (HeaderName.CORRELATION_ID, correlation_id)]
            by_partition[number % count].append(NewRecord(payload.key, payload.value, headers))
            number += 1
        self.measured.sent = number
        for partition, records in enumerate(by_partition):
            if records:
                for sent in await producer.send(TopicPartition(topic, partition), records):
                    await self._sent.put(sent)

    async def _acknowledge(self) -> None:
        while (sent := await self._sent.get()) is not None:
            await sent.acknowledged

    # --- answers -----------------------------------------------------------------------------

    def _answered(self, due_s: float, answer: Record) -> None:
        measured = self.measured
        now_s = time.monotonic() - self._began_s
        measured.answered += 1
        measured.statuses[(last_header(answer.headers, HeaderName.STATUS) or b"").decode()] += 1
        if (now_s if self._closed else due_s) >= self._plan.skip_s:
            self._latencies_s.append(now_s - due_s)
            measured.seconds = now_s - self._plan.skip_s
            if len(self._to_decode) < DECODED_PER_ROUND:
                self._to_decode.append((answer, now_s - due_s))

    async def _count_replies(self) -> None:
        while True:
            await self._replies.wait_for_replies()
            self._add_up()
            self._progress.set()

    def _add_up(self) -> None:
        """Add the answers since the last call to the histograms, which is cheaper in bulk."""
        measured = self.measured
        measured.latency.add(self._latencies_s)
        measured.counted += len(self._latencies_s)
        measured.decode_timings(self._to_decode)
        measured.duplicates = self._replies.late
        self._latencies_s, self._to_decode = [], []

    async def _wait_for_last_answers(self) -> None:
        try:
            async with asyncio.timeout(self._plan.wait_s):
                while self.measured.unanswered:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass  # the totals show what is missing
