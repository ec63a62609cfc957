"""The ingest stage: records of a partition → checked requests → the batcher, or an answer.

The path of a record: `_read_all` receives the polled records of a partition, `RequestReader.read`
decodes and checks them, and `_finish` lets `RequestSender` send on the requests that can run or
have ended. Other requests wait: for their objects (`ClaimWaits`), their schemas (`SchemaWaits`) or
a worker that makes their inputs (`TransformWaits`). Each of these has tasks of its own, so that
reading goes on meanwhile.
Requests are *runnable*, or they have *ended*: with a failure, which the responder answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from operator import length_hint
from typing import TypeVar

from headrace.claims.fetcher import ClaimFetcher
from headrace.consumer.deferring import Deferral
from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.delivery.cancelling import cancelled_failure, find_cancelled
from headrace.delivery.inflight import AssignedPartition, InFlightAck, skipped_range
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import Request
from headrace.services.ingest.claims import ClaimWaits, Decoded, charge
from headrace.services.ingest.decode import (
    IngestRules,
    PendingClaim,
    RequestReader,
    bind_decompressed,
)
from headrace.services.ingest.decompression import InlineDecompressor
from headrace.services.ingest.schemas import SchemaWaits
from headrace.services.ingest.transform_waits import TransformWaits
from headrace.telemetry.instruments import Instruments
from headrace.topics import Stage
from headrace.transforms.workers import (
    PendingCompressed,
    PendingTransform,
    PendingValue,
    TransformPool,
    TransformThread,
)
from headrace.transport.channels import SendStream
from headrace.tuning import TUNING, IngestTuning

T = TypeVar("T")


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
        self._sender = RequestSender(items, answers, source.deferral, instruments)
        self._metrics = instruments.metrics
        # `RequestReader.read` adds the requests that have to wait; `_finish` takes them.
        self._pending: list[PendingValue] = []
        self._schemaless: list[PendingTransform] = []
        self._unfetched: list[PendingClaim] = []
        decompressor = InlineDecompressor(rules.limits, tuning)
        self._workers = transforms or TransformPool([TransformThread(tuning)], tuning)
        self._transforms = TransformWaits(
            self._workers,
            self._finish_transformed,
            source.quarantine.gate,
            instruments.metrics,
            instruments.clock,
            tuning,
        )
        self._schemas = SchemaWaits(self._finish_with_schema, instruments.clock)
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
            decompressor=decompressor,
            transform_later=self._pending.append,
            fetch_schema_later=self._schemaless.append,
            read_claim=None if fetcher is None else fetcher.read_claim,
            fetch_later=self._unfetched.append,
        )
        self._reader = RequestReader(self._rules, decompressor, instruments.clock, tuning)

    async def run(self) -> None:
        """Run until the source stops reading, and all that was read has been passed on."""
        with closing(self._workers):
            async with asyncio.TaskGroup() as tasks:
                transforming = tasks.create_task(self._transforms.run(), name="transforms")
                await self._read_all()
                if self._claims is not None:
                    await self._claims.close()
                self._schemas.close()
                self._transforms.close()
                await transforming
            self._sender.close()

    def drop_revoked(self) -> None:
        """End requests that wait of partitions that were revoked. Those that wait for a store or a
        registry are left in the log when their partitions are leaving.
        """
        self._schemas.drop_revoked()
        self._transforms.drop_revoked()
        if self._claims is not None:
            self._claims.drop_revoked()

    async def fetch_schemas(self) -> None:
        """Fetch the schemas that payloads wait for, until `run` has ended."""
        await self._schemas.run()

    async def fetch_claims(self) -> None:
        """Fetch the values that are in stores, until `run` has ended."""
        if self._claims is not None:
            await self._claims.run()

    # --- reading ----------------------------------------------------------------------------------

    async def _read_all(self) -> None:
        while (polled := await self._source.receive()) is not None:
            assignment, records = polled.assignment, iter(polled.records)
            if polled.skipped is not None:
                await self._sender.send_skipped(assignment, polled.skipped)
            while length_hint(records, 1) and not assignment.revoked:
                read = self._reader.read(polled, records)
                if not read:
                    break
                await self._finish(polled, read)
                # Yield even without a pause: the other stages work in between.
                is_far_ahead = assignment.in_flight > self._tuning.far_ahead_requests
                pause_s = self._tuning.far_ahead_pause_s if is_far_ahead else 0.0
                await asyncio.sleep(len(read) * pause_s)

    async def _finish(self, polled: PolledRecords, requests: Sequence[Request]) -> None:
        """Send on the requests that are complete, and let the others wait."""
        # Records that cancel a request are not admitted, so they have the null ack.
        cancelling = [each for each in requests if each.ack_handle is NULL_ACK]
        if not (cancelling or self._has_waiting()):
            await self._sender.send_read(polled, list(requests))
            return
        left = self._cancel(cancelling) if cancelling else []
        schemaless = [each for each in _take_all(self._schemaless) if each.request.failure is None]
        pending = [each for each in _take_all(self._pending) if each.request.failure is None]
        unfetched = [each for each in _take_all(self._unfetched) if each.request.failure is None]
        waiting = {id(payload.request) for payload in (*schemaless, *pending)}
        waiting.update(id(claim.request) for claim in unfetched)
        complete = list(requests)
        if waiting or cancelling:
            complete = [
                each
                for each in requests
                if id(each) not in waiting and each.ack_handle is not NULL_ACK
            ]
        await self._sender.send_read(polled, complete)
        if polled.is_isolated:
            await self._finish_alone(polled, schemaless, pending, unfetched)
        else:
            await self._let_wait(polled, schemaless, pending, unfetched)
        if left:
            # Last: what they cancel must have been sent before.
            await self._transforms.passed_on()
            await self._sender.send_charged(left)

    def _has_waiting(self) -> bool:
        """Return True if one of the requests just read has to wait."""
        return bool(self._schemaless or self._pending or self._unfetched)

    def _cancel(self, cancelling: Sequence[Request]) -> list[Request]:
        """End the requests that wait here and that records cancel, those read with them included;
        return the records that cancel none of them.
        """
        just_read = [each.request for each in (*self._schemaless, *self._pending)]
        just_read += [each.request for each in self._unfetched]
        found = find_cancelled(cancelling, just_read)
        for request in found:
            request.fail(cancelled_failure(Stage.INGEST))
        found += self._schemas.cancel(cancelling) + self._transforms.cancel(cancelling)
        if self._claims is not None:
            found += self._claims.cancel(cancelling)
        if not found:
            return list(cancelling)
        left = [each for each in cancelling if not find_cancelled([each], found)]
        self._metrics.cancelled(len(cancelling) - len(left), len(found))
        return left

    # --- requests that wait -----------------------------------------------------------------------

    async def _let_wait(
        self,
        polled: PolledRecords,
        schemaless: Sequence[PendingTransform],
        pending: Sequence[PendingValue],
        unfetched: Sequence[PendingClaim],
    ) -> None:
        """Let requests wait, as far as their models' shares have room."""
        # One after the other: charged together, they would leave no room for what fits.
        for transform in schemaless:
            self._transforms.reserve(transform)
            if await self._sender.take_room(polled, transform.request):
                self._schemas.add(transform)
        for payload in pending:
            self._transforms.reserve(payload)
            payload.is_reread = polled.is_reread
            if await self._sender.take_room(polled, payload.request):
                self._transforms.add(payload)
        # Last, so that other requests do not wait for room for these.
        for claimed in unfetched:
            assert self._claims is not None
            is_charged = self._source.deferral is not None
            if is_charged:
                charge(claimed, 1)
            if await self._sender.take_room(polled, claimed.request):
                self._claims.add(claimed, is_charged=is_charged)

    async def _finish_alone(
        self,
        polled: PolledRecords,
        schemaless: Sequence[PendingTransform],
        pending: Sequence[PendingValue],
        unfetched: Sequence[PendingClaim],
    ) -> None:
        """Complete the request that runs alone, and pass it on, unless it is left in the log:
        nothing else runs until it has been answered.
        """
        assert polled.isolation is not None
        waiting, payloads = list(schemaless), []
        for value in pending:
            if not isinstance(value, PendingCompressed):
                payloads.append(value)
                continue
            await self._transforms.run_alone(value)
            decoded = self._decode_made(value)
            waiting += decoded.schemaless
            payloads += decoded.pending
            if not decoded.is_pending:
                await self._sender.send_read(polled, [decoded.request])
        for pending_claim in unfetched:
            assert self._claims is not None
            claimed = await self._claims.fetch_alone(pending_claim)
            if claimed is None:
                polled.isolation.leave()
                continue
            waiting += claimed.schemaless
            payloads += claimed.pending
            if not claimed.is_pending:
                await self._sender.send_read(polled, [claimed.request])
        for payload in waiting:
            if await self._schemas.fetch_alone(payload):
                payloads.append(payload)
            else:
                polled.isolation.leave()
        for each in payloads:
            await self._sender.send_read(polled, [await self._transforms.run_alone(each)])

    async def _finish_claimed(self, claimed: Decoded) -> None:
        """Pass on a request whose object is here, or that has ended, or let it wait further."""
        if claimed.is_pending:
            self._let_wait_further(claimed)
            return
        await self._sender.send_charged([claimed.request])

    def _let_wait_further(self, claimed: Decoded) -> None:
        """Let a request whose value is here wait for its schema or for a worker."""
        for payload in claimed.schemaless:
            self._transforms.reserve(payload)
            self._schemas.add(payload)
        for value in claimed.pending:
            self._transforms.reserve(value)
            self._transforms.add(value)

    def _finish_with_schema(self, payloads: Sequence[PendingTransform]) -> None:
        """Let payloads whose schemas are known, or whose requests have ended, wait for a worker."""
        for payload in payloads:
            self._transforms.add(payload)

    async def _finish_transformed(self, payloads: Sequence[PendingValue]) -> None:
        """Pass on requests whose inputs were made, or that have ended; those whose values were
        decompressed may have to wait further.
        """
        for decoded in [self._decode_made(payload) for payload in payloads]:
            if decoded.is_pending:
                self._let_wait_further(decoded)
                payloads = [each for each in payloads if each.request is not decoded.request]
        await self._sender.send_transformed(payloads)

    def _decode_made(self, payload: PendingValue) -> Decoded:
        """Decode a value that a worker has decompressed. The request of any other payload, whose
        inputs a worker has made, is returned as it is.
        """
        request = payload.request
        if isinstance(payload, PendingCompressed) and request.failure is None:
            bind_decompressed(request, payload.plain, self._rules)
            for value in (*self._schemaless, *self._pending):
                value.is_reread = payload.is_reread
            return Decoded(request, _take_all(self._schemaless), _take_all(self._pending))
        return Decoded(request)


