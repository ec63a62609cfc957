"""The ingest stage: records of a partition → checked requests → the batcher, or an answer.

The path of a record: `run` receives the polled records of a partition; `_read` decodes and checks
them; `_decompress` makes large values and `_transform` inputs, on their workers; `_pass_on` sends
the requests on.
Requests are *runnable*, or they have *ended*: with a failure, which the responder answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

from headrace.claims.fetcher import ClaimFetcher
from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.failures import REVOKED
from headrace.delivery.inflight import AssignedPartition, InFlightAck, skipped_range
from headrace.delivery.ordering import KeyChains
from headrace.errors import Rejected
from headrace.log.port import Record
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import IngestedRequest, Request
from headrace.services.ingest.claims import Claimed, ClaimWaits, charge
from headrace.services.ingest.decode import (
    IngestRules,
    PendingClaim,
    bind_decompressed,
    bind_transformed,
    cancels_another,
    decode_record,
    decode_records,
    fail_poisoned,
    refuse_compressed,
)
from headrace.services.ingest.decompression import ValueDecompressor
from headrace.services.ingest.schemas import SchemaWaits
from headrace.telemetry.instruments import Instruments
from headrace.transforms.workers import (
    PendingTransform,
    PendingValue,
    TransformPool,
    TransformThread,
)
from headrace.transport.channels import SendStream
from headrace.tuning import TUNING, IngestTuning


class IngestService:
    """Read request records and pass on the requests that can run.

    Args:
        items: receives the requests that can run.
        answers: receives the requests that cannot, with their failures.
        fetcher: fetches the values that are in stores; None where no claims are allowed.
        transforms: workers that make inputs of payloads; by default one thread.
    """

    def __init__(
        self,
        source: Source,
        items: SendStream[list[Request]],
        answers: SendStream[list[Request]],
        rules: IngestRules,
        instruments: Instruments,
        tuning: IngestTuning = TUNING.ingest,
        fetcher: ClaimFetcher | None = None,
        transforms: TransformPool | None = None,
    ) -> None:
        self._tuning = tuning
        self._source = source
        self._items = items
        self._answers = answers
        self._pending: list[PendingValue] = []
        self._unlearnt: list[PendingTransform] = []
        self._schemas = SchemaWaits(self._finish_waiting, instruments.clock)
        self._decompressor = ValueDecompressor(rules.limits, tuning)
        self._unfetched: list[PendingClaim] = []
        self._claims: ClaimWaits | None = None
        if fetcher is not None:
            self._claims = ClaimWaits(
                fetcher,
                rules,
                self._finish_claimed,
                source.tracker.budget,
                source.freed,
                instruments.clock,
                tuning,
            )
        self._rules = replace(
            rules,
            decompressor=self._decompressor,
            transform_later=self._pending.append,
            learn_later=self._unlearnt.append,
            read_claim=None if fetcher is None else fetcher.read_claim,
            fetch_later=self._unfetched.append,
        )
        self._transforms = transforms or TransformPool([TransformThread(tuning)], tuning)
        self._transforming = asyncio.Lock()
        self._tracing = instruments.tracing
        self._clock = instruments.clock
        self._metrics = instruments.metrics

    async def run(self) -> None:
        """Run until the source stops reading."""
        with closing(self._transforms):
            while (polled := await self._source.receive()) is not None:
                assignment, records = polled.assignment, iter(polled.records)
                if polled.skipped is not None:
                    await self._answers.send([skipped_range(assignment, polled.skipped)])
                while not assignment.revoked:
                    read = self._read(polled, records)
                    if not read:
                        break
                    await self._finish(polled, read)
                    while self._decompressor.waiting:
                        await self._finish(polled, [await self._decompress()])
                    # Yield even without a pause: the other stages work in between.
                    is_far_ahead = assignment.in_flight > self._tuning.far_ahead_requests
                    pause_s = self._tuning.far_ahead_pause_s if is_far_ahead else 0.0
                    await asyncio.sleep(len(read) * pause_s)
            if self._claims is not None:
                await self._claims.close()
            await self._schemas.close()
            self._decompressor.close()
            self._items.close()
            self._answers.close()

    def revoked(self) -> None:
        """Leave requests that wait, of partitions that were revoked or are leaving, in the log."""
        self._schemas.revoked()
        if self._claims is not None:
            self._claims.revoked()

    async def learn_schemas(self) -> None:
        """Fetch the schemas that payloads wait for, until `run` has ended."""
        await self._schemas.run()

    async def fetch_claims(self) -> None:
        """Fetch the values that are in stores, until `run` has ended."""
        if self._claims is not None:
            await self._claims.run()

    async def _finish(self, polled: PolledRecords, requests: Sequence[Request]) -> None:
        """Run the transforms that requests wait for, and send on all whose values are complete."""
        unfetched: list[PendingClaim] = []
        if self._claims is not None:
            requests, unfetched = await self._take_claims(polled, requests, self._claims)
        waiting = {id(request) for request in self._decompressor.waiting}
        waiting.update(id(payload.request) for payload in self._pending)
        unlearnt = self._unlearnt[:]
        self._unlearnt.clear()
        waiting.update(id(payload.request) for payload in unlearnt)
        complete = list(requests)
        if waiting:
            complete = [request for request in requests if id(request) not in waiting]
        self._trace(complete)
        if unlearnt:
            await self._await_schemas(polled, unlearnt)
        await self._pass_on(polled, complete)
        payloads = self._pending[:]
        self._pending.clear()
        while payloads:
            transformed = await self._transform(payloads)
            payloads = payloads[len(transformed) :]
            await self._pass_on(polled, transformed)
        if self._claims is not None and unfetched:
            # Last, so that other requests do not wait for room for these.
            await self._reserve_claims(polled, unfetched, self._claims)

    def _trace(self, requests: Sequence[Request]) -> None:
        if self._tracing is not None:
            self._tracing.ingested(requests, self._clock())

    async def _pass_on(self, polled: PolledRecords, complete: list[Request]) -> None:
        """Send requests on; those of models over their share of the budget wait for room."""
        runnable = [request for request in complete if request.failure is None]
        ended: list[Request] = []
        if len(runnable) != len(complete):
            ended = [request for request in complete if request.failure is not None]
        if polled.isolation is not None:
            polled.isolation.isolate(runnable)
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

    async def _decompress(self) -> Request:
        """Decompress the next value that waits for the thread; return its request."""
        request = self._decompressor.waiting[0]
        if request.ack_handle.revoked:
            self._decompressor.waiting.popleft()
            request.fail(REVOKED)
            return request
        try:
            request, plain = await self._decompressor.decompress_next()
        except Rejected as error:
            return refuse_compressed(request, error)
        return bind_decompressed(request, plain, self._rules)

    async def _take_claims(
        self, polled: PolledRecords, requests: Sequence[Request], claims: ClaimWaits
    ) -> tuple[list[Request], list[PendingClaim]]:
        """Split requests into (others, those whose objects are to be fetched), and end those that
        are cancelled. An isolated request is returned with its object, unless it is left in the
        log.
        """
        left = [
            request
            for request in requests
            if request.envelope.cancels is None or not self._cancel_claims(request, claims)
        ]
        unfetched = self._unfetched[:]
        self._unfetched.clear()
        if not unfetched:
            return left, unfetched
        waiting = {pending.request for pending in unfetched}
        left = [request for request in left if request not in waiting]
        if not polled.is_isolated:
            return left, unfetched
        # Nothing else runs until it has been answered.
        for pending in unfetched:
            claimed = await claims.fetch_alone(pending)
            if claimed is None:
                assert polled.isolation is not None
                polled.isolation.leave()
                continue
            self._unlearnt += claimed.unlearnt
            self._pending += claimed.pending
            left.append(claimed.request)
        return left, []

    async def _reserve_claims(
        self, polled: PolledRecords, unfetched: Sequence[PendingClaim], claims: ClaimWaits
    ) -> None:
        """Let requests wait for their objects, as far as their models' shares have room."""
        deferral = self._source.deferral
        if deferral is None:
            for pending in unfetched:
                claims.add(pending, is_charged=False)
            return
        # One after the other: charged together, they would leave no room for what fits.
        for pending in unfetched:
            charge(pending, 1)
            chosen, over_share, late = deferral.charge(
                [pending.request], is_reread=polled.is_reread
            )
            if over_share:
                chosen += await deferral.wait_for_room(over_share)
            if chosen:
                claims.add(pending, is_charged=True)
            if late:
                charge(pending, -1)
                await self._answers.send(late)

    def _cancel_claims(self, cancelling: Request, claims: ClaimWaits) -> bool:
        """End the cancelled requests that wait for their objects; return False if none does."""
        ended = claims.cancel(cancelling)
        if ended:
            self._metrics.cancelled(1, ended)
        return ended > 0

    async def _finish_claimed(self, claimed: Claimed) -> None:
        """Pass on a request whose object is here, or that has ended."""
        request = claimed.request
        for payload in claimed.unlearnt:
            _charge_decompressed(payload, 1)
            self._schemas.add(payload)
            return
        if claimed.pending:
            await self._transform(claimed.pending)
        else:
            self._trace([request])
        await (self._items if request.failure is None else self._answers).send([request])

    async def _await_schemas(
        self, polled: PolledRecords, payloads: Sequence[PendingTransform]
    ) -> None:
        """Let payloads wait for their schemas, as far as their models' shares have room."""
        if polled.is_isolated:
            # Nothing else runs until it has been answered.
            for payload in payloads:
                if await self._schemas.learn_alone(payload):
                    self._pending.append(payload)
                else:
                    assert polled.isolation is not None
                    polled.isolation.leave()
            return
        for payload in payloads:
            _charge_decompressed(payload, 1)
        by_request = {id(payload.request): payload for payload in payloads}
        requests = [payload.request for payload in payloads]
        deferral, ended = self._source.deferral, list[Request]()
        if deferral is not None:
            requests, over_share, ended = deferral.charge(requests, is_reread=polled.is_reread)
            requests += await deferral.wait_for_room(over_share) if over_share else []
        if ended:
            await self._answers.send(ended)
        for request in requests:
            self._schemas.add(by_request[id(request)])

    async def _finish_waiting(self, payloads: Sequence[PendingTransform]) -> None:
        """Transform payloads whose schemas are known, and pass their requests on."""
        for chunk in _chunks(payloads, self._tuning.max_records_at_once):
            some: Sequence[PendingValue] = chunk
            for payload in chunk:
                _charge_decompressed(payload, -1)
            while some:
                requests = await self._transform(some)
                some = some[len(requests) :]
                runnable = [request for request in requests if request.failure is None]
                ended = [request for request in requests if request.failure is not None]
                # They are charged to their models' shares already.
                if ended:
                    await self._answers.send(ended)
                if runnable:
                    await self._items.send(runnable)

    async def _transform(self, payloads: Sequence[PendingValue]) -> list[Request]:
        """Run pending transforms; return the requests of the first of them.

        The inputs that were made are charged to the budget here, and to their models' shares when
        the requests are passed on; the others' are not made before that.
        """
        waiting = self._metrics.transforms_waiting
        waiting.inc(len(payloads))
        try:
            async with self._transforming:
                done = await self._transforms.run(payloads)
        finally:
            waiting.dec(len(payloads))
        for payload in payloads[:done]:
            if payload.took_s:
                self._metrics.transformed(payload.model, payload.took_s, payload.made_bytes)
        requests = [bind_transformed(payload) for payload in payloads[:done]]
        self._trace(requests)
        return requests

    def _read(self, polled: PolledRecords, records: Iterator[Record]) -> list[Request]:
        """Admit and check records for about `hold_loop_s`; return their requests.

        The list is empty when no records are left. Records answered before this assignment are
        skipped.
        """
        assignment, isolation = polled.assignment, polled.isolation
        tuning = self._tuning
        now_us = self._clock()
        self._decompressor.begin_reading()
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
            if requests and (elapsed_s >= tuning.hold_loop_s or self._decompressor.is_exhausted):
                break
            if elapsed_s < tuning.double_records_for_s:
                count = min(2 * count, tuning.max_records_at_once)
        # An isolated record got its place in the order when it was parked.
        if assignment.chains is not None and not polled.is_isolated:
            _chain(requests, assignment.chains)
        return requests

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


def _charge_decompressed(payload: PendingTransform, times: int) -> None:
    """Charge what was made of a compressed value while it waits; -1 releases it."""
    if payload.value is not payload.request.value:
        ack_handle = payload.request.ack_handle
        assert isinstance(ack_handle, InFlightAck)
        ack_handle.resize(ack_handle.size_bytes + times * len(payload.value))


def _chunks(
    payloads: Sequence[PendingTransform], size: int
) -> Iterator[Sequence[PendingTransform]]:
    return (payloads[start : start + size] for start in range(0, len(payloads), size))


def _chain(requests: Sequence[IngestedRequest], chains: KeyChains) -> None:
    """Set `after` of each request to the request with the same key that precedes it."""
    for request in requests:
        # A cancelling record is not admitted and has no answer, so nothing can wait for it.
        if request.ack_handle is not NULL_ACK:
            request.after = chains.follow(request.key, request.offset)
