"""Requests whose values are in stores, and the tasks that fetch these.

The size that a claim names is charged before its object is fetched: to the share of its model where
the batcher is in this process, otherwise to the budget alone, in the order of the claims. So the
objects that are here fit the budget, whatever the number of claims. Each claim has a task of its
own: a slow store delays no other request, and a request whose deadline passes, or that its caller
cancels, is answered then. Objects are decoded on a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from headrace.claims.fetcher import ClaimFetcher
from headrace.claims.stores import ClaimUnavailable
from headrace.clock import Clock
from headrace.delivery.budget import Budget
from headrace.delivery.cancelling import cancelled_failure, find_cancelled
from headrace.delivery.failures import REVOKED, deadline_exceeded, rejection
from headrace.delivery.inflight import InFlightAck
from headrace.errors import Code, Rejected
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.stage_tasks import StageTasks
from headrace.primitives.timeouts import end_now
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.messages import Failure, Request
from headrace.services.ingest.decode import IngestRules, PendingClaim, decode_claimed
from headrace.services.ingest.schemas import is_leaving, leave_in_log
from headrace.topics import Stage
from headrace.transforms.workers import PendingTransform, PendingValue
from headrace.tuning import TUNING, IngestTuning


class Decoded(NamedTuple):
    """A request whose object was fetched or whose value was decompressed, and then decoded; or one
    that has ended.

    Attributes:
        awaiting_schema: its payload, if a schema must be fetched for it.
        awaiting_worker: its payload or value, if a worker must transform or decode it.
    """

    request: Request
    awaiting_schema: Sequence[PendingTransform] = ()
    awaiting_worker: Sequence[PendingValue] = ()

    @property
    def is_pending(self) -> bool:
        """True if it has to wait further."""
        return bool(self.awaiting_schema or self.awaiting_worker)


class ClaimWaits:
    """Requests whose objects are fetched.

    Args:
        fetcher: an open fetcher of objects.
        rules: rules of ingest.
        on_fetched: passes on a request whose object is here, or that has ended.
        budget: the byte budget of the source.
        freed: set after each acknowledgement, which may have made room.
        clock: wall clock, in which deadlines are given.
    """

    def __init__(
        self,
        fetcher: ClaimFetcher,
        rules: IngestRules,
        on_fetched: Callable[[Decoded], Awaitable[None]],
        budget: Budget,
        freed: AutoResetEvent,
        clock: Clock,
        tuning: IngestTuning = TUNING.ingest,
    ) -> None:
        self._fetcher = fetcher
        limits = rules.limits.model_copy(update={"max_request_bytes": fetcher.max_bytes})
        self._rules = replace(rules, limits=limits)
        self._on_fetched = on_fetched
        self._budget = budget
        self._freed = freed
        self._clock = clock
        self._tuning = tuning
        self._worker = WorkerThread("claims")
        self._tasks = StageTasks()
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: dict[Request, asyncio.Timeout | None] = {}
        self._cancelled: set[Request] = set()
        self._turn = asyncio.Lock()
        self._reserved: list[InFlightAck] = []
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Fetch until `close`."""
        try:
            async with self._tasks:
                await self._closing.wait()
        except BaseException:
            # `close`, which otherwise ends the thread, is not called then.
            self._worker.close()
            raise

    def add(self, pending: PendingClaim, *, is_charged: bool) -> None:
        """Let a request wait for its object.

        Args:
            pending: an allowed claim.
            is_charged: its size is charged, together with its record, to the share of its model.
        """
        self._waiting[pending.request] = None
        work = self._complete(pending, is_charged=is_charged)
        task = self._tasks.start(work, f"claim-{pending.request.partition}")
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def cancel(self, cancelling: Sequence[Request]) -> list[Request]:
        """End and return the waiting requests that records cancel."""
        found = find_cancelled(cancelling, self._waiting)
        self._cancelled.update(found)
        for request in found:
            request.fail(cancelled_failure(Stage.INGEST))
            self._wake(request)
        return found

    def drop_revoked(self) -> None:
        """End the fetches whose partitions were revoked, or are leaving."""
        for request in list(self._waiting):
            if self._is_left(request):
                self._wake(request)

    async def close(self) -> None:
        """Leave the requests whose objects are not here in the log, for the next owners of their
        partitions; return when the others have been passed on.
        """
        self._closing.set()
        for request in list(self._waiting):
            self._wake(request)
        while self._running:
            await asyncio.wait(self._running)
        self._worker.close()

    async def fetch_alone(self, pending: PendingClaim) -> Decoded | None:
        """Return a request that runs alone, with its object, or ended; None if it was left in the
        log.
        """
        request = pending.request
        charge(pending, 1)
        self._waiting[request] = None
        if not self._is_left(request):
            await self._fetch(pending, is_charged=True)
        del self._waiting[request]
        if request.value is None and request.failure is None:
            leave_in_log(request)
            return None
        return await self._decode(pending)

    async def _complete(self, pending: PendingClaim, *, is_charged: bool) -> None:
        request = pending.request
        if request.failure is None and not self._is_left(request):
            await self._fetch(pending, is_charged=is_charged)
        self._waiting[request] = None
        if request.value is None and request.failure is None:
            del self._waiting[request]
            leave_in_log(request)
            return
        claimed = await self._decode(pending)
        # Only now: a record that cancels it must find it until it is passed on.
        del self._waiting[request]
        if request in self._cancelled:
            self._cancelled.remove(request)
            request.fail(cancelled_failure(Stage.INGEST))  # the thread may have failed it otherwise
            request.value, claimed = None, Decoded(request)
        await self._on_fetched(claimed)

    def _is_left(self, request: Request) -> bool:
        """Return True if a request whose object is not here is left in the log."""
        return self._closing.is_set() or is_leaving(request)

    def _wake(self, request: Request) -> None:
        """End the fetch of a request early."""
        within = self._waiting[request]
        if within is not None:
            end_now(within)

    async def _fetch(self, pending: PendingClaim, *, is_charged: bool) -> None:
        """Set the value of a request to its object, or fail the request; neither if it is left in
        the log.
        """
        request = pending.request
        deadline_ms = request.envelope.deadline_ms
        left_s = deadline_ms / 1000 - self._clock() / 1e6 if deadline_ms else None
        try:
            async with asyncio.timeout(left_s) as within:
                if request in self._waiting:
                    self._waiting[request] = within
                if not is_charged:
                    await self._reserve(pending)
                request.value = await self._fetcher.fetch(pending.claim)
        except TimeoutError:
            if request.failure is None and not self._is_left(request):
                late_ms = max(0.0, self._clock() / 1000 - deadline_ms)
                request.fail(deadline_exceeded(deadline_ms, late_ms, Stage.INGEST))
        except ClaimUnavailable as error:
            request.fail(Failure(Code.INTERNAL, str(error), Stage.INGEST))
        except Rejected as error:
            request.fail(rejection(error, Stage.INGEST))
        if request.ack_handle.revoked and request.failure is None:
            request.fail(REVOKED)

    async def _reserve(self, pending: PendingClaim) -> None:
        """Wait for room in the budget, in the order of the claims, and take it."""
        budget, size_bytes = self._budget, pending.claim.size_bytes
        async with self._turn:
            while budget.used_bytes + size_bytes > budget.limit_bytes:
                # Answers that are held in order may fill the budget until this one is answered.
                self._reserved = [each for each in self._reserved if each.is_in_flight]
                if not self._reserved:
                    break
                await self._freed.wait(self._tuning.room_interval_s)
            charge(pending, 1)
            self._reserved.append(_ack_of(pending.request))

    async def _decode(self, pending: PendingClaim) -> Decoded:
        """Decode a request's object on the thread, unless the request has ended."""
        request = pending.request
        awaiting_schema: list[PendingTransform] = []
        awaiting_worker: list[PendingValue] = []
        if request.failure is None:
            if not self._worker.is_started:
                self._worker.start()
            ack_handle = _ack_of(request)
            work = self._worker.call(
                lambda: decode_claimed(request, self._rules, awaiting_schema, awaiting_worker)
            )
            key_and_header_bytes = await work.done
            ack_handle.resize(ack_handle.size_bytes + key_and_header_bytes)
        if request.failure is not None:
            request.value = None
        return Decoded(request, awaiting_schema, awaiting_worker)


def charge(pending: PendingClaim, times: int) -> None:
    """Charge the size of an object to its request; -1 releases it."""
    ack_handle = _ack_of(pending.request)
    ack_handle.resize(ack_handle.size_bytes + times * pending.claim.size_bytes)


def _ack_of(request: Request) -> InFlightAck:
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, InFlightAck)
    return ack_handle
