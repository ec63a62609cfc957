"""Read the values of requests that came by reference, from the topic of requests.

A large value travels through no topic between stages (`refer_to_source`): its source record holds
it. The process that needs the value reads that record by its offset. Where a model runs, this is
done as soon as the request has arrived, so that the values of the next batch are read while a batch
runs. Partitions do not wait for each other.

The value of a request with a claim is not in its record, but in a store. It is fetched from there
once more, after ingest has fetched it to check it; each by itself, so that no other request waits
for its store.

A record may be gone: retention or compaction removed it, or its topic was made anew, which its
timestamp, key and size show. Its request then fails, and its caller can send it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import structlog

from headrace.claims.fetcher import ClaimFetcher
from headrace.claims.stores import ClaimUnavailable
from headrace.clock import wall_clock_us
from headrace.crash_isolation.isolation import IsolatedAck, is_isolated
from headrace.delivery.failures import REVOKED, deadline_exceeded, rejection
from headrace.delivery.inflight import InFlightAck, record_bytes
from headrace.errors import Code, Rejected, Retriable
from headrace.log.errors import UnknownPartition
from headrace.log.port import Log, Record, TopicPartition, Wanted
from headrace.primitives.backoff import Backoff, Pauses
from headrace.primitives.stage_tasks import StageTasks
from headrace.primitives.timeouts import end_now
from headrace.protocol.claims import refuse_claim
from headrace.protocol.codec import restore_value
from headrace.protocol.messages import Failure, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.channels import ReceiveStream, SendStream
from headrace.transport.shared_values import SharedValuesReader
from headrace.tuning import TUNING, TransportTuning

log = structlog.get_logger(__name__)
_offset = attrgetter("offset")


class ClaimedValues:
    """Fetches the values that are in stores, each by itself.

    Args:
        fetcher: fetches objects; None where no claims are allowed.
        stage: failures name it.
        is_stopping: returns True once the process stops.
    """

    def __init__(
        self, fetcher: ClaimFetcher | None, stage: Stage, is_stopping: Callable[[], bool]
    ) -> None:
        self._fetcher = fetcher
        self._is_stopping = is_stopping
        self._stage = stage
        self._fetching: dict[Request, asyncio.Timeout] = {}
        self._held: dict[Request, InFlightAck] = {}

    async def fetch(self, request: Request) -> None:
        """Set the value of a request to the object of its claim, or fail the request. A request
        whose object is not here at a stop keeps its claim, and is left in the log.
        """
        try:
            if self._fetcher is None or request.envelope.claim is None:
                raise refuse_claim("none, since claims.allowed is empty", "a claim")
            claim = self._fetcher.read_claim(request.envelope.claim)
            due_ms = request.envelope.deadline_ms
            left_s = due_ms / 1000 - wall_clock_us() / 1e6
            async with asyncio.timeout(left_s if due_ms else None) as within:
                self._fetching[request] = within
                self._note_revocation(request, within)
                content = await self._fetcher.fetch(claim)
            restore_value(request, content)
        except TimeoutError:
            if request.ack_handle.revoked:
                self._end(request, REVOKED)
            elif request in self._held and self._is_stopping():
                # It stays held, so that the last commit does not wait for it.
                del self._held[request]
            else:
                self._end(request, deadline_exceeded(due_ms, 0.0, self._stage))
        except ClaimUnavailable as error:
            self._end(request, Failure(Code.INTERNAL, str(error), self._stage))
        except Rejected as error:
            self._end(request, rejection(error, self._stage))
        finally:
            self._fetching.pop(request, None)
            held = self._held.pop(request, None)
            if held is not None:
                held.release()

    def _note_revocation(self, request: Request, within: asyncio.Timeout) -> None:
        ack_handle = request.ack_handle
        if isinstance(ack_handle, IsolatedAck):
            ack_handle = ack_handle.record_ack
        if ack_handle.revoked:
            end_now(within)
        elif isinstance(ack_handle, InFlightAck) and ack_handle.assignment.leaving:
            if request not in self._held:
                self._held[request] = ack_handle
                ack_handle.hold()
            if self._is_stopping():
                end_now(within)

    def _end(self, request: Request, failure: Failure) -> None:
        request.referenced = 0
        if request.failure is None:
            request.fail(failure)

    def drop_revoked(self) -> None:
        """End the fetches of claims whose partitions were revoked. A drain does not wait for those
        of partitions that are leaving, and a stop ends them.
        """
        for request, within in self._fetching.items():
            self._note_revocation(request, within)


class _SourceReader:
    """Reads the values of requests from their source records, by partition and offset.

    Args:
        log_: an open log.
        topic: the topic of requests.
        stage: failures of requests whose records are gone name it.
        metrics: counts the values.
    """

    def __init__(
        self, log_: Log, topic: str, stage: Stage, metrics: Metrics, tuning: TransportTuning
    ) -> None:
        self._log = log_
        self._topic = topic
        self._stage = stage
        self._metrics = metrics
        self._tuning = tuning
        self._backoff = Backoff(tuning.source_retry_first_s, tuning.source_retry_max_s)
        self._surplus = _Surplus(tuning.source_surplus_bytes)
        self._turns: dict[int, asyncio.Lock] = {}
        self._unread: dict[int, dict[Request, None]] = {}

    async def read(self, partition: int, requests: list[Request]) -> None:
        """Read the values of requests of one partition.

        Reads of a partition follow each other, because a fetch returns whole record batches, which
        often hold the values that the next read needs. Requests that come during a read are read
        together after it.
        """
        requests = self._restore_kept(requests)
        if not requests:
            return
        unread = self._unread.setdefault(partition, {})
        unread.update(dict.fromkeys(requests))
        try:
            async with self._turns.setdefault(partition, asyncio.Lock()):
                while not unread.keys().isdisjoint(requests):
                    await self._read_next(TopicPartition(self._topic, partition), unread)
        finally:
            for request in requests:
                unread.pop(request, None)

    async def _read_next(self, partition: TopicPartition, unread: dict[Request, None]) -> None:
        """Read as many values as one fetch may return, and remove their requests from `unread`."""
        chosen: list[Request] = []
        size_bytes = 0
        # In the log's order: the batches of two models may have every second record each.
        for request in sorted(unread, key=_offset):
            size_bytes += request.referenced
            if chosen and size_bytes > self._tuning.source_fetch_bytes:
                break
            chosen.append(request)
        for wanted in self._ranges(self._restore_kept(chosen)):
            await self._read_range(partition, wanted)
        for request in chosen:
            unread.pop(request, None)

    def _restore_kept(self, requests: Sequence[Request]) -> list[Request]:
        """Set the values that came with others; return the requests whose values did not."""
        left: list[Request] = []
        restored: list[Request] = []
        for request in requests:
            record = self._surplus.pop(request.partition, request.offset)
            # A kept record may be of a topic that has been made anew since.
            if record is None or not _is_source_of(request, record):
                left.append(request)
            elif self._restore(request, record):
                restored.append(request)
        self._count(restored, "kept")
        return left

    async def _read_range(self, partition: TopicPartition, wanted: Sequence[Request]) -> None:
        records = await self._fetch(partition, wanted)
        if records is None:
            for request in wanted:
                request.fail(REVOKED)
            return
        found = {record.offset: record for record in records}
        restored: list[Request] = []
        for request in wanted:  # after a rebalance the same one may have come twice
            record = found.get(request.offset)
            if record is None:
                self._lose(request, "it is no longer in the log")
            elif not _is_source_of(request, record):
                self._lose(request, "another record has its offset")
            elif self._restore(request, record):
                restored.append(request)
        self._count(restored, "read")
        taken = {request.offset for request in wanted}
        self._surplus.add([each for each in records if each.offset not in taken])

    def _ranges(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Yield requests that are read together: they lie near each other in the log."""
        chosen: list[Request] = []
        for request in requests:
            if chosen and request.offset - chosen[-1].offset > self._tuning.source_near_offsets:
                yield chosen
                chosen = []
            chosen.append(request)
        if chosen:
            yield chosen

    async def _fetch(
        self, partition: TopicPartition, wanted: Sequence[Request]
    ) -> Sequence[Record] | None:
        """Return the records of requests, and of others that lie between them as many as fit into
        `source_fetch_bytes`; None if all requests are revoked.
        """
        overhead_bytes = self._tuning.source_record_overhead_bytes
        max_bytes = sum([request.referenced + overhead_bytes for request in wanted])
        # Values that lie between these are charged to nothing here, and may be of any size.
        needed = Wanted({each.offset for each in wanted}, self._tuning.source_fetch_bytes)
        pauses = Pauses(self._backoff)
        while not all(request.ack_handle.revoked for request in wanted):
            try:
                return await self._log.fetch(
                    partition, wanted[0].offset, wanted[-1].offset, max_bytes, needed
                )
            except UnknownPartition:
                return ()
            except Retriable as error:
                log.warning(
                    Event.SOURCE_VALUES_DELAYED, partition=str(partition), reason=str(error)
                )
                self._metrics.retried("fetch")
                await pauses.sleep()
        return None

    def _restore(self, request: Request, record: Record) -> bool:
        """Set the value of a request; return False if the request fails instead."""
        if record.value is None:  # no request refers to that, but a dead letter is made of it
            return True
        try:
            restore_value(request, record.value)
        except Rejected as error:
            self._lose(request, f"its value is another one: {error.message}")
            return False
        return True

    def _count(self, restored: Sequence[Request], outcome: str) -> None:
        if restored:
            self._metrics.source_values.labels(outcome).inc(len(restored))
            size_bytes = sum([len(request.value or b"") for request in restored])
            self._metrics.source_value_bytes.inc(size_bytes)

    def _lose(self, request: Request, reason: str) -> None:
        where = f"{self._topic}/{request.partition}"
        log.error(Event.SOURCE_VALUE_LOST, partition=where, offset=request.offset, reason=reason)
        self._metrics.source_values.labels("lost").inc()
        request.referenced = 0
        if request.failure is None:
            request.fail(
                Failure(
                    Code.INTERNAL,
                    f"{where} offset {request.offset}: expected the request's record, but {reason}",
                    self._stage,
                )
            )