class RequestSender:
    """Send complete requests to the next stages; those of models over their share wait for room.

    Args:
        items: receives the requests that can run.
        answers: receives the requests that have ended.
        deferral: defers requests over their shares of the budget; None without shares.
    """

    def __init__(
        self,
        items: SendStream[list[Request]],
        answers: SendStream[list[Request]],
        deferral: Deferral | None,
        instruments: Instruments,
    ) -> None:
        self._items = items
        self._answers = answers
        self._deferral = deferral
        self._tracing = instruments.tracing
        self._clock = instruments.clock

    async def send_read(self, polled: PolledRecords, complete: list[Request]) -> None:
        """Charge requests to their models' shares, and send them on."""
        self._trace(complete)
        runnable, ended = _divide(complete)
        if polled.isolation is not None:
            polled.isolation.isolate(runnable)
        deferral = self._deferral
        over_share: list[Request] = []
        if deferral is not None and runnable:
            runnable, over_share, late = deferral.charge(
                runnable, is_reread=polled.is_reread, is_isolated=polled.is_isolated
            )
            ended += late
        await self._send(runnable, ended)
        # Wait last, so that other models' requests do not wait for this model's room.
        if deferral is not None and over_share:
            await self._send(await deferral.wait_for_room(over_share), [])

    async def take_room(self, polled: PolledRecords, request: Request) -> bool:
        """Charge a request that has to wait to its model's share; return False if it was left in
        the log, or has ended.
        """
        deferral = self._deferral
        if deferral is None:
            return True
        chosen, over_share, late = deferral.charge([request], is_reread=polled.is_reread)
        if over_share:
            chosen += await deferral.wait_for_room(over_share)
        if late:
            await self.send_charged(late)
        return bool(chosen)

    async def send_charged(self, requests: list[Request]) -> None:
        """Send on requests that need no room, because they are charged already or have ended."""
        self._trace(requests)
        await self._send(*_divide(requests))

    async def send_transformed(self, payloads: Sequence[PendingValue]) -> None:
        """Send on requests whose inputs were made, or that have ended; those whose models are known
        only now are charged to these.
        """
        self._trace([payload.request for payload in payloads])
        # Find all of them first: a request that was sent may be answered, and its share forgotten,
        # before the next one is charged.
        misplaced = [payload for payload in payloads if self._is_misplaced(payload.request)]
        placed = [payload.request for payload in payloads if payload not in misplaced]
        await self._send(*_divide(placed))
        for payload in misplaced:
            assert self._deferral is not None
            kept, over_share, late = self._deferral.charge_again(
                payload.request, is_reread=payload.is_reread
            )
            await self._send(kept, late)
            if over_share:
                await self._send(await self._deferral.wait_for_room(over_share), [])

    async def send_skipped(self, assignment: AssignedPartition, last: int) -> None:
        """Send the marker of the offsets up to `last` that the log skipped, to be acknowledged."""
        await self._answers.send([skipped_range(assignment, last)])

    def close(self) -> None:
        """End the input of both stages."""
        self._items.close()
        self._answers.close()

    def _is_misplaced(self, request: Request) -> bool:
        """Return True if a request is charged to another share than that of its model."""
        if self._deferral is None or request.failure is not None:
            return False
        ack_handle = request.ack_handle
        assert isinstance(ack_handle, InFlightAck)
        share = self._deferral.shares.share(request.model, request.envelope.tenant)
        return ack_handle.share is not share

    async def _send(self, runnable: list[Request], ended: list[Request]) -> None:
        if ended:
            await self._answers.send(ended)
        if runnable:
            await self._items.send(runnable)

    def _trace(self, requests: Sequence[Request]) -> None:
        if self._tracing is not None:
            self._tracing.ingested(requests, self._clock())


def _take_all(filled: list[T]) -> list[T]:
    """Remove and return all items of a list that others fill."""
    taken = filled[:]
    filled.clear()
    return taken


def _divide(requests: list[Request]) -> tuple[list[Request], list[Request]]:
    """Split requests into (runnable, ended)."""
    runnable = [request for request in requests if request.failure is None]
    if len(runnable) == len(requests):
        return runnable, []
    return runnable, [request for request in requests if request.failure is not None]
