"""Values that wait for transform workers, and the tasks that keep the workers busy.

A slow payload delays no other request: reading goes on while it is with its worker, and models
take turns for the workers. What waits is in flight, and charged to the share of its model: its
record, and the inputs that its model made of the last payloads, since these are in memory next.
Workers make inputs of `transformed_bytes` before others are passed on, and none while the budget is
exceeded by what was made already.

Requests are passed on as they are made, so not in the order of their records. Where answers are in
order, the responder keeps it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count

from headrace.clock import Clock
from headrace.crash_isolation.isolation import records_of
from headrace.crash_isolation.run_gate import RunGate
from headrace.delivery.cancelling import cancelled_failure, find_cancelled
from headrace.delivery.failures import REVOKED, deadline_passed
from headrace.delivery.inflight import InFlightAck
from headrace.protocol.headers import MSGPACK_TYPES
from headrace.protocol.messages import Failure, Request
from headrace.services.ingest.decode import bind_transformed
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transforms.workers import (
    GrantedPayloads,
    PendingValue,
    TransformPool,
    TransformWorker,
)
from headrace.tuning import TUNING, IngestTuning


class Expectations:
    """Expected sizes and times of payloads, by model: moving averages of the last ones.

    Args:
        unknown_bytes, unknown_s: expected of a model whose transform has made nothing yet.
    """

    def __init__(self, unknown_bytes: int, unknown_s: float) -> None:
        self._unknown = (float(unknown_bytes), unknown_s)
        self._averages: dict[str, tuple[float, float]] = {}

    def input_bytes(self, payload: PendingValue) -> int:
        """Return the expected size of its inputs; 0 if these are views of the value."""
        if payload.content_type in MSGPACK_TYPES:
            return 0
        return int(self._averages.get(payload.model, self._unknown)[0])

    def took_s(self, payload: PendingValue) -> float:
        """Return the expected time of a worker."""
        return self._averages.get(payload.model, self._unknown)[1]

    def learn(self, payload: PendingValue) -> None:
        """Note what became of a payload."""
        if payload.inputs is None:
            return
        found = payload.made_bytes, payload.took_s
        before = self._averages.get(payload.model, found)
        size_bytes, took_s = (old + (new - old) / 8 for old, new in zip(before, found, strict=True))
        self._averages[payload.model] = size_bytes, took_s


class TransformQueue:
    """Values that wait to be granted to a worker, by model; models take turns.

    Args:
        expected: what their inputs will need.
        is_idle: returns True if nothing that was made is unanswered, so that nothing frees room.
        interval_s: time between searches for a value that others wait for.
    """

    def __init__(
        self, expected: Expectations, is_idle: Callable[[], bool], interval_s: float
    ) -> None:
        self._expected = expected
        self._is_idle = is_idle
        self._interval_s = interval_s
        self._waiting: OrderedDict[str, OrderedDict[int, PendingValue]] = OrderedDict()
        self._reserved_bytes = 0
        self._oldest_due_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, payload: PendingValue) -> None:
        """Let a value wait behind the others of its model."""
        self._waiting.setdefault(payload.model, OrderedDict())[payload.serial] = payload
        self._reserved_bytes += payload.reserved_bytes

    def remove(self, payload: PendingValue) -> bool:
        """Remove a value; return False if it does not wait here."""
        waiting = self._waiting.get(payload.model)
        if waiting is None or waiting.pop(payload.serial, None) is None:
            return False
        self._reserved_bytes -= payload.reserved_bytes
        if not waiting:
            del self._waiting[payload.model]
        return True

    def pop_next(self, count_ahead: int, ahead_bytes: int) -> PendingValue | None:
        """Remove and return the next payload that may be transformed.

        Args:
            count_ahead: number of granted payloads that no worker has taken.
            ahead_bytes: what these need besides what they have reserved.
        """
        if not self._waiting:
            return None
        payload = next(iter(next(iter(self._waiting.values())).values()))
        if not self._has_room(payload, ahead_bytes) and (count_ahead or not self._is_idle()):
            oldest = self._find_oldest()
            if oldest is None:
                return None
            payload = oldest
        self._waiting.move_to_end(payload.model)
        self.remove(payload)
        return payload

    def _has_room(self, payload: PendingValue, ahead_bytes: int) -> bool:
        """Return True unless what is in memory, and what is granted, exceeds the budget."""
        ack_handle = payload.request.ack_handle
        if not isinstance(ack_handle, InFlightAck):
            return True
        budget = ack_handle.assignment.budget
        return budget.used_bytes - self._reserved_bytes + ahead_bytes < budget.limit_bytes

    def unreserved_bytes(self, payload: PendingValue) -> int:
        """Return what is expected beyond what was reserved, when less was known of the model."""
        return self._expected.input_bytes(payload) - payload.reserved_bytes

    def _find_oldest(self) -> PendingValue | None:
        """Return a payload for whose answer all later ones of its partition wait, where they are in
        order: these may be what has taken the room.
        """
        now_s = time.monotonic()
        if now_s < self._oldest_due_s:
            return None
        self._oldest_due_s = now_s + self._interval_s
        for payloads in self._waiting.values():
            for payload in payloads.values():
                ack_handle = payload.request.ack_handle
                if (
                    isinstance(ack_handle, InFlightAck)
                    and ack_handle.assignment.progress.base > ack_handle.previous
                ):
                    return payload
        return None


class TransformWaits:
    """Values that wait for workers.

    Args:
        pool: the workers.
        on_transformed: passes on requests that have ended, or whose inputs are made.
        gate: gate that workers enter, so that a crash is found like that of a run.
        clock: wall clock, in which deadlines are given.
    """

    def __init__(
        self,
        pool: TransformPool,
        on_transformed: Callable[[Sequence[PendingValue]], Awaitable[None]],
        gate: RunGate,
        metrics: Metrics,
        clock: Clock,
        tuning: IngestTuning = TUNING.ingest,
    ) -> None:
        self._pool = pool
        self._on_transformed = on_transformed
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._tuning = tuning
        self._expected = Expectations(tuning.unknown_input_bytes, tuning.granted_s)
        self._payloads: dict[int, PendingValue] = {}
        self._queue = TransformQueue(self._expected, self._is_idle, tuning.room_interval_s)
        self._deadlines: list[tuple[int, int]] = []
        self._serials = count()
        self._ended: list[PendingValue] = []
        self._answering: set[InFlightAck] = set()
        self._prune_at = tuning.max_records_at_once
        self._busy = 0
        self._is_marking = False
        self._is_closing = False
        self._passing_on = asyncio.Lock()
        self._changed = asyncio.Event()
        self._work_added = asyncio.Event()
        self._granted = GrantedPayloads((), tuning.transformed_bytes)

    # --- called while reading ---------------------------------------------------------------------

    def reserve(self, payload: PendingValue) -> None:
        """Charge what a value takes while it waits, and the inputs that it is expected to become,
        to its record; call it before `add`, and before its record is charged to a share.
        """
        payload.reserve(self._expected.input_bytes(payload))

    def add(self, payload: PendingValue) -> None:
        """Let a value wait for a worker."""
        if payload.error is not None or payload.request.failure is not None:
            payload.release()
            bind_transformed(payload)
            self._ended.append(payload)
            self._changed.set()
            return
        ack_handle = payload.request.ack_handle
        if isinstance(ack_handle, InFlightAck):
            self._answering.discard(ack_handle)  # it was decompressed, and is not made yet
        payload.serial = serial = next(self._serials)
        self._payloads[serial] = payload
        self._queue.add(payload)
        self._metrics.transforms_waiting.inc()
        self._metrics.transforms_waiting_bytes.inc(payload.waiting_bytes)
        is_next = False
        if deadline_ms := payload.request.envelope.deadline_ms:
            heapq.heappush(self._deadlines, (deadline_ms, serial))
            is_next = self._deadlines[0][1] == serial
        if is_next or self._busy < len(self._pool.workers):
            self._changed.set()  # otherwise it is looked at when a worker has made something

    async def run_alone(self, payload: PendingValue) -> Request:
        """Make the inputs of a request that runs alone, while no worker is in the gate; return it.

        Raises:
            Fatal: see `run`.
        """
        self.reserve(payload)
        await self._pool.run([payload])
        return self._take_made(payload)

    def cancel(self, cancelling: Sequence[Request]) -> list[Request]:
        """End and return the requests that records cancel."""
        waiting = {payload.request: payload for payload in self._payloads.values()}
        found = find_cancelled(cancelling, waiting)
        self._end([waiting[request] for request in found], cancelled_failure(Stage.INGEST))
        return found

    async def passed_on(self) -> None:
        """Wait until the requests that no longer wait here have been sent: a record that cancels
        one of them must not overtake it.
        """
        async with self._passing_on:
            pass

    def drop_revoked(self) -> None:
        """End the requests whose partitions were revoked."""
        gone = [each for each in self._payloads.values() if each.request.ack_handle.revoked]
        self._end(gone, REVOKED)

    def close(self) -> None:
        """Let `run` end when all requests have been passed on."""
        self._is_closing = True
        self._changed.set()

    # --- tasks ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the workers busy, and pass on what they have made, until `close`.

        Raises:
            Fatal: see `headrace.transforms.workers.TransformThread`.
        """
        loop = asyncio.get_running_loop()

        def gather() -> None:
            """Wake this task when no worker has another payload, or after a moment."""
            # Passed on one by one, requests of quick transforms would also run one by one.
            if self._granted.is_open:
                loop.call_later(self._tuning.gathered_s, self._changed.set)
            else:
                self._changed.set()

        def wake() -> None:
            """Wake this task from the thread of a worker."""
            with suppress(RuntimeError):  # the loop is closed, so nothing waits
                loop.call_soon_threadsafe(gather)

        self._granted.on_made = wake
        async with asyncio.TaskGroup() as tasks:
            workers = [
                tasks.create_task(self._work(worker), name=f"transforms-{number}")
                for number, worker in enumerate(self._pool.workers)
            ]
            while not self._is_closing or self._payloads or self._ended:
                self._changed.clear()
                self._end_expired()
                self._grant()
                if not await self._pass_on():
                    await self._wait()
            for task in workers:
                task.cancel()

    async def _work(self, worker: TransformWorker) -> None:
        """Run the payloads that are granted on one worker."""
        while True:
            # What was granted before the gate began to mark must be granted again.
            while not self._granted.is_open or self._gate.is_marking != self._is_marking:
                self._changed.set()
                self._work_added.clear()
                await self._work_added.wait()
            self._busy += 1
            if self._is_marking:
                # What crashes the process must be named before a worker takes it.
                granted = [each.request for each in self._granted.waiting()]
                entry = await self._gate.enter(records_of(granted))
            else:
                entry = self._gate.begin()
            await worker.run(self._granted)
            self._gate.leave(entry)
            self._busy -= 1
            self._changed.set()

    async def _pass_on(self) -> bool:
        """Pass on requests that have ended, or whose inputs are made; return False if none has."""
        ended, self._ended = self._ended, []
        taken = self._granted.pop_made()
        made = [each for each in taken if self._payloads.pop(each.serial, None) is not None]
        for payload in made:
            self._forget(payload)
            self._take_made(payload)
        if ended or made:
            async with self._passing_on:
                await self._on_transformed([*ended, *made])
        if taken:
            self._granted.release(taken)
            self._work_added.set()
        return bool(ended or taken)

    def _take_made(self, payload: PendingValue) -> Request:
        payload.release()
        self._expected.learn(payload)
        if payload.took_s:
            self._metrics.transformed(payload.model, payload.took_s, payload.made_bytes)
        ack_handle = payload.request.ack_handle
        if isinstance(ack_handle, InFlightAck):
            self._answering.add(ack_handle)
        if len(self._answering) > self._prune_at:
            self._prune_answered()
        return bind_transformed(payload)

    def _prune_answered(self) -> None:
        self._answering = {each for each in self._answering if each.is_in_flight}
        self._prune_at = 2 * len(self._answering) + self._tuning.max_records_at_once

    async def _wait(self) -> None:
        """Wait until something was added, ended or made, a deadline passes, or there is room."""
        timeout_s: float | None = None
        if self._deadlines:
            due_s = self._deadlines[0][0] / 1000 - self._clock() / 1e6
            timeout_s = max(due_s, self._tuning.expiry_interval_s)
        if self._queue and not self._granted.waiting():
            # They wait for room, which an acknowledgement makes.
            interval_s = self._tuning.room_interval_s
            timeout_s = min(timeout_s or interval_s, interval_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    # --- which payload is next --------------------------------------------------------------------

    def _grant(self) -> None:
        """Grant payloads to the workers, those of different models in turn."""
        if self._gate.is_marking != self._is_marking:
            self._is_marking = self._gate.is_marking
            for unmarked in self._granted.withdraw():
                self._queue.add(unmarked)
        if not self._queue:
            return
        most = self._tuning.max_records_at_once
        if self._is_marking:
            # Workers that are in the gate have marked what was granted before.
            most = 0 if self._busy else self._tuning.marked_transforms
        before = self._granted.waiting()
        granted: list[PendingValue] = []
        workers = len(self._pool.workers)
        # A short time ahead, so that workers have no pause, and another model's turn is near.
        left_s = self._tuning.granted_s * workers - sum(map(self._expected.took_s, before))
        ahead_bytes = sum(map(self._queue.unreserved_bytes, before))
        count_ahead = len(before)
        while (
            count_ahead < most
            and (left_s > 0 or count_ahead < workers)
            and (payload := self._queue.pop_next(count_ahead, ahead_bytes)) is not None
        ):
            granted.append(payload)
            count_ahead += 1
            left_s -= self._expected.took_s(payload)
            ahead_bytes += self._queue.unreserved_bytes(payload)
        if granted:
            self._granted.add(granted)
            self._work_added.set()

    def _is_idle(self) -> bool:
        """Return True if nothing that was transformed is unanswered, so that nothing frees room."""
        self._prune_answered()
        return not (self._answering or self._busy)

    # --- requests that end while they wait --------------------------------------------------------

    def _end_expired(self) -> None:
        now_us = self._clock()
        late: list[PendingValue] = []
        while self._deadlines and self._deadlines[0][0] * 1000 <= now_us:
            payload = self._payloads.get(heapq.heappop(self._deadlines)[1])
            if payload is not None:
                late.append(payload)
        for payload in late:
            failure = deadline_passed(payload.request, now_us, Stage.INGEST)
            assert failure is not None
            self._end([payload], failure)
        if len(self._deadlines) > 2 * len(self._payloads) + self._tuning.max_records_at_once:
            self._deadlines = [each for each in self._deadlines if each[1] in self._payloads]
            heapq.heapify(self._deadlines)

    def _end(self, payloads: Sequence[PendingValue], failure: Failure) -> None:
        """Fail requests now, wherever their values are; what a worker makes of them is dropped."""
        for payload in payloads:
            del self._payloads[payload.serial]
            if not self._queue.remove(payload):
                self._granted.discard(payload)
            self._forget(payload)
            payload.release()
            payload.request.fail(failure)
        self._ended += payloads
        self._changed.set()

    def _forget(self, payload: PendingValue) -> None:
        self._metrics.transforms_waiting.dec()
        self._metrics.transforms_waiting_bytes.dec(payload.waiting_bytes)
