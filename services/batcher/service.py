"""The batcher stage: requests → waiting groups → batches, pulled by free executor instances.

The path of a request: `send_nowait` adds it to the `DynamicBatcher`; `_supply` returns the next
batch to a consumer of `batch_queue`, often within `send_nowait`; `_expire` answers requests that
end while waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.crash_isolation.isolation import is_isolated
from headrace.delivery.failures import rejection
from headrace.models.lifecycle import VersionChange
from headrace.protocol.messages import Batch, BatchSummary, Envelope, Failure, Request
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.services.batcher.fair_queue import BatchLimits
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.snapshots import QueueSnapshot
from headrace.topics import Stage
from headrace.transport.channels import BatchQueue, Demand, ModelKey, SendStream
from headrace.transport.rebinding import Rebind, refuse_to_rebind
from headrace.tuning import TUNING, BatcherTuning


class BatcherService:
    """Collect requests and supply batches to the consumers of `batch_queue`.

    It is the `SendStream` of the stage before it, which sends requests that can run.

    Args:
        answers: receives requests that ended here: expired, or their model was unloaded.
        limits: returns the limits of a model version; raises `Rejected` if it is not served.
        prefix: prefix of batch ids; differs between processes.
        rebind: binds a request whose version has gone to another one, or raises `Rejected`.
        end_isolation: called with isolated requests that ended here because their version has gone.
    """

    def __init__(
        self,
        answers: SendStream[list[Request]],
        limits: Callable[[str, str], BatchLimits],
        prefix: str,
        instruments: Instruments,
        rebind: Rebind = refuse_to_rebind,
        end_isolation: Callable[[Sequence[Request]], None] = lambda _: None,
        tuning: BatcherTuning = TUNING.batcher,
    ) -> None:
        self._end_isolation = end_isolation
        self._answers = answers
        self._metrics, self._tracing, self._clock, self._steady = instruments
        self._batcher = DynamicBatcher(limits, prefix, rebind, tuning)
        self._prefix = prefix
        self._changed = asyncio.Event()
        self._alarm_us: int | None = None  # when `_expire` wakes without `_changed`
        self.batch_queue: BatchQueue[ModelKey, Batch] = BatchQueue(
            self._supply, self._batcher.has_waiting
        )

    def waiting(self) -> QueueSnapshot:
        """Return the number of waiting requests and the time to the earliest deadline."""
        deadline_us = self._batcher.earliest_deadline_us()
        slack_s = None if deadline_us is None else max(0, deadline_us - self._steady()) / 1e6
        return QueueSnapshot(len(self._batcher), slack_s)

    def refusal(self, envelope: Envelope, rows: int = 0) -> Failure | None:
        """Return why a request with these headers would be late behind all waiting requests and
        `rows` more rows; None if it would not.
        """
        return self._batcher.refusal(envelope, self._now_us(), Stage.INGEST, rows)

    # --- input -------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Return False: what waits is bounded by the source's budget."""
        return False

    async def send(self, chunk: list[Request]) -> None:
        """See `SendStream`; it never waits."""
        self.send_nowait(chunk)

    def send_nowait(self, chunk: list[Request]) -> None:
        """Add requests to those that wait, and hand batches to the consumers that wait."""
        batcher = self._batcher
        now_us = self._now_us()
        if chunk and is_isolated(chunk[0]):  # then all of them are, which came in one record
            for request in chunk:
                self._form_alone(request, now_us)
            return
        batcher.add_all(chunk, now_us)
        if batcher.cancellations:
            self._cancel()
        self.batch_queue.notify()
        self._wake(now_us)

    def close(self) -> None:
        """End the input: from now on partial batches close at once."""
        # Set `is_draining` before waking consumers, so that they get partial batches at once.
        self._batcher.is_draining = True
        self.batch_queue.notify()
        self._changed.set()

    def apply_change(self, change: VersionChange) -> None:
        """Take back the requests that wait for a version that cannot be loaded, or apply the limits
        of one that has replaced another one of its number.
        """
        key, now_us = (change.version.name, change.version.version), self._now_us()
        if change.action == "unload":
            self._batcher.renew_limits(key)
            self.batch_queue.notify()
            self._wake(now_us)
        if change.action not in ("reassign", "refuse"):
            return
        isolated = [one for batch in self.batch_queue.take_first(key) for one in batch.requests]
        if change.refusal is not None:
            failure = rejection(change.refusal, Stage.BATCHER)
            self._batcher.refuse(key, failure)
            for request in isolated:
                request.fail(failure)
                self._batcher.ended.append(request)
            self._end_isolation(isolated)
        else:
            self._batcher.reassign(key)
            for request in isolated:
                self._form_alone(request, now_us)
            self.batch_queue.notify()
        self._wake(now_us)

    # --- batches -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the input ends and each waiting request has been pulled or has ended."""
        await self._expire()
        self.batch_queue.close()
        self._answers.close()

    def _now_us(self) -> int:
        """Return the steady time, and update the offset to the wall clock for deadlines."""
        now_us = self._steady()
        self._batcher.wall_ahead_us = self._clock() - now_us
        return now_us

    def _form_alone(self, request: Request, now_us: int) -> None:
        """Supply an isolated request ahead of all waiting requests, so that it does not queue."""
        if not self._batcher.ensure_served(request):
            self._end_isolation([request])
            self._wake(now_us)
            return
        formed_us = now_us + self._batcher.wall_ahead_us
        request.batch = BatchSummary(formed_us)
        batch_id = f"{self._prefix}-alone-{request.partition}-{request.offset}"
        batch = Batch(batch_id, [request], "alone")
        self._metrics.formed(batch)
        if self._tracing is not None:
            self._tracing.formed(batch, formed_us)
        self.batch_queue.put_first((request.model, request.version), batch)

    def _cancel(self) -> None:
        """End cancelled requests; acknowledge the cancelling records, which get no answer."""
        cancelling, ended = self._batcher.cancel()
        for record in cancelling:
            record.ack_handle.ack()
        self._metrics.cancelled(len(cancelling), ended)

    def _supply(self, key: ModelKey | None, demand: Demand) -> Batch | None:
        batcher = self._batcher
        is_last = demand.is_last or batcher.is_draining
        if key is not None and not is_last and not batcher.has_waiting(key):
            return None  # and nothing to wake `_expire` for: an arrival does that
        now_us = self._now_us()
        batch = batcher.next(key, now_us, demand)
        if batch is not None:
            self._metrics.formed(batch)
            if self._tracing is not None:
                self._tracing.formed(batch, batch.requests[0].batch.formed_us)
        # With fewer requests waiting, the next event is no earlier than the timer.
        if batch is None or batcher.ended or batcher.is_draining:
            self._wake(now_us, demand.close_at_us if batch is None else 0)
        return batch

    def _wake(self, now_us: int, close_at_us: int = 0) -> None:
        """Wake `_expire` if it has work, or if its next event is earlier than its timer.

        Args:
            now_us: microseconds of the steady clock.
            close_at_us: see `headrace.transport.channels.Demand`.
        """
        batcher = self._batcher
        if batcher.ended or (batcher.is_draining and not batcher):
            self._changed.set()
            return
        next_us = batcher.next_event_us(now_us)
        if close_at_us > now_us:
            next_us = close_at_us if next_us is None else min(close_at_us, next_us)
        if next_us is not None and (self._alarm_us is None or next_us < self._alarm_us):
            self._changed.set()

    async def _expire(self) -> None:
        """Answer requests that ended while waiting, and wake consumers when a queue delay ends.

        Return once the input has ended and nothing waits.
        """
        now_us = 0
        while True:
            await self._wait_changed(now_us)
            now_us = self._now_us()
            self._batcher.expire(now_us)
            # Before the answers are sent, which may wait for the responder. Closing a batch may end
            # requests as well, so `ended` is read afterwards.
            self.batch_queue.notify()
            ended, self._batcher.ended = self._batcher.ended, []
            if ended:
                if self._tracing is not None:
                    self._tracing.ended_waiting(ended, self._clock())
                await self._answers.send(ended)
            if self._batcher.is_draining and not self._batcher:
                return

    async def _wait_changed(self, handled_us: int) -> None:
        """Wait until the next deadline or queue delay is due, or until new work arrives.

        Args:
            handled_us: time up to which events are handled. Later ones that are already due fire
                at once: nothing else will wake the waiting consumers.
        """
        moments = (self._batcher.next_event_us(handled_us), self.batch_queue.due_us(handled_us))
        alarm_us = self._alarm_us = min((one for one in moments if one is not None), default=None)
        timeout_s = None if alarm_us is None else max(0, alarm_us - self._steady()) / 1e6
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
