"""Write and read the `batches` topic between a batcher and an executor in other processes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from headrace.clock import wall_clock_us
from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.crash_isolation.isolation import Isolation, is_isolated
from headrace.delivery.failures import poisoned_failure, rejection, split_ended
from headrace.delivery.inflight import AssignedPartition, InFlightAck, ack_all
from headrace.delivery.producing import deliver, refused_for_size
from headrace.errors import Rejected
from headrace.log.port import NewRecord, Producer, Record, TopicPartition
from headrace.models.lifecycle import VersionChange
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.codec import decode_batch, encode_batch, refer_all_to_source
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.channels import BatchQueue, Demand, ModelKey, SendStream
from headrace.transport.heartbeat import ExecutorHeartbeat
from headrace.transport.rebinding import Rebind, refuse_to_rebind
from headrace.transport.shared_values import SharedValuesWriter
from headrace.transport.source_values import SourceValues
from headrace.transport.topic_io import (
    admit_record,
    check_origins,
    copied_beside,
    decode_or_ack,
    refuse_oversized,
)
from headrace.tuning import TUNING, DeliveryTuning, TransportTuning


class BatchWriter:
    """Write batches to `batches`, and ack their requests once the records are acknowledged.

    Args:
        topic: its name and number of partitions.
        refused: receives the requests that do not fit into a record, as failures.
        inline_bytes: values from this size on are not written (`refer_to_source`); None writes all.
        shared: where such values are passed to other processes of this machine; None to pass none.
        tuning: of writes that fail.

    Attributes:
        partitions: number of partitions of the topic.
    """

    def __init__(
        self,
        producer: Producer,
        topic: TopicPartition,
        refused: SendStream[list[Request]],
        metrics: Metrics | None = None,
        inline_bytes: int | None = None,
        shared: SharedValuesWriter | None = None,
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tuning = tuning
        self._shared = shared
        self._inline_bytes = inline_bytes
        self._producer = producer
        self._topic, self.partitions = topic
        self._refused = refused
        self._metrics = metrics
        self._turn = count()

    async def write(self, batches: Sequence[Batch], partition: int | None) -> list[Batch]:
        """Write batches and return those that are too large for one record.

        Args:
            batches: batches of any models; each becomes one record.
            partition: None to choose one round-robin.
        """
        if partition is None:
            partition = next(self._turn) % self.partitions
        target = TopicPartition(self._topic, partition)
        if self._inline_bytes is not None:
            for batch in batches:
                values = refer_all_to_source(batch.requests, self._inline_bytes)
                if values and self._shared is not None:
                    self._shared.put(batch.requests, values, time.monotonic())
        records = [NewRecord(None, encode_batch(batch)) for batch in batches]
        refused = await deliver(self._producer, target, records, self._metrics, tuning=self._tuning)
        for index, batch in enumerate(batches):
            if index not in refused:
                ack_all([request.ack_handle for request in batch.requests])
                for request in batch.requests:
                    request.chunk = None  # its deadline may keep the request, but not the record
        return [batches[index] for index in refused_for_size(refused)]

    async def write_or_refuse(self, batches: Sequence[Batch], partition: int | None) -> list[Batch]:
        """Write batches of one request each; return those that are too large, which fail."""
        refused = await self.write(batches, partition)
        if refused:
            requests = [request for batch in refused for request in batch.requests]
            await self._refused.send(
                [refuse_oversized(one, self._topic, Stage.BATCHER) for one in requests]
            )
        return refused

    async def write_all(self, batch: Batch, partition: int | None) -> None:
        """Write a batch; write each request separately if the batch is too large for one record."""
        for large in await self.write([batch], partition):
            await self.write_or_refuse(split_batch(large, large.requests, large.reason), partition)

    def close(self) -> None:
        """Close the stream of refused requests."""
        self._refused.close()


def split_batch(batch: Batch, requests: Sequence[Request], reason: str) -> list[Batch]:
    """Return a batch, closed for this reason, for each of these requests of a batch."""
    return [
        Batch(f"{batch.batch_id}.{place}", [request], reason)
        for place, request in enumerate(requests)
    ]


class BatchReceiver:
    """Read `batches` and hand each batch to an executor instance of its model.

    A batch whose version is being loaded here waits for it, until its deadlines: another executor,
    whose partitions this one has taken over, had the version already.

    Args:
        check: raises `Rejected` for a model version that does not run here.
        answers: receives the requests whose model does not run here, as failures.
        heartbeat: notified of each batch, and of the requests that end here.
        rebind: binds a request to another version if its own is gone, or raises `Rejected`.
        values: reads values that are not in the batches; None if all are.
        is_on_its_way: returns True for a version that does not run here yet, but is about to.
        clock: wall clock, in epoch microseconds.
        refusal: returns why requests for a version are refused although it can be loaded; None if
            they are not.
    """

    def __init__(
        self,
        source: Source,
        answers: SendStream[list[Request]],
        check: Callable[[str, str], object],
        heartbeat: ExecutorHeartbeat | None = None,
        rebind: Rebind = refuse_to_rebind,
        values: SourceValues | None = None,
        is_on_its_way: Callable[[str, str], bool] = lambda _name, _version: False,
        clock: Callable[[], int] = wall_clock_us,
        tuning: TransportTuning = TUNING.transport,
        refusal: Callable[[str, str], Rejected | None] = lambda _model, _version: None,
    ) -> None:
        self._refusal = refusal
        self._values = values
        self._is_on_its_way = is_on_its_way
        self._clock = clock
        self._tuning = tuning
        self._waiting: list[Batch] = []
        self._is_watching = False
        self._tasks = StageTasks()
        self._source = source
        self._rebind = rebind
        self._answers = answers
        self._check = check
        self._heartbeat = heartbeat
        self._ready: dict[ModelKey, deque[Batch]] = {}
        self.batch_queue: BatchQueue[ModelKey, Batch] = BatchQueue(self._supply, self._has_waiting)

    async def run(self) -> None:
        """Read until the source stops. A batch whose values are read first is queued later."""
        async with self._tasks:
            while (delivery := await self._source.receive()) is not None:
                await self._queue_received(delivery)
                # Otherwise the last batches would stay in memory while the next one is awaited.
                del delivery
        self.batch_queue.close()
        self._answers.close()

    async def _queue_received(self, delivery: PolledRecords) -> None:
        values, isolation = self._values, delivery.isolation
        refused: list[Request] = []
        for record in delivery.records:
            batch = self._admit(delivery.assignment, record, isolation)
            if batch is None:
                continue
            if self._heartbeat is not None:
                self._heartbeat.received(batch)
            missing = [] if values is None else values.not_shared(batch.requests)
            if values is not None and missing:
                work = self._complete(values, missing, batch, record.offset, isolation)
                if isolation is None:
                    self._tasks.start(work, "read-source-values")
                else:  # records under suspicion are handled one after another
                    await work
            else:
                refused += self._enqueue_received(batch, record.offset, isolation)
        self.batch_queue.notify()
        if refused:
            await self._answers.send(refused)

    async def _complete(
        self,
        values: SourceValues,
        missing: list[Request],
        batch: Batch,
        offset: int,
        isolation: Isolation | None,
    ) -> None:
        """Queue a batch once the values that are not in it are read. Requests whose values are left
        in a store at a stop are left in the log.
        """
        await values.read(missing)
        if left := values.left(missing):
            if isolation is not None and isolation.isolated is not None:
                isolation.leave()
                for request in batch.requests:  # the last commit does not wait for held ones
                    if request not in left and isinstance(request.ack_handle, InFlightAck):
                        request.ack_handle.hold()
                return
            others = [request for request in batch.requests if request not in left]
            if not others:
                return
            batch = Batch(batch.batch_id, others, batch.reason)
        refused = [request for request in missing if request.failure is not None]
        if refused and self._heartbeat is not None:
            self._heartbeat.finished(batch.batch_id, refused)
        refused += self._enqueue_received(batch, offset, isolation)
        self.batch_queue.notify()
        if refused:
            await self._answers.send(refused)

    def _enqueue_received(
        self, batch: Batch, offset: int, isolation: Isolation | None
    ) -> list[Request]:
        """Queue the requests of a batch that have not failed. Return those that cannot run, as
        failures.
        """
        if isolation is not None:
            return self._enqueue_isolated(batch, offset, isolation)
        left = [request for request in batch.requests if request.failure is None]
        if not left:
            return []
        if len(left) < len(batch.requests):
            batch = Batch(batch.batch_id, left, batch.reason)
        return self._enqueue(batch)

    def _enqueue(self, batch: Batch) -> list[Request]:
        """Queue a batch, with another version if its own does not run here. Return the requests
        that cannot run, as failures.
        """
        refusal = self._refusal(batch.model, batch.version)
        if refusal is not None:
            return self._refuse(batch, refusal)
        if self._must_wait(batch):
            self._waiting.append(batch)
            if not self._is_watching:
                self._is_watching = True
                self._tasks.start(self._watch_waiting(), "wait-for-versions")
            return []
        batches, refused = self._split_servable(batch)
        for each in batches:
            key = each.model, each.version
            if is_isolated(each.requests[0]):
                self.batch_queue.put_first(key, each)
            else:
                self._ready.setdefault(key, deque()).append(each)
        return refused

    def _must_wait(self, batch: Batch) -> bool:
        """Return True if the version of a batch does not run here yet, but is about to."""
        try:
            self._check(batch.model, batch.version)
        except Rejected:
            return self._is_on_its_way(batch.model, batch.version)
        return False

    async def _watch_waiting(self) -> None:
        """Queue or refuse batches that wait when their versions are ready or have failed; end the
        requests whose deadlines pass meanwhile. Return when none waits.
        """
        while self._waiting:
            await asyncio.sleep(self._tuning.version_check_s)
            waiting, self._waiting = self._waiting, []
            ended: list[Request] = []
            for batch in waiting:
                late, left = split_ended(batch.requests, self._clock(), Stage.EXECUTOR)
                if late:
                    self._finish_refused(batch.batch_id, late)
                ended += late
                rest = Batch(batch.batch_id, left, batch.reason)
                if left and self._must_wait(rest):
                    self._waiting.append(rest)
                elif left:
                    ended += self._enqueue(rest)
            self.batch_queue.notify()
            if ended:
                await self._answers.send(ended)
        self._is_watching = False

    def _split_servable(self, batch: Batch) -> tuple[list[Batch], list[Request]]:
        """Split a batch into (batches of one version each that run here, refused requests)."""
        try:
            self._check(batch.model, batch.version)
        except Rejected as gone:
            batches, refused = self._rebind_requests(batch, gone)
            if refused:
                self._finish_refused(batch.batch_id, refused)
            return batches, refused
        return [batch], []

    def _rebind_requests(self, batch: Batch, gone: Rejected) -> tuple[list[Batch], list[Request]]:
        """Return (batches bound to another version, one for each shape class; refused requests)."""
        bound: dict[tuple[str, tuple[int, ...]], list[Request]] = {}
        refused: list[Request] = []
        for request in batch.requests:
            try:
                self._rebind(request, gone)
            except Rejected as error:
                request.fail(rejection(error, Stage.EXECUTOR))
                refused.append(request)
            else:
                bound.setdefault((request.version, request.shape_class), []).append(request)
        batches = [
            Batch(f"{batch.batch_id}.{place}", requests, batch.reason)
            for place, requests in enumerate(bound.values())
        ]
        return batches, refused

    def _enqueue_isolated(self, batch: Batch, offset: int, isolation: Isolation) -> list[Request]:
        """Fail the poisoned requests of a batch and queue the others. If the record is isolated,
        queue each of them as its own batch, ahead of all other batches, as soon as its version
        runs here. Return the failures.
        """
        poisoned = [
            one
            for place, one in enumerate(batch.requests)
            if (offset, place) in isolation.poisoned and one.failure is None
        ]
        for request in poisoned:
            request.fail(poisoned_failure(Stage.EXECUTOR))
        if poisoned and self._heartbeat is not None:
            self._heartbeat.finished(batch.batch_id, poisoned)
        left = [request for request in batch.requests if request.failure is None]
        if left and isolation.isolated is None:
            return poisoned + self._enqueue(Batch(batch.batch_id, left, batch.reason))
        isolation.isolate(batch.requests)
        refused = poisoned
        for place, request in enumerate(batch.requests):
            if request.failure is None:
                one = Batch(f"{batch.batch_id}.{place}", [request], batch.reason)
                refused += self._enqueue(one)
        return refused

    def _admit(
        self, assignment: AssignedPartition, record: Record, isolation: Isolation | None
    ) -> Batch | None:
        ack_handle = admit_record(assignment, record, isolation)
        if ack_handle is None:
            return None
        batch = decode_or_ack(record, ack_handle, _decode)
        if batch is not None:
            ack_handle.parts = len(batch.requests)
            added_bytes = copied_beside(batch.requests)
            if self._values is not None:
                added_bytes += self._values.missing_bytes(batch.requests)
            ack_handle.resize(ack_handle.size_bytes + added_bytes)
        return batch

    def apply_change(self, change: VersionChange) -> None:
        """Take back the batches that wait for a version that cannot be loaded."""
        if change.action not in ("reassign", "refuse"):
            return
        key = (change.version.name, change.version.version)
        refused: list[Request] = []
        for batch in [*self.batch_queue.take_first(key), *self._ready.pop(key, ())]:
            refused += (
                self._enqueue(batch)
                if change.refusal is None
                else self._refuse(batch, change.refusal)
            )
        # Others that wait are looked at again every so often, and then find what has become of it.
        if change.refusal is not None:
            for batch in self._waiting:
                if (batch.model, batch.version) == key:
                    refused += self._refuse(batch, change.refusal)
            self._waiting = [each for each in self._waiting if each.requests[0].failure is None]
        self.batch_queue.notify()
        if refused:
            self._tasks.start(self._answers.send(refused), "send-refused")

    def _refuse(self, batch: Batch, refusal: Rejected) -> list[Request]:
        """Fail the requests of a batch, and return them."""
        for request in batch.requests:
            request.fail(rejection(refusal, Stage.EXECUTOR))
        self._finish_refused(batch.batch_id, batch.requests)
        return batch.requests

    def _finish_refused(self, batch_id: str, requests: Sequence[Request]) -> None:
        """Report requests that will not run: they hold up neither the batcher nor the next record
        that is to run alone.
        """
        if self._heartbeat is not None:
            self._heartbeat.finished(batch_id, requests)
        self._source.quarantine.end_isolation([one for one in requests if is_isolated(one)])

    def _has_waiting(self, key: ModelKey) -> bool:
        waiting = ((batch.model, batch.version) for batch in self._waiting)
        return bool(self._ready.get(key)) or key in waiting

    def _supply(self, key: ModelKey | None, _demand: Demand) -> Batch | None:
        queue = self._ready.get(key) if key is not None else None
        return queue.popleft() if queue else None


def _decode(value: bytes, ack_handle: InFlightAck) -> Batch:
    batch = decode_batch(value, ack_handle)
    # Any partition: `requests` may have got more since this process began.
    check_origins(batch.requests, range(2**31))
    return batch
