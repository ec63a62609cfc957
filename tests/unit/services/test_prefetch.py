"""The choice of the batch that an instance runs next."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from headrace.errors import Code
from headrace.models.profiling.latency import Latency
from headrace.primitives.backoff import Backoff
from headrace.protocol.messages import Batch, Failure, Request
from headrace.services.executor.prefetch import Prefetch, PreparedBatch
from headrace.telemetry.span_attributes import ModelRun
from headrace.topics import Stage
from headrace.transport.channels import BatchQueue, Demand
from headrace.tuning import TUNING, ExecutorTuning
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.work import make_request

LONG_US = 50_000
NOW_US = 1_000_000


AT_ONCE = replace(TUNING.executor, run_backoff=Backoff(0.0, 0.0))
BUSY = Failure(Code.INTERNAL, "busy", Stage.EXECUTOR)


@dataclass
class Limits:
    """Limits of the batches that retries are joined to."""

    max_batch_size: int = 32
    max_batch_bytes: int = 1000
    batching_off: str = ""
    latency: Latency = field(default_factory=Latency)


class PrefetchHarness:
    """A supply of batches, and an intake that pulls them."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        limits: Limits | None = None,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        self.waiting: deque[Batch] = deque()
        self.asks: list[Demand] = []
        self.gathered: list[str] = []
        self.gathering_us = 0
        self.batch_queue: BatchQueue[tuple[str, str], Batch] = BatchQueue(self._supply)
        self.consumer = self.batch_queue.consumer(("model", "1"))
        self.prefetch = Prefetch(
            self.consumer, self._gather, tasks, tuning=tuning, join_limits=limits
        )

    def _supply(self, _: object, demand: Demand) -> Batch | None:
        self.asks.append(demand)
        # As the batcher does: for one who is busy a batch that can grow is held back.
        return self.waiting.popleft() if self.waiting and not demand.close_at_us else None

    def _gather(self, batch: Batch) -> PreparedBatch:
        self.gathered.append(batch.batch_id)
        return PreparedBatch(batch, [], batch.requests, {}, NOW_US, NOW_US + self.gathering_us)

    async def next_id(self) -> str:
        """The batch that comes next."""
        async with asyncio.timeout(DEADLINE_S):
            taken = self.prefetch.next_nowait() or await self.prefetch.wait_next()
        return taken.batch.batch_id if taken else "none"


def batch(name: str) -> Batch:
    """One request."""
    return Batch(name, [make_request()], "idle")


async def test_batch_without_running_one_is_not_gathered_ahead() -> None:
    """It is not gathered before."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.waiting.append(batch("a"))
        assert await bench.next_id() == "a"
    assert bench.gathered == []


async def test_batch_is_gathered_while_another_one_runs() -> None:
    """The next batch is gathered as soon as the batcher has closed it."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.start_prefetch(NOW_US, LONG_US)
        await eventually(lambda: bench.asks)
        bench.waiting.append(batch("a"))
        bench.consumer.now_idle()
        await eventually(lambda: bench.gathered == ["a"])
        assert await bench.next_id() == "a"
    assert bench.asks[0] == Demand(close_at_us=NOW_US + LONG_US - TUNING.executor.prefetch_lead_us)


async def test_slow_gathering_closes_next_batch_earlier() -> None:
    """The batch closes earlier by twice the recent gathering time."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.gathering_us = 3000
        for name in ("a", "b"):
            bench.prefetch.start_prefetch(NOW_US, LONG_US)
            await asyncio.sleep(0)
            bench.waiting.append(batch(name))
            assert await bench.next_id() == name
    asked = [demand.close_at_us for demand in bench.asks if demand.close_at_us]
    assert asked[-1] == NOW_US + LONG_US - TUNING.executor.prefetch_lead_us - 2 * 3000


async def test_run_that_ends_early_takes_partial_batch() -> None:
    """The pull that waited for its end does not wait any longer."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.start_prefetch(NOW_US, LONG_US)
        await eventually(lambda: bench.asks)
        bench.waiting.append(batch("a"))
        assert await bench.next_id() == "a"


@pytest.mark.parametrize("run_us", [None, TUNING.executor.prefetch_min_run_us - 1])
async def test_short_or_unknown_run_starts_no_prefetch(run_us: int | None) -> None:
    """The timers of the loop are too coarse for them."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.start_prefetch(NOW_US, run_us)
        await asyncio.sleep(0)
    assert bench.asks == []


async def test_halves_and_fresh_batches_alternate() -> None:
    """A batch that failed does not hold up those that came after it."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.waiting.extend(batch(name) for name in ("a", "b"))
        bench.prefetch.requeue_halves([batch("x"), batch("y"), batch("z")])
        assert [await bench.next_id() for _ in range(5)] == ["x", "a", "y", "b", "z"]


