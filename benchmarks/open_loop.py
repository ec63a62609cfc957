"""Open-loop load from two processes: one sends, the other reads the answers.

In one process, reading what comes back would hold up what is due. Here a request carries the moment
at which it was due, on the machine's monotonic clock, in its correlation id; so the reader needs to
know of nothing else, and a time counts from that moment until the answer was read.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import uvloop

from benchmarks.stages import Scrape
from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import NewRecord, Record, SentBatch, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.bench.load import PoissonArrivals
from headrace.tools.histogram import Histogram

START_S = 30.0
"""Time for a process to start and to connect."""
LEAD_S = 0.05
POLL_S = 0.05
POLL_RECORDS = 4096
UNACKNOWLEDGED = 4096
LINGER_FROM_PER_S = 1000.0
LINGER_MS = 5
"""Linger of the sender at high rates, where it stands for many callers whose records share produce
requests, as those of Kafka's own clients do by default since 4.0 (`linger.ms`, KIP-1030). Without
it, its thousands of produce requests per second cost broker and sender more than serving does.
"""
LAST_ANSWERS_S = 10.0


class OpenLoopPlan(NamedTuple):
    """Parameters of both processes.

    Attributes:
        requests, responses: topics, with the number of their partitions.
        values: of the requests, sent in turns.
        per_s, seconds, seed: of the Poisson process.
        skip_s: what was due in the first so many seconds is not counted.
        prefix: eight bytes that are this load's alone.
    """

    bootstrap_servers: str
    requests: TopicPartition
    responses: TopicPartition
    values: Sequence[bytes]
    per_s: float
    seconds: float
    seed: int
    skip_s: float
    prefix: bytes


class SenderReport(NamedTuple):
    """Result of the sender: number of requests, their lateness, and its CPU time."""

    count: int
    late: Histogram
    cpu_s: float


class ReaderReport(NamedTuple):
    """Result of the reader; `counted` answers came after the skipped period, within `seconds` of
    it.
    """

    count: int
    counted: int
    seconds: float
    latency: Histogram
    cpu_s: float


class LoadSample(NamedTuple):
    """Measurements from outside the process at one moment.

    Attributes:
        at_s: monotonic.
        headrace_s, broker_s: processor time until then.
        metrics: see `benchmarks.stages.scrape`.
    """

    at_s: float
    headrace_s: float
    broker_s: float
    metrics: Scrape


class OpenLoop(NamedTuple):
    """One load as measured by both processes, with samples from its beginning and its end."""

    sent: SenderReport
    answered: ReaderReport
    looks: tuple[LoadSample, LoadSample]


async def open_loop(
    bootstrap_servers: str,
    topics: tuple[TopicPartition, TopicPartition],
    values: Sequence[bytes],
    rate: tuple[float, float],
    skip_s: float,
    look: Callable[[], LoadSample],
    before: Callable[[], Awaitable[None]] | None = None,
) -> OpenLoop:
    """Run one load.

    Args:
        bootstrap_servers: of the broker.
        topics: of requests and of responses, each with the number of its partitions.
        values: of the requests.
        rate: requests per second, and for how many seconds.
        skip_s: see `OpenLoopPlan`.
        look: takes a look.
        before: is awaited when both processes are connected; the load begins directly after it.

    Raises:
        TimeoutError: a process did not start, or did not end, in time.
        EOFError: one ended by itself.
    """
    per_s, seconds = rate
    prefix = secrets.token_bytes(8)
    plan = OpenLoopPlan(bootstrap_servers, *topics, values, per_s, seconds, 1, skip_s, prefix)
    with _child(_reader, plan) as reader, _child(_sender, plan) as sender:
        await _receive(reader, START_S)
        await _receive(sender, START_S)
        if before is not None:
            await before()
        first = look()
        began_s = time.monotonic() + LEAD_S
        reader.send(began_s)
        sender.send(began_s)
        sent: SenderReport = await _receive(sender, seconds + START_S)
        last = look()
        reader.send(sent.count)
        answered: ReaderReport = await _receive(reader, LAST_ANSWERS_S + START_S)
    return OpenLoop(sent, answered, (first, last))


Side = Callable[[OpenLoopPlan, Connection], Coroutine[Any, Any, None]]


@contextmanager
def _child(side: Side, plan: OpenLoopPlan) -> Any:
    """Start a child process; yields our end of the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(side, plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(side: Side, plan: OpenLoopPlan, parent: Connection) -> None:
    uvloop.run(side(plan, parent))


async def _receive(child: Connection, timeout_s: float) -> Any:
    """Return the next message of a child process."""
    if not await asyncio.to_thread(child.poll, timeout_s):
        raise TimeoutError(f"the load's process said nothing for {timeout_s:g} s")
    return child.recv()


# --- the sender's process ------------------------------------------------------------------------


async def _sender(plan: OpenLoopPlan, parent: Connection) -> None:
    linger_ms = LINGER_MS if plan.per_s >= LINGER_FROM_PER_S else 0
    log = KafkaLog(KafkaSettings(bootstrap_servers=plan.bootstrap_servers, linger_ms=linger_ms))
    unacknowledged: asyncio.Queue[SentBatch | None] = asyncio.Queue(UNACKNOWLEDGED)
    async with log, log.producer() as producer:
        for number in range(plan.requests.partition):
            # Asks the broker what it wants to know, so that no request waits for that.
            await producer.send(TopicPartition(plan.requests.topic, number), ())
        parent.send("ready")
        began_s = parent.recv()
        cpu_s = time.process_time()
        values = itertools.cycle(plan.values)
        arrivals = PoissonArrivals(plan.per_s, plan.seconds, plan.seed)
        late = Histogram()
        count = 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_acknowledge(unacknowledged), name="load-acknowledgements")
            while (next_s := arrivals.next_s()) is not None:
                now_s = time.monotonic() - began_s
                if next_s > now_s:
                    await asyncio.sleep(next_s - now_s)
                    continue
                dues_s = arrivals.due(now_s)
                shares: list[list[NewRecord]] = [[] for _ in range(plan.requests.partition)]
                for due_s in dues_s:
                    due_ns = round((began_s + due_s) * 1e9)
                    correlation = (
                        HeaderName.CORRELATION_ID,
                        plan.prefix + due_ns.to_bytes(8, "big"),
                    )
                    shares[count % len(shares)].append(NewRecord(None, next(values), [correlation]))
                    count += 1
                for number, records in enumerate(shares):
                    target = TopicPartition(plan.requests.topic, number)
                    for sent in await producer.send(target, records) if records else ():
                        await unacknowledged.put(sent)
                handed_over_s = time.monotonic() - began_s
                late.add([handed_over_s - due_s for due_s in dues_s])
                await asyncio.sleep(0)
            await unacknowledged.put(None)
    parent.send(SenderReport(count, late, time.process_time() - cpu_s))


