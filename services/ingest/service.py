"""The ingest stage: records of a partition → checked requests → the batcher, or an answer.

The path of a record: `run` receives a delivery; `_read` decodes and checks its records;
`_transform` runs deferred Python transforms; `_pass_on` sends the requests on.
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
        self._deferred: list[PendingTransform] = []
        self._rules = replace(rules, defer=self._deferred.append)
        self._transforms = TransformThread(tuning)
        self._tracing = instruments.tracing
        self._clock = instruments.clock

    async def run(self) -> None:
        """Run until the source stops reading."""
        while (delivery := await self._source.receive()) is not None:
            assignment, records = delivery.assignment, iter(delivery.records)
            if delivery.skipped is not None:
                await self._answers.send([skipped_range(assignment, delivery.skipped)])
            isolation = delivery.isolation
            while not assignment.revoked:
                able, ended = self._read(delivery, records)
                if self._deferred:
                    able, ended = await self._transform(able, ended)
                if isolation is not None:
                    isolation.isolate(able)
                if not (able or ended):
                    break
                await self._pass_on(delivery, able, ended)
                far_ahead = assignment.in_flight > self._tuning.far_ahead_requests
                pause_s = self._tuning.far_ahead_pause_s if far_ahead else 0.0
                await asyncio.sleep((len(able) + len(ended)) * pause_s)
        self._transforms.close()
        self._items.close()
        self._answers.close()

    async def _pass_on(
        self, delivery: PolledRecords, able: list[Request], ended: list[Request]
    ) -> None:
        """Send requests on; those of models over their share of the budget wait for room."""
        deferral, over = self._source.deferral, list[Request]()
        if deferral is not None and able:
            isolation = delivery.isolation
            on_trial = isolation is not None and isolation.isolated is not None
            able, over, late = deferral.charge(
                able, is_reread=delivery.is_reread, on_trial=on_trial
            )
            ended += late
        if ended:
            await self._answers.send(ended)
        if able:
            await self._items.send(able)
        # Wait last, so that other models' requests do not wait for this model's room.
        if deferral is not None and over and (able := await deferral.wait_for_room(over)):
            await self._items.send(able)

    async def _transform(
        self, able: list[Request], ended: list[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Transform deferred payloads and return (able, ended), with these requests last."""
        payloads = self._deferred[:]
        self._deferred.clear()
        await self._transforms.run(payloads)
        requests = [bind_transformed(payload) for payload in payloads]
        if self._tracing is not None:
            self._tracing.ingested(requests, self._clock())
        late = {id(request) for request in requests}
        able = [one for one in able if id(one) not in late]
        return (
            able + [one for one in requests if one.failure is None],
            ended + [one for one in requests if one.failure is not None],
        )

    def _read(
        self, delivery: PolledRecords, records: Iterator[Record]
    ) -> tuple[list[Request], list[Request]]:
        """Admit and check records for about `hold_loop_s`; return (able, ended).

        Both lists are empty when no records are left. Records answered before this assignment
        are skipped.
        """
        assignment, isolation = delivery.assignment, delivery.isolation
        tuning = self._tuning
        now_us = self._clock()
        began_s = time.perf_counter()
        read: list[Request] = []
        at_once = 1
        while some := list(islice(records, at_once)):
            if (
                isolation is not None
                or delivery.is_reread
                or some[0].offset < assignment.progress.highest
            ):
                read += self._read_singly(some, assignment, isolation, now_us)
            else:
                read += decode_records(some, assignment, self._rules, now_us)
            elapsed_s = time.perf_counter() - began_s
            if read and elapsed_s >= tuning.hold_loop_s:
                break
            if elapsed_s < tuning.double_records_for_s:
                at_once = min(2 * at_once, tuning.max_records_at_once)
        if assignment.chains is not None and (isolation is None or isolation.isolated is None):
            _chain(read, assignment.chains)
        able = [one for one in read if one.failure is None]
        ended = [] if len(able) == len(read) else [one for one in read if one.failure is not None]
        if self._tracing is not None:
            checked_us = self._clock()
            deferred = {id(payload.request) for payload in self._deferred}
            ready = [one for one in able if id(one) not in deferred] if deferred else able
            self._tracing.ingested(ready, checked_us)
            self._tracing.ingested(ended, checked_us)
        return able, ended

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
