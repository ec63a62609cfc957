"""Quarantine: writes crash markers, and runs suspects alone after unclean ends.

`headrace.crash_isolation.poison_search` decides, this module acts: `QuarantineGate` writes the
markers; `MarkedReading` holds what is read until they are written; `IsolatedRuns` delivers the
suspects again, one at a time. Markers are valid only with two orders of steps, which
`headrace.crash_isolation.run_gate` keeps:

- careful: the marker of what is read or run is written and acknowledged → it begins → it ends →
  the next marker may leave it out;
- alone: nothing else is inside → the marker that one request runs alone is acknowledged → it runs →
  it has survived → others enter, marked.

Normally a partition costs one marker when it is assigned and one when it is released, and a record
costs nothing. No partition is ever held back because of another.

The source calls `on_assigned` and `on_revoked` at a rebalance, and `forget_answered` while reading;
`MarkedReading.admit` and `leave` when a stage receives records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog

from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.consumer.source_settings import SourceSettings
from headrace.crash_isolation.isolation import Isolated, IsolatedAck, Isolation
from headrace.crash_isolation.markers import CrashMarkers, Owner, process_name
from headrace.crash_isolation.poison_search import Alone, CrashMarker, PoisonSearch
from headrace.crash_isolation.run_gate import Entry, RunGate
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Retriable
from headrace.log.port import Consumer, TopicPartition
from headrace.primitives.backoff import Backoff, Pauses
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class IsolatedRuns:
    """Parked records: delivered again one at a time, each to run alone.

    Args:
        ready: queue through which the first stage receives them.
        isolation: returns the crash-isolation state of a partition.
        on_ended: called when the requests of a record have run, or it was revoked before.
    """

    def __init__(
        self,
        ready: ReadyQueue,
        isolation: Callable[[TopicPartition], Isolation],
        on_ended: Callable[[Isolated], None],
    ) -> None:
        self._ready = ready
        self._isolation = isolation
        self._on_ended = on_ended
        self._parked: deque[Isolated] = deque()
        self._left: list[Isolated] = []
        self._current: Isolated | None = None

    def park(self, isolated: Isolated) -> None:
        """Add a suspect that was admitted."""
        self._parked.append(isolated)
        self._deliver_next()

    def offsets(self, assignment: AssignedPartition) -> set[int]:
        """Return the offsets of the records that are parked, run alone now, or were left in the
        log.
        """
        records = [*self._parked, *self._left, self._current]
        return {each.record.offset for each in records if each and each.assignment is assignment}

    def end_isolation(self, requests: Sequence[Request]) -> None:
        """Make isolated requests that have ended, however, ordinary ones; let the next one run."""
        for request in requests:
            ack_handle = request.ack_handle
            assert isinstance(ack_handle, IsolatedAck)
            # From here on it is an ordinary request, answered together with others.
            request.ack_handle = ack_handle.record_ack
            ack_handle.isolated.open_requests -= 1
            if not ack_handle.isolated.open_requests:
                self.end(ack_handle.isolated)

    def end(self, isolated: Isolated) -> None:
        """End the run of a record, and deliver the next one."""
        if isolated is not self._current:
            return
        self._current = None
        if not isolated.is_delivered:
            isolated.ack_handle.ack()  # it is revoked, and gives its bytes back
        if isolated.is_left:
            held = [each for each in self._left if not each.assignment.revoked]
            self._left = [*held, isolated]
        # Before the next one is delivered: its run must see this one's result.
        self._on_ended(isolated)
        self._deliver_next()

    def _deliver_next(self) -> None:
        """Deliver the next parked record again, unless another one is running alone."""
        while self._current is None and self._parked:
            isolated = self._parked.popleft()
            if isolated.ack_handle.revoked:
                isolated.ack_handle.ack()  # which gives its bytes back
                continue
            self._current = isolated
            isolation = self._isolation(isolated.assignment.partition)
            isolation = isolation._replace(isolated=isolated)
            self._ready.put_isolated(
                PolledRecords(isolated.assignment, [isolated.record], isolation)
            )
        self._ready.awaits_isolated = bool(self._parked)
        self._ready.notify()


class MarkedReading:
    """Reading of a stage while the gate marks what is inside: each chunk enters and leaves it.

    Args:
        gate: gate that reading enters.
        isolation: returns the crash-isolation state of a partition.
        on_ended: called when an isolated record was read and no model runs for it.
        marked_records: most records that one marker can name.

    Attributes:
        is_idle: False from when the stage is to receive something, which may have to wait for a
            lone run, until it has read that.
    """

    def __init__(
        self,
        gate: RunGate,
        isolation: Callable[[TopicPartition], Isolation],
        on_ended: Callable[[Isolated], None],
        metrics: Metrics,
        marked_records: int,
    ) -> None:
        self._gate = gate
        self._isolation = isolation
        self._on_ended = on_ended
        self._metrics = metrics
        self._marked_records = marked_records
        self._entry: Entry | None = None
        self._isolated: Isolated | None = None
        self.is_idle = True

    def divide(self, polled: PolledRecords) -> Iterator[PolledRecords]:
        """Yield parts of polled records that are small enough to be marked, while careful."""
        if not self._gate.is_marking:
            yield polled
            return
        isolation = self._isolation(polled.assignment.partition)
        marked = self._marked_records
        for start in range(0, len(polled.records), marked):
            records = polled.records[start : start + marked]
            yield PolledRecords(polled.assignment, records, isolation)

    async def admit(self, polled: PolledRecords) -> PolledRecords:
        """Return what the stage receives now, once it is marked as being read."""
        self.is_idle = False
        partition = polled.assignment.partition
        isolation = polled.isolation or self._isolation(partition)
        isolated = isolation.isolated
        if isolated is not None:
            await self._gate.enter_alone(Alone(partition, isolated.record.offset, 0))
            self._isolated = isolated
            # It may have been revoked while it waited for the others to leave.
            isolated.is_delivered = not isolated.ack_handle.revoked
            return polled if isolated.is_delivered else polled._replace(records=())
        self._report_poisoned(polled, isolation)
        # Suspects are parked and not read now, so that they are not marked either.
        offsets = [one.offset for one in polled.records if one.offset not in isolation.suspects]
        self._entry = await self._gate.enter([(partition, offset) for offset in offsets])
        return polled._replace(isolation=isolation)

    def leave(self) -> None:
        """Leave the gate: the stage has read what it received last and passed it on."""
        self.is_idle = True
        if self._entry is not None:
            self._gate.leave(self._entry)
            self._entry = None
        isolated, self._isolated = self._isolated, None
        if isolated is None:
            return
        if not isolated.open_requests:
            self._on_ended(isolated)  # no model runs for it, here or at all
        self._gate.leave_alone()

    def _report_poisoned(self, polled: PolledRecords, isolation: Isolation) -> None:
        offsets = {record.offset for record in polled.records} if isolation.poisoned else ()
        for offset, index in sorted(isolation.poisoned):
            if offset in offsets:
                self._metrics.poisoned.inc()
                record = f"{polled.assignment.partition}/{offset}"
                log.error(Event.REQUEST_POISONED, record=record, place=index)


class QuarantineGate:
    """Quarantine of one source.

    Args:
        markers: store of the crash markers.
        tracker: in-flight tracker of the source.
        settings: settings of the source; without `max_attempts` there are no marks and no suspects.
        ready: queue through which the first stage receives parked records.

    Attributes:
        gate: gate that reading and runs enter.
        reading: entering and leaving of the gate by the first stage.
    """

    def __init__(
        self,
        markers: CrashMarkers,
        tracker: InFlightTracker,
        metrics: Metrics,
        settings: SourceSettings,
        ready: ReadyQueue,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._tuning = tuning
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)
        self._markers = markers
        self._tracker = tracker
        self._metrics = metrics
        self._settings = settings
        self._ready = ready
        self._member = ""
        self._search = PoisonSearch(settings.max_attempts)
        self._partitions: set[TopicPartition] = set()
        self._isolated_runs = IsolatedRuns(ready, self._isolation, self._on_run_ended)
        self._outdated = asyncio.Event()
        self._next_search_s = 0.0
        self.gate = RunGate(self._write_until_kept)
        self.reading = MarkedReading(
            self.gate, self._isolation, self._isolated_runs.end, metrics, tuning.marked_records
        )

    @property
    def is_active(self) -> bool:
        """True if an unclean end is not yet resolved, so that `forget_answered` is needed."""
        return self._search.is_active

    # --- the group ---------------------------------------------------------------------------

    async def remove_dead_members(self, topic: str) -> None:
        """Remove dead members before joining the group, so that they do not delay it."""
        if not self._settings.max_attempts:
            return
        try:
            await self._markers.remove_dead_members(topic)
        except Retriable as error:
            log.warning(Event.CRASH_MARKER_DELAYED, reason=str(error))

    async def on_assigned(
        self, consumer: Consumer, progresses: Mapping[TopicPartition, AckedOffsets]
    ) -> None:
        """Restore the state of partitions; return once they are marked as being read.

        Raises:
            LogUnavailable: the markers cannot be read or written now.
        """
        if not self._settings.max_attempts:
            return
        self._member = consumer.member_id
        found = {
            each: self._unless_own(*marked)
            for each, marked in (await self._markers.read(list(progresses))).items()
        }
        unclean = [
            each
            for each, marker in found.items()
            if marker.is_open or marker.ends or marker.suspects or marker.attempts
        ]
        ends = await consumer.end_offsets(unclean) if unclean else {}
        for partition, progress in progresses.items():
            self._search.restore(partition, found[partition], progress, ends.get(partition, 0))
            self._partitions.add(partition)
        # Mark the partitions as open before anything is read: an end from here on is noticed.
        self._apply_search()
        await self._write()
        if self._search.is_careful:  # a first unclean end changes nothing
            names = [str(each) for each in unclean]
            log.warning(
                Event.QUARANTINE_STARTED, partitions=names, offsets=self._search.suspect_count
            )
        self._metrics.isolated_crashes.inc(
            sum(marker.alone is not None for marker in found.values())
        )

    def _unless_own(self, marker: CrashMarker, owner: Owner) -> CrashMarker:
        """Return the marker as if closed, if this member wrote it: no process has ended since, and
        only the closing marker was not written in time, or the marker of a retried assignment.
        """
        if owner.member != self._member:
            return marker
        return marker._replace(is_open=False, running=(), alone=None)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Mark partitions as released cleanly, at a revocation or when the process ends.

        Call it when requests in flight are answered or revoked. Those still running are no
        suspects: if one ends this process, that is an unclean end of the partitions it still holds;
        if one ends the next owner's process, that is an unclean end of this partition.
        """
        if not self._settings.max_attempts:
            return
        ours = [each for each in partitions if each in self._partitions]
        for partition in ours:
            self._forget_answered_of(partition)
        markers = {each: self._search.closing_marker(each) for each in ours}
        for partition in ours:
            # Forget it before writing, so that the closing marker is the last one.
            self._search.forget(partition)
            self._partitions.discard(partition)
        self._apply_search()
        try:
            async with asyncio.timeout(self._tuning.closing_marker_timeout_s):
                await self._markers.write(markers, Owner(self._member, process_name()))
        except (Retriable, TimeoutError) as error:
            log.warning(Event.CRASH_MARKER_DELAYED, reason=str(error) or "no answer in time")

    # --- reading -----------------------------------------------------------------------------

    async def forget_answered(self, consumer: Consumer) -> None:
        """Forget offsets answered meanwhile; call before each poll while `is_active`."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_search_s:
            return
        self._next_search_s = now_s + self._tuning.search_interval_s
        # After the last record of a partition there may be offsets without records.
        is_through = not self._ready and self.reading.is_idle
        for partition in self._partitions:
            try:
                self._forget_answered_of(
                    partition, await consumer.position(partition) if is_through else 0
                )
            except Retriable:
                continue  # revoked this moment; the next call finds it
        self._apply_search()

    def _forget_answered_of(self, partition: TopicPartition, position: int = 0) -> None:
        assignment = self._tracker.get(partition)
        if assignment is None:
            return  # lost to another owner; the revocation follows
        progress = assignment.progress
        committed = assignment.committed.offset if self._settings.commits else progress.base
        passed = max(assignment.last_delivered + 1, position)
        offsets = self._isolated_runs.offsets(assignment)
        self._search.forget_answered(partition, progress, committed, passed, offsets)

    def _isolation(self, partition: TopicPartition) -> Isolation:
        return Isolation(
            self._search.poisoned(partition),
            self._search.suspects(partition),
            self._isolated_runs.park,
            runs=self._settings.runs,
        )

    # --- running alone -----------------------------------------------------------------------

    def end_isolation(self, requests: Sequence[Request]) -> None:
        """Make isolated requests that have ended, however, ordinary ones; let the next one run."""
        self._isolated_runs.end_isolation(requests)

    def _on_run_ended(self, isolated: Isolated) -> None:
        # A record that was revoked before its delivery, or left in the log, did not run, and the
        # search has forgotten the partition of one that was revoked since.
        has_run = isolated.is_delivered and not isolated.is_left
        if has_run and not isolated.ack_handle.revoked:
            self._search.note_survived(isolated.assignment.partition, isolated.record.offset)
        self._apply_search()

    # --- markers -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Write changed markers in the background, until cancelled."""
        while True:
            await self._outdated.wait()
            self._outdated.clear()
            await self._write_until_kept()
            # Only once the log holds no "alone" marker: an unclean end caused by an unmarked run
            # would otherwise count against that request.
            if self.gate.is_marking and not self._search.is_careful:
                self.gate.is_marking = False
                log.info(Event.QUARANTINE_ENDED)

    def _apply_search(self) -> None:
        """Apply the current state of the search to gate, metrics and markers."""
        self.gate.is_marking = self.gate.is_marking or self._search.is_careful
        self._metrics.quarantined.set(self._search.suspect_count)
        self._outdated.set()

    async def _write(self) -> None:
        gate = self.gate
        markers = {
            each: self._search.open_marker(each, gate.running(each), gate.alone)
            for each in self._partitions
        }
        await self._markers.write(markers, Owner(self._member, process_name()))

    async def _write_until_kept(self) -> None:
        pauses = Pauses(self._backoff)
        while True:
            try:
                await self._write()
            except Retriable as error:
                log.warning(Event.CRASH_MARKER_DELAYED, reason=str(error))
                await pauses.sleep()
            else:
                return