async def _acknowledge(batches: asyncio.Queue[SentBatch | None]) -> None:
    while (sent := await batches.get()) is not None:
        await sent.acknowledged


# --- the reader's --------------------------------------------------------------------------------


async def _reader(plan: OpenLoopPlan, parent: Connection) -> None:
    log = KafkaLog(KafkaSettings(bootstrap_servers=plan.bootstrap_servers))
    topic, count = plan.responses
    partitions = [TopicPartition(topic, number) for number in range(count)]
    async with log, log.reader(partitions) as reader:
        parent.send("ready")
        began_s = parent.recv()
        for partition, end in (await reader.end_offsets(partitions)).items():
            reader.seek(partition, end)  # the answers that were written until now are not ours
        seen = _AnswerCounter(plan.prefix, round((began_s + plan.skip_s) * 1e9))
        cpu_s = time.process_time()
        expected: int | None = None
        give_up_s = float("inf")
        while (expected is None or seen.count < expected) and time.monotonic() < give_up_s:
            polled = await reader.poll(POLL_S, POLL_RECORDS)
            now_ns = time.monotonic_ns()
            for records in polled.values():
                seen.take(records, now_ns)
            if expected is None and parent.poll():
                expected = parent.recv()
                give_up_s = time.monotonic() + LAST_ANSWERS_S
        cpu_s = time.process_time() - cpu_s
    seconds = max(0, seen.last_ns - seen.from_ns) / 1e9
    parent.send(ReaderReport(seen.count, seen.counted, seconds, seen.latency, cpu_s))


class _AnswerCounter:
    """Counts the answers to this load."""

    def __init__(self, prefix: bytes, from_ns: int) -> None:
        self._prefix = prefix
        self.from_ns = from_ns
        self.last_ns = from_ns
        self.latency = Histogram()
        self.count = 0
        self.counted = 0

    def take(self, records: Sequence[Record], now_ns: int) -> None:
        latencies_s: list[float] = []
        for record in records:
            for name, value in record.headers:
                if name == HeaderName.CORRELATION_ID and value and value.startswith(self._prefix):
                    self.count += 1
                    due_ns = int.from_bytes(value[8:], "big")
                    if due_ns >= self.from_ns:
                        latencies_s.append((now_ns - due_ns) / 1e9)
        if latencies_s:
            self.latency.add(latencies_s)
            self.counted += len(latencies_s)
            self.last_ns = now_ns