def _share_all(one: Request, other: Request) -> bool:
    """Return True if two requests share all that decides whether their values are needed, as those
    of one record mostly do.
    """
    return (
        one.inputs is other.inputs
        and one.places is other.places
        and one.referenced == other.referenced
        and one.envelope is other.envelope
        and one.model is other.model
        and one.version is other.version
        and one.failure is other.failure
    )


class SourceValues:
    """Sets the values of requests that came by reference, before a stage gets these requests.

    Args:
        log_: an open log.
        topic: the topic of requests.
        is_needed: returns True if this process needs the value of a request that refers to it, by
            its model, headers, inputs and failure; asked once for requests that share these.
        stage: the stage that needs values; failures of requests whose records are gone name it.
        end_isolation: called with isolated requests that end here because their records are gone.
        metrics: counts the values.
        fetcher: fetches the objects of claims; None where none are allowed.
        tuning: tuning values.
        is_stopping: returns True once the process stops.
        shared: reads values from shared memory; None if there are none.
    """

    def __init__(
        self,
        log_: Log,
        topic: str,
        is_needed: Callable[[Request], bool],
        stage: Stage,
        end_isolation: Callable[[Sequence[Request]], None],
        metrics: Metrics,
        tuning: TransportTuning = TUNING.transport,
        fetcher: ClaimFetcher | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        shared: SharedValuesReader | None = None,
    ) -> None:
        self._shared = shared
        self._is_needed = is_needed
        self._end_isolation = end_isolation
        self._source = _SourceReader(log_, topic, stage, metrics, tuning)
        self._claimed = ClaimedValues(fetcher, stage, is_stopping)

    def missing(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests whose values have to be read."""
        found: list[Request] = []
        last: Request | None = None
        is_needed = False
        for request in requests:
            if not request.referenced:
                continue
            if last is None or not _share_all(last, request):
                is_needed = self._is_needed(request)
                last = request
            if is_needed:
                found.append(request)
        return found

    def not_shared(self, requests: Sequence[Request]) -> list[Request]:
        """Read the missing values that are in shared memory; return the requests of the others."""
        missing = self.missing(requests)
        return self._shared.read(missing) if self._shared is not None and missing else missing

    def missing_bytes(self, requests: Sequence[Request]) -> int:
        """Return the bytes to be read. They are charged to the records by which the requests came
        as soon as those are admitted, so that nothing else takes their room.
        """
        return sum([request.referenced for request in self.missing(requests)])

    def left(self, requests: Sequence[Request]) -> list[Request]:
        """Return those of requests that were read whose objects were not fetched since the process
        stops: they stay in the log, for the next owners of their partitions.
        """
        return [each for each in requests if each.envelope.claim is not None and each.referenced]

    def drop_revoked(self) -> None:
        """End the fetches of claims whose partitions were revoked."""
        self._claimed.drop_revoked()

    async def pump(
        self,
        incoming: ReceiveStream[list[Request]],
        outgoing: SendStream[list[Request]],
        ended: SendStream[list[Request]] | None = None,
    ) -> None:
        """Send all that a stream brings, and close those that it is sent to at its end.

        What comes from a partition is sent in its order: a record that cancels a request must not
        overtake it. Partitions do not wait for each other.

        Args:
            incoming: where requests come from, each chunk from one partition.
            outgoing: where they go, with their values.
            ended: where those go that fail because their records are gone; None if all have failed
                before, so that a value is only their dead letter's.
        """
        tasks = StageTasks()
        last: dict[int, asyncio.Task[None]] = {}
        async with tasks:
            while (chunk := await incoming.receive()) is not None:
                await self._send_when_read(chunk, tasks, last, outgoing, ended)
                # Otherwise the last chunk would stay in memory while the next one is awaited.
                del chunk
        outgoing.close()
        if ended is not None:
            ended.close()

    async def _send_when_read(
        self,
        chunk: list[Request],
        tasks: StageTasks,
        last: dict[int, asyncio.Task[None]],
        outgoing: SendStream[list[Request]],
        ended: SendStream[list[Request]] | None,
    ) -> None:
        """Send a chunk, or start a task that does once the values are read.

        `last` has the last task of each partition.
        """
        missing = self.not_shared(chunk)
        if any(each.envelope.claim is not None for each in missing):
            chunk = await self._pass_claims(chunk, missing, tasks, outgoing, ended)
            missing = self.missing(chunk)
        if not chunk:
            return
        partition = chunk[0].partition
        before = last.pop(partition, None)
        if before is not None and before.done():
            before = None
        if not missing and before is None:
            await outgoing.send(chunk)
            return
        work = self._complete(chunk, missing, before, outgoing, ended)
        if is_isolated(chunk[0]):  # then all are, and nothing else may run meanwhile
            await work
            return
        task = tasks.start(work, f"read-source-{partition}")
        if task is not None:
            last[partition] = task

    async def _pass_claims(
        self,
        chunk: list[Request],
        missing: list[Request],
        tasks: StageTasks,
        outgoing: SendStream[list[Request]],
        ended: SendStream[list[Request]] | None,
    ) -> list[Request]:
        """Start to fetch the objects of claims; return the other requests of the chunk."""
        claimed = {request for request in missing if request.envelope.claim is not None}
        for request in claimed:
            # A slow store delays no other request, nor one that cancels this one.
            work = self._complete([request], [request], None, outgoing, ended)
            if is_isolated(request):
                await work
            else:
                tasks.start(work, f"read-claim-{request.partition}")
        return [request for request in chunk if request not in claimed]

    async def _complete(
        self,
        chunk: list[Request],
        missing: list[Request],
        before: asyncio.Task[None] | None,
        outgoing: SendStream[list[Request]],
        ended: SendStream[list[Request]] | None,
    ) -> None:
        """Read missing values, and send the chunk after the one before it."""
        await self.read(missing)
        if before is not None:
            await asyncio.wait([before])
        if left := set(self.left(missing)):
            for request in left:
                if isinstance(request.ack_handle, IsolatedAck):
                    request.ack_handle.leave()
            chunk = [request for request in chunk if request not in left]
            missing = [request for request in missing if request not in left]
        if not chunk:
            return
        if ended is None:
            await outgoing.send(chunk)
            return
        lost = [request for request in missing if request.failure is not None]
        if len(lost) < len(chunk):
            gone = set(lost)
            await outgoing.send([request for request in chunk if request not in gone])
        if lost and is_isolated(lost[0]):
            self._end_isolation(lost)
        if lost:
            await ended.send(lost)

    async def read(self, requests: Sequence[Request]) -> None:
        """Set the values of requests and the inputs in them; fail requests whose records are gone.

        While no broker answers, this retries with back-off until cancelled, or until all requests
        that are read together are revoked: these fail as well, since nothing may run them.
        """
        claimed = [request for request in requests if request.envelope.claim is not None]
        if claimed:
            requests = [request for request in requests if request.envelope.claim is None]
            async with asyncio.TaskGroup() as tasks:
                for request in claimed:
                    name = f"read-claim-{request.partition}"
                    tasks.create_task(self._claimed.fetch(request), name=name)
        partitions: dict[int, list[Request]] = {}
        for request in requests:
            partitions.setdefault(request.partition, []).append(request)
        if len(partitions) == 1:
            ((partition, wanted),) = partitions.items()
            await self._source.read(partition, wanted)
            return
        async with asyncio.TaskGroup() as tasks:
            for partition, wanted in partitions.items():
                name = f"read-source-{partition}"
                tasks.create_task(self._source.read(partition, wanted), name=name)


def _is_source_of(request: Request, record: Record) -> bool:
    """Return True unless the record shows that it is another one at the offset of the request."""
    size_bytes = request.referenced  # 0: not known, of a request that has failed behind its run
    return (
        (not size_bytes or len(record.value or b"") == size_bytes)
        and record.timestamp == request.timestamp_ms
        and record.key == request.key
    )


class _Surplus:
    """Records that came with others and that another request may need soon: a fetch returns whole
    record batches, whose requests may be spread over several batches of a model.

    Args:
        max_bytes: of all records together, see `record_bytes`; beyond it the oldest are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: dict[tuple[int, int], Record] = {}
        self._size_bytes = 0

    def pop(self, partition: int, offset: int) -> Record | None:
        """Remove and return a record; None if it is not here."""
        record = self._records.pop((partition, offset), None)
        if record is not None:
            self._size_bytes -= record_bytes(record)
        return record

    def add(self, records: Iterable[Record]) -> None:
        """Keep records, and drop the oldest if there are too many."""
        for record in records:
            self.pop(record.partition, record.offset)
            self._records[record.partition, record.offset] = record
            self._size_bytes += record_bytes(record)
        while self._size_bytes > self._max_bytes:
            self.pop(*next(iter(self._records)))
