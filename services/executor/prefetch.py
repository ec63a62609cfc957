"""Prefetch: choose an instance's next batch among fresh batches, failed parts, and retries.

During a run of some length, the next batch is pulled just in time and gathered into the unused
block, so that it can begin when the run ends. Parts of failed batches alternate with fresh
batches. A batch that failed with a transient error is retried after a pause, while others run.
Retries that have become due meanwhile run together: during an outage requests fail at once, and so
come one by one, and would otherwise run one by one when it is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from headrace.clock import Clock
from headrace.crash_isolation.run_gate import Entry
from headrace.models.backends.port import Arrays
from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Batch, Failure, Request
from headrace.telemetry.span_attributes import ModelRun
from headrace.transport.channels import BatchConsumer
from headrace.tuning import TUNING, ExecutorTuning

_RUN_APART = {"alone", "apart", "bisected", "retried"}
"""Reasons of batches whose requests must not run together with others."""


class JoinLimits(Protocol):
    """Limits of batches; implemented by `headrace.models.version.ModelVersion`."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def batching_off(self) -> str: ...
    @property
    def latency(self) -> Latency: ...


class PreparedBatch(NamedTuple):
    """A batch to run.

    Attributes:
        ended: requests that had expired or been revoked when it was gathered.
        requests: the other requests.
        arrays: their gathered rows; None while they are not gathered.
        began_us, gathered_us: when gathering began and ended, in epoch microseconds.
        clock: clock of these times and of the run's; None if gathering has not started.
        is_fresh: True if the batch has not run before.
        attempts: how often these requests have run together.
        entry: gate entry of its run, if that was started behind the previous run.
    """

    batch: Batch
    ended: list[Request]
    requests: list[Request]
    arrays: Arrays | None = None
    began_us: int = 0
    gathered_us: int = 0
    clock: Clock | None = None
    is_fresh: bool = True
    entry: Entry | None = None
    attempts: int = 0

    @property
    def is_started(self) -> bool:
        """True if its run has been started."""
        return self.entry is not None


class _RetryGroup(NamedTuple):
    """Properties that are equal in all retries that may run together.

    Attributes:
        attempts: how often their requests have run.
        shape_class: of their requests.
        number: a number of its own for a retry that must run apart; otherwise 0.
    """

    attempts: int
    shape_class: tuple[int, ...]
    number: int


class _Retry(NamedTuple):
    """A batch to retry at a time of the loop's clock."""

    at_s: float
    batch: Batch


