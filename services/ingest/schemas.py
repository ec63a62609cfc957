"""Payloads that wait for their schemas, which a schema registry holds.

A schema is fetched once, so payloads rarely wait. While the registry is unavailable they do, in
flight and charged to the shares of their models; what has no room there stays in the log. A payload
whose deadline passes meanwhile is answered then, and other models' requests go on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from headrace.clock import Clock
from headrace.delivery.cancelling import cancelled_failure, find_cancelled
from headrace.delivery.failures import REVOKED, deadline_passed
from headrace.delivery.inflight import InFlightAck
from headrace.errors import Rejected, Retriable
from headrace.models.inputs.framing import FramedSchemas
from headrace.models.version import ModelVersion
from headrace.primitives.backoff import Pauses
from headrace.primitives.timeouts import end_now
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.topics import Stage
from headrace.transforms.workers import PendingTransform
from headrace.tuning import TUNING, SchemaTuning

log = structlog.get_logger(__name__)


def find_unknown(version: ModelVersion, payload: bytes) -> int | None:
    """Return the id of the schema that must be fetched before a payload is transformed, or None."""
    records = version.records
    if records is None or records.framed is None:
        return None
    return records.framed.find_unknown(payload)


class SchemaWaits:
    """Payloads that wait for their schemas, and the task that fetches these.

    Args:
        on_fetched: receives payloads whose schemas are known, or whose requests have ended.
        clock: wall clock, in which deadlines are given.
    """

    def __init__(
        self,
        on_fetched: Callable[[Sequence[PendingTransform]], None],
        clock: Clock,
        tuning: SchemaTuning = TUNING.schemas,
    ) -> None:
        self._on_fetched = on_fetched
        self._clock = clock
        self._tuning = tuning
        self._waiting: OrderedDict[tuple[ModelVersion, int], list[PendingTransform]] = OrderedDict()
        self._alone: dict[PendingTransform, asyncio.Timeout] = {}
        self._next_deadline_ms = 0
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._closed = False

    def add(self, payload: PendingTransform) -> None:
        """Let a payload wait until its schema is known, or leave it in the log if it is leaving."""
        if self._closed or is_leaving(payload.request):  # a drain must not wait for the registry
            leave_in_log(payload.request)
            return
        key = (payload.version, _schema_id(payload))
        if key not in self._waiting:
            self._changed.set()
        self._waiting.setdefault(key, []).append(payload)
        deadline_ms = payload.request.envelope.deadline_ms
        if deadline_ms and not 0 < self._next_deadline_ms <= deadline_ms:
            self._next_deadline_ms = deadline_ms
            self._ending.set()

    async def run(self) -> None:
        """Fetch schemas until `close`."""
        async with asyncio.TaskGroup() as tasks:
            # Beside the fetching: a registry that hangs is waited for longer than deadlines are.
            tasks.create_task(self._end_late(), name="schemas-late")
            await self._fetch_until_closed()

    async def _end_late(self) -> None:
        """Pass on payloads that have ended, until `close`."""
        while not self._closed:
            self._ending.clear()
            self._pass_on_ended()
            pause_s: float | None = None
            if self._next_deadline_ms:
                left_s = self._next_deadline_ms / 1000 - self._clock() / 1e6
                pause_s = max(left_s, self._tuning.expiry_interval_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()
            except TimeoutError:
                pass

    async def _fetch_until_closed(self) -> None:
        pauses = Pauses(self._tuning.backoff)
        while not self._closed:
            self._changed.clear()
            if await self._fetch_all():
                pauses.reset()
                pause_s = None if not self._waiting else self._tuning.backoff.first_s
            else:
                pause_s = pauses.next_s()
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def fetch_alone(self, payload: PendingTransform) -> bool:
        """Wait for the schema of one payload, whose request runs alone; return False if it was
        left in the log.
        """
        try:
            async with asyncio.timeout(None) as within:
                self._alone[payload] = within
                self.drop_revoked()  # it may have left before
                await self._fetch_alone(payload)
        except TimeoutError:
            leave_in_log(payload.request)
            return False
        finally:
            del self._alone[payload]
        return True

    async def _fetch_alone(self, payload: PendingTransform) -> None:
        pauses = Pauses(self._tuning.backoff)
        while not self._end(payload):
            try:
                await _fetch(payload.version, _schema_id(payload))
            except Rejected as error:
                payload.error = error
            except Retriable as error:
                self._log_outage(payload.version, error)
                await pauses.sleep()
                continue
            return

    def cancel(self, cancelling: Sequence[Request]) -> list[Request]:
        """End and return the waiting requests that records cancel."""
        waiting = [each.request for payloads in self._waiting.values() for each in payloads]
        found = find_cancelled(cancelling, waiting)
        for request in found:
            request.fail(cancelled_failure(Stage.INGEST))
        if found:
            self._ending.set()
        return found

    def drop_revoked(self) -> None:
        """Leave payloads whose partitions were revoked, or are leaving, in the log."""
        for payload, within in self._alone.items():
            if is_leaving(payload.request):
                end_now(within)
        for key, payloads in list(self._waiting.items()):
            self._waiting[key] = [each for each in payloads if not is_leaving(each.request)]
            if not self._waiting[key]:
                del self._waiting[key]
            for payload in payloads:
                if is_leaving(payload.request):
                    leave_in_log(payload.request)

    def close(self) -> None:
        """Leave the payloads that wait in the log, for the next owners of their partitions."""
        self._closed = True
        self._changed.set()
        self._ending.set()
        for payloads in self._waiting.values():
            for payload in payloads:
                leave_in_log(payload.request)
        self._waiting.clear()

    async def _fetch_all(self) -> bool:
        """Fetch the schemas that payloads wait for, the newest first; return False if the registry
        was unavailable.
        """
        failures = 0
        for key in reversed(list(self._waiting)):
            if self._closed:
                break
            if key not in self._waiting:
                continue  # all its payloads have ended meanwhile
            error: Rejected | None = None
            try:
                await _fetch(*key)
            except Rejected as refused:
                error = refused
            except Retriable as outage:
                self._log_outage(key[0], outage)
                if key in self._waiting:
                    self._waiting.move_to_end(key, last=False)
                failures += 1
                if failures == self._tuning.failures_per_round:
                    break
                continue
            payloads = self._waiting.pop(key, [])
            for payload in payloads:
                payload.error = error
            self._on_fetched(payloads)
        return not failures

    def _pass_on_ended(self) -> None:
        """Pass on payloads whose deadline has passed, or whose partition was revoked."""
        ended: list[PendingTransform] = []
        self._next_deadline_ms = 0
        for key, payloads in list(self._waiting.items()):
            left = []
            for payload in payloads:
                if self._end(payload):
                    ended.append(payload)
                    continue
                left.append(payload)
                deadline_ms = payload.request.envelope.deadline_ms
                if deadline_ms and not 0 < self._next_deadline_ms <= deadline_ms:
                    self._next_deadline_ms = deadline_ms
            self._waiting[key] = left
            if not left:
                del self._waiting[key]
        self._on_fetched(ended)

    def _end(self, payload: PendingTransform) -> bool:
        """Fail a request that cannot be answered with a result any more; return whether it was."""
        request = payload.request
        if request.failure is not None:
            return True
        failure = REVOKED if request.ack_handle.revoked else None
        failure = failure or deadline_passed(request, self._clock(), Stage.INGEST)
        if failure is not None:
            request.fail(failure)
        return failure is not None

    def _log_outage(self, version: ModelVersion, error: Retriable) -> None:
        log.warning(Event.SCHEMAS_DELAYED, model=version.name, reason=str(error))


async def _fetch(version: ModelVersion, schema_id: int) -> None:
    await _framed(version).fetch(schema_id)


def _schema_id(payload: PendingTransform) -> int:
    schema_id = _framed(payload.version).read_id(payload.value)
    assert schema_id is not None
    return schema_id


def _framed(version: ModelVersion) -> FramedSchemas:
    assert version.records is not None
    assert version.records.framed is not None
    return version.records.framed


def leave_in_log(request: Request) -> None:
    """Leave a request that waits in the log, for the next owner of its partition."""
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, InFlightAck)
    ack_handle.leave(request.envelope)


def is_leaving(request: Request) -> bool:
    """Return True if a request that still waits is left in the log."""
    ack_handle = request.ack_handle
    return isinstance(ack_handle, InFlightAck) and ack_handle.leaving