async def test_failed_batch_is_finished_before_next_one_is_halved() -> None:
    """Its requests would otherwise be answered only after all others that fail."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.requeue_halves([batch("x"), batch("y")])
        bench.prefetch.requeue_halves([batch("later")])
        assert await bench.next_id() == "x"
        bench.prefetch.requeue_halves([batch("x.0"), batch("x.1")], of_part=True)
        assert [await bench.next_id() for _ in range(4)] == ["x.0", "x.1", "y", "later"]


async def test_fresh_batches_wait_while_many_parts_do() -> None:
    """In the batcher they are in order, can be cancelled, and end when their deadlines pass."""
    most = TUNING.executor.max_waiting_parts
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.waiting.extend(batch(name) for name in ("a", "b"))
        bench.prefetch.requeue_halves([batch(str(number)) for number in range(most + 3)])
        taken = [await bench.next_id() for _ in range(most + 5)]
    assert taken[:7] == ["0", "1", "2", "a", "3", "b", "4"]


async def test_prefetched_batch_alternates_with_halves() -> None:
    """Between the halves of the one that failed meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.start_prefetch(NOW_US, LONG_US)
        await eventually(lambda: bench.asks)
        bench.waiting.append(batch("a"))
        bench.consumer.now_idle()
        await eventually(lambda: bench.gathered)
        bench.prefetch.requeue_halves([batch("x"), batch("y")])
        assert [await bench.next_id() for _ in range(3)] == ["x", "a", "y"]


async def test_pending_halves_are_run_before_drain_ends() -> None:
    """The halves are run even if the prefetch has already learned that no batch follows."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks)
        bench.prefetch.start_prefetch(NOW_US, LONG_US)
        await eventually(lambda: bench.asks)
        bench.prefetch.requeue_halves([batch("x"), batch("y")])
        bench.batch_queue.close()
        assert [await bench.next_id() for _ in range(3)] == ["x", "y", "none"]


def retried_runs(
    tasks: asyncio.TaskGroup, limits: Limits | None, *runs: tuple[Batch, int]
) -> list[list[Request]]:
    """Return the requests that run together after these runs, with the number of their attempts,
    have failed with a transient error, and their pauses are over.
    """
    bench = PrefetchHarness(tasks, limits, AT_ONCE)
    for failed, attempts in runs:
        run = ModelRun(failed, failed.requests, NOW_US, attempts=attempts)
        assert bench.prefetch.retry_later(run, BUSY, NOW_US) == []
    taken: list[list[Request]] = []
    while bench.prefetch.has_retries:
        prepared = bench.prefetch.next_nowait()
        assert prepared is not None
        taken.append(prepared.requests)
    return taken


async def test_retries_due_together_run_together() -> None:
    """During an outage requests come one by one; after it they must not run one by one."""
    batches = [batch(name) for name in "abc"]
    async with asyncio.TaskGroup() as tasks:
        runs = retried_runs(tasks, Limits(), *[(each, 1) for each in batches])
    assert runs == [[each.requests[0] for each in batches]]


@pytest.mark.parametrize(
    "limits",
    [Limits(max_batch_size=2), Limits(max_batch_bytes=20)],
    ids=["rows", "bytes"],
)
async def test_joined_retries_keep_limits_of_batches(limits: Limits) -> None:
    """Each request has 1 row and 10 bytes."""
    batches = [batch(name) for name in "abc"]
    async with asyncio.TaskGroup() as tasks:
        runs = retried_runs(tasks, limits, *[(each, 1) for each in batches])
    assert [len(run) for run in runs] == [2, 1]


@pytest.mark.parametrize(
    "limits", [None, Limits(batching_off="max_batch_size is 1")], ids=["another process", "off"]
)
async def test_retries_stay_apart_where_batches_must(limits: Limits | None) -> None:
    """A batcher in another process waits for its own batches; some models take no batches."""
    async with asyncio.TaskGroup() as tasks:
        runs = retried_runs(tasks, limits, (batch("a"), 1), (batch("b"), 1))
    assert [len(run) for run in runs] == [1, 1]


@pytest.mark.parametrize("reason", ["bisected", "retried", "apart", "alone"])
async def test_retry_of_part_that_must_run_apart_is_not_joined(reason: str) -> None:
    """It is a part of a search for a faulty request, or its model is asked whether it batches."""
    part = Batch("a.0", [make_request()], reason)
    async with asyncio.TaskGroup() as tasks:
        runs = retried_runs(tasks, Limits(), (part, 1), (batch("b"), 1), (batch("c"), 1))
    assert [len(run) for run in runs] == [1, 2]


async def test_retries_with_other_shapes_or_attempts_are_not_joined() -> None:
    """Requests of different shapes do not fit; one with few attempts left must not end others."""
    other = Batch("b", [make_request(shape_class=(8,))], "idle")
    async with asyncio.TaskGroup() as tasks:
        runs = retried_runs(tasks, Limits(), (batch("a"), 1), (other, 1), (batch("c"), 9))
    assert [len(run) for run in runs] == [1, 1, 1]


async def test_retries_alternate_with_parts_and_fresh_batches() -> None:
    """Runs that fail with a transient error each time, after a while, must not hold up others."""
    async with asyncio.TaskGroup() as tasks:
        bench = PrefetchHarness(tasks, tuning=AT_ONCE)
        bench.waiting.extend(batch(name) for name in ("a", "b"))
        bench.prefetch.requeue_halves([batch("x"), batch("y")])
        for name in ("r", "s"):
            failed = batch(name)
            run = ModelRun(failed, failed.requests, NOW_US, attempts=1)
            bench.prefetch.retry_later(run, BUSY, NOW_US)
        taken = [await bench.next_id() for _ in range(6)]
    assert taken == ["r", "a", "x", "b", "s", "y"]