class Prefetch:
    """Supply one instance with batches.

    Args:
        consumer: consumer of fresh batches.
        gather: gathers a batch ahead of its run.
        tasks: the instance's task group, in which batches are pulled ahead.
        run_now: runs a fresh batch while `wait_next` waits for one; see `BatchConsumer.wait`.
        join_limits: limits up to which retries are joined; None if each batch must stay what it is.
    """

    def __init__(
        self,
        consumer: BatchConsumer[tuple[str, str], Batch],
        gather: Callable[[Batch], PreparedBatch],
        tasks: asyncio.TaskGroup,
        run_now: Callable[[Batch], bool] | None = None,
        tuning: ExecutorTuning = TUNING.executor,
        join_limits: JoinLimits | None = None,
    ) -> None:
        self._tuning = tuning
        self._join_limits = join_limits
        self._consumer = consumer
        self._run_now = run_now
        self._gather = gather
        self._tasks = tasks
        self._halves: deque[Batch] = deque()
        # In the order of their times, since the pause depends on the attempts alone.
        self._retries: dict[_RetryGroup, deque[_Retry]] = {}
        self._numbers = count(1)
        self._fresh_turn = self._retry_turn = False
        self._pulling: asyncio.Task[PreparedBatch | None] | None = None
        self._gathering_us = 0

    def requeue_halves(self, parts: Sequence[Batch], *, of_part: bool = False) -> None:
        """Queue the parts of a failed batch; they alternate with fresh batches.

        Args:
            parts: the parts.
            of_part: the failed batch was a part itself. Its parts go before all others, so that
                one failed batch is finished before the next one is halved.
        """
        if of_part:
            self._halves.extendleft(reversed(parts))
        else:
            self._halves.extend(parts)

    def retry_later(self, run: ModelRun, failure: Failure, now_us: int) -> list[Request] | None:
        """Schedule a retry of a run that failed with a transient error, after a pause that doubles
        each time, for the requests whose deadlines allow it.

        Returns:
            The requests that would be late, failed; None if there are no attempts left.
        """
        batch, tuning = run.batch, self._tuning
        is_retried = batch.reason == "retried"
        if run.attempts >= (tuning.max_half_attempts if is_retried else tuning.max_run_attempts):
            return None
        pause_s = tuning.run_backoff.pause_s(run.attempts - 1)
        at_us = now_us + int(pause_s * 1e6)
        late = [one for one in run.requests if 0 < one.envelope.deadline_ms * 1000 <= at_us]
        for request in late:
            request.fail(failure)
        in_time = [one for one in run.requests if one not in late] if late else list(run.requests)
        if in_time:
            at_s = asyncio.get_running_loop().time() + pause_s
            runs_apart = self._join_limits is None or batch.reason in _RUN_APART
            number = next(self._numbers) if runs_apart else 0
            group = _RetryGroup(run.attempts, in_time[0].shape_class, number)
            retry = _Retry(at_s, Batch(batch.batch_id, in_time, batch.reason))
            self._retries.setdefault(group, deque()).append(retry)
        return late

    @property
    def has_retries(self) -> bool:
        """True if a batch that failed is to be retried."""
        return bool(self._retries)

    def next_nowait(self) -> PreparedBatch | None:
        """Return the next batch; None if there is none now."""
        # A started run comes first, since it holds the thread; then what failed and fresh batches
        # in turn, so that a failed batch does not hold up the others, however often it is retried.
        started = self._pop_started()
        if started is not None:
            return started
        is_due = bool(self._retries) and self._retry_wait_s() <= 0
        if not (is_due or self._halves):
            return self._pop_fresh()
        # While many wait, fresh batches stay in the batcher: only there are they in order, can be
        # cancelled, and end when their deadlines pass.
        takes_fresh = self._fresh_turn and len(self._halves) <= self._tuning.max_waiting_parts
        prepared = self._pop_fresh() if takes_fresh else None
        self._fresh_turn = not self._fresh_turn
        if prepared is not None:
            return prepared
        self._retry_turn = is_due and not (self._retry_turn and self._halves)
        if self._retry_turn:
            return self._pop_due_retry()
        return _unprepared(self._halves.popleft(), is_fresh=False)

    async def wait_next(self) -> PreparedBatch | None:
        """Wait for the next batch, directly after `next_nowait` has found none; None when there
        will be no more.
        """
        return await (self._wait_fresh_or_due() if self._retries else self._wait_fresh())

    def _pop_started(self) -> PreparedBatch | None:
        """Return the batch whose run was started ahead, or None. Another run started now would
        queue behind it on the thread, where deadlines and run time are not checked.
        """
        pulling = self._pulling
        prepared = pulling.result() if pulling is not None and pulling.done() else None
        if prepared is None or not prepared.is_started:
            return None
        self._pulling, self._fresh_turn = None, False
        return prepared

    def _retry_wait_s(self) -> float:
        at_s = min(retries[0].at_s for retries in self._retries.values())
        return at_s - asyncio.get_running_loop().time()

    def _pop_due_retry(self) -> PreparedBatch:
        """Return the retry whose time comes first, joined with others that are due."""
        group, retries = min(self._retries.items(), key=lambda one: one[1][0].at_s)
        batch = retries.popleft().batch
        now_s = asyncio.get_running_loop().time()
        joined, rows = list(batch.requests), batch.rows
        size_bytes = _size_bytes(joined)
        max_rows, max_bytes = self._most_joined(batch)
        while retries and retries[0].at_s <= now_s:
            more = retries[0].batch
            rows += more.rows
            size_bytes += _size_bytes(more.requests)
            if rows > max_rows or size_bytes > max_bytes:
                break
            joined += retries.popleft().batch.requests
        if not retries:
            del self._retries[group]
        if len(joined) > len(batch.requests):
            batch = Batch(batch.batch_id, joined, batch.reason)
        return _unprepared(batch, is_fresh=False)._replace(attempts=group.attempts)

    def _most_joined(self, batch: Batch) -> tuple[int, int]:
        """Return how many rows and bytes a batch that was joined from retries has at most."""
        limits = self._join_limits
        if limits is None or limits.batching_off:
            return 0, 0
        shape_class = batch.requests[0].shape_class
        rows = limits.latency.best_rows(shape_class, limits.max_batch_size)
        return rows, limits.max_batch_bytes

    async def _wait_fresh_or_due(self) -> PreparedBatch | None:
        """Return a fresh batch or a due retry, whichever is first. The pull is never cancelled:
        its batch would be lost.
        """
        if self._pulling is None:
            self._pulling = self._tasks.create_task(self._pull(), name="executor-pull")
        self._consumer.now_idle()
        await asyncio.wait([self._pulling], timeout=self._retry_wait_s())
        if self._pulling.done():
            prepared = await self._wait_fresh()
            if prepared is not None:
                return prepared
            await asyncio.sleep(self._retry_wait_s())
        return self._pop_due_retry()

    def start_prefetch(self, now_us: int, run_us: int | None) -> None:
        """Prefetch the next batch so that it is ready at the predicted end of the starting run."""
        if run_us is None or run_us < self._tuning.prefetch_min_run_us:
            return
        if self._halves or self._pulling is not None:
            return
        if self._retries and self._retry_wait_s() <= 0:
            return  # a retry is due next
        close_at_us = now_us + run_us - self._tuning.prefetch_lead_us - 2 * self._gathering_us
        self._pulling = self._tasks.create_task(
            self._prefetch(max(now_us, close_at_us)), name="executor-pull-ahead"
        )

    async def _prefetch(self, close_at_us: int) -> PreparedBatch | None:
        batch = await self._consumer.pull(close_at_us)
        if batch is None:
            return None
        prepared = self._gather(batch)
        # Decay slowly: a batch that is late costs more than one that is early.
        self._gathering_us = max(
            prepared.gathered_us - prepared.began_us, self._gathering_us - self._gathering_us // 8
        )
        return prepared

    async def _wait_fresh(self) -> PreparedBatch | None:
        pulling, self._pulling = self._pulling, None
        if pulling is not None:
            if not pulling.done():  # the run ended earlier than predicted
                self._consumer.now_idle()
            return await pulling
        batch = await self._consumer.wait(self._run_now)
        return None if batch is None else _unprepared(batch)

    async def _pull(self) -> PreparedBatch | None:
        batch = await self._consumer.pull()
        return None if batch is None else _unprepared(batch)

    def _pop_fresh(self) -> PreparedBatch | None:
        """Return a fresh batch if one is available now, or None."""
        if self._pulling is None:
            batch = self._consumer.pull_nowait()
            return None if batch is None else _unprepared(batch)
        if not self._pulling.done():
            return None
        pulling, self._pulling = self._pulling, None
        return pulling.result()


def _unprepared(batch: Batch, *, is_fresh: bool = True) -> PreparedBatch:
    return PreparedBatch(batch, [], batch.requests, is_fresh=is_fresh)


def _size_bytes(requests: Sequence[Request]) -> int:
    return sum([request.size_bytes for request in requests])
