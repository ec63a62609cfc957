"""The ingest stage: records of a partition → checked requests → the batcher, or an answer.

The path of a record: `run` receives the polled records of a partition; `_read` decodes and checks
them; `_transform` runs Python transforms on their thread; `_pass_on` sends the requests on.
Requests are *runnable*, or they have *ended*: with a failure, which the responder answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.inflight import AssignedPartition, skipped_range
from headrace.delivery.ordering import KeyChains
from headrace.log.port import Record
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import IngestedRequest, Request
from headrace.services.ingest.decode import (
    IngestRules,
    bind_transformed,
    cancels_another,
    decode_record,
    decode_records,
    fail_poisoned,
)
from headrace.services.ingest.transforms import PendingTransform, TransformThread
from headrace.telemetry.instruments import Instruments
from headrace.transport.channels import Outlet
from headrace.tuning import TUNING, IngestTuning


class IngestService:
    """Read request records and pass on the requests that can run.

    Args:
        items: receives the requests that can run.
        answers: receives the requests that cannot, with their failures.
    """

    def __init__(
        self,
        source: Source,
        items: Outlet[list[Request]],
        answers: Outlet[list[Request]],
        rules: IngestRules,
        instruments: Instruments,
        tuning: IngestTuning = TUNING.ingest,
    ) -> None:
        self._tuning = tuning
        self._source = source
        self._items = items
        self._answers = answers
        self._pending: list[PendingTransform] = []
        self._rules = replace(rules, transform_later=self._pending.append)
        self._transforms = TransformThread(tuning)
        self._tracing = instruments.tracing
        self._clock = instruments.clock

    async def run(self) -> None:
        """Run until the source stops reading."""
        while (polled := await self._source.receive()) is not None:
            assignment, records = polled.assignment, iter(polled.records)
            if polled.skipped is not None:
                await self._answers.send([skipped_range(assignment, polled.skipped)])
            isolation = polled.isolation
            while not assignment.revoked:
                runnable, ended = self._read(polled, records)
                if self._pending:
                    runnable, ended = await self._transform(runnable, ended)
                if isolation is not None:
                    isolation.isolate(runnable)
                if not (runnable or ended):
                    break
                await self._pass_on(polled, runnable, ended)
                # Yield even without a pause: the other stages work in between.
                is_far_ahead = assignment.in_flight > self._tuning.far_ahead_requests
                pause_s = self._tuning.far_ahead_pause_s if is_far_ahead else 0.0
                await asyncio.sleep((len(runnable) + len(ended)) * pause_s)
        self._transforms.close()
        self._items.close()
        self._answers.close()

    async def _pass_on(
        self, polled: PolledRecords, runnable: list[Request], ended: list[Request]
    ) -> None:
        """Send requests on; those of models over their share of the budget wait for room."""
        deferral = self._source.deferral
        over_share: list[Request] = []
        if deferral is not None and runnable:
            runnable, over_share, late = deferral.charge(
                runnable, is_reread=polled.is_reread, is_isolated=polled.is_isolated
            )
            ended += late
        if ended:
            await self._answers.send(ended)
        if runnable:
            await self._items.send(runnable)
        # Wait last, so that other models' requests do not wait for this model's room.
        if deferral is not None and over_share:
            runnable = await deferral.wait_for_room(over_share)
            if runnable:
                await self._items.send(runnable)

    async def _transform(
        self, runnable: list[Request], ended: list[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Run the pending transforms; return (runnable, ended), with their requests last."""
        payloads = self._pending[:]
        self._pending.clear()
        await self._transforms.run(payloads)
        requests = [bind_transformed(payload) for payload in payloads]
        if self._tracing is not None:
            self._tracing.ingested(requests, self._clock())
        transformed = {id(request) for request in requests}
        runnable = [request for request in runnable if id(request) not in transformed]
        return (
            runnable + [request for request in requests if request.failure is None],
            ended + [request for request in requests if request.failure is not None],
        )

    def _read(
        self, polled: PolledRecords, records: Iterator[Record]
    ) -> tuple[list[Request], list[Request]]:
        """Admit and check records for about `hold_loop_s`; return (runnable, ended).

        Both lists are empty when no records are left. Records answered before this assignment
        are skipped.
        """
        assignment, isolation = polled.assignment, polled.isolation
        tuning = self._tuning
        now_us = self._clock()
        began_s = time.perf_counter()
        requests: list[Request] = []
        count = 1  # records read between two looks at the clock
        while some := list(islice(records, count)):
            if (
                isolation is not None
                or polled.is_reread
                or some[0].offset < assignment.progress.highest
            ):
                requests += self._read_singly(some, assignment, isolation, now_us)
            else:
                requests += decode_records(some, assignment, self._rules, now_us)
            elapsed_s = time.perf_counter() - began_s
            if requests and elapsed_s >= tuning.hold_loop_s:
                break
            if elapsed_s < tuning.double_records_for_s:
                count = min(2 * count, tuning.max_records_at_once)
        # An isolated record got its place in the order when it was parked.
        if assignment.chains is not None and not polled.is_isolated:
            _chain(requests, assignment.chains)
        runnable = [request for request in requests if request.failure is None]
        ended: list[Request] = []
        if len(runnable) != len(requests):
            ended = [request for request in requests if request.failure is not None]
        if self._tracing is not None:
            checked_us = self._clock()
            pending = {id(payload.request) for payload in self._pending}
            checked = runnable
            if pending:  # these are checked after their transforms
                checked = [request for request in runnable if id(request) not in pending]
            self._tracing.ingested(checked, checked_us)
            self._tracing.ingested(ended, checked_us)
        return runnable, ended

    def _read_singly(
        self,
        records: Sequence[Record],
        assignment: AssignedPartition,
        isolation: Isolation | None,
        now_us: int,
    ) -> list[Request]:
        """Read records one by one: some may be answered, poisoned or accused of a crash."""
        if isolation is not None and isolation.isolated is not None:
            isolated = isolation.isolated
            request = decode_record(
                isolated.record, assignment, self._rules, now_us, isolated.ack_handle
            )
            request.after = isolated.after
            return [request]
        read: list[Request] = []
        for record in records:
            if record.offset in assignment.progress:
                assignment.skip(record.offset)
            elif isolation is not None and (record.offset, 0) in isolation.poisoned:
                read.append(fail_poisoned(record, assignment, self._rules, now_us))
            elif (
                isolation is not None
                and isolation.is_accused(record.offset)
                and not cancels_another(record)
            ):
                isolation.park_record(assignment, record)
            else:
                read.append(decode_record(record, assignment, self._rules, now_us))
        return read


def _chain(requests: Sequence[IngestedRequest], chains: KeyChains) -> None:
    """Set `after` of each request to the request with the same key that precedes it."""
    for request in requests:
        # A cancelling record is not admitted and has no answer, so nothing can wait for it.
        if request.ack_handle is not NULL_ACK:
            request.after = chains.follow(request.key, request.offset)
