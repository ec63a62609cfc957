"""The ingest stage: records of a partition → checked requests → the batcher, or an answer.

The path of a record: `_read_all` receives the polled records of a partition, `RequestReader.read`
decodes and checks them, and `_dispatch` sends on the requests that are complete (`RequestSender`):
these are *runnable*, or they have *ended* with a failure, which the responder answers.

The others are `Incomplete`. They wait for their objects (`ClaimWaits`), then for their schemas
(`SchemaWaits`), then for a worker that makes their inputs (`TransformWaits`); most need only one of
the three. Each has tasks of its own, so that reading goes on meanwhile, and calls back when it is
done: `_on_object_fetched`, `_on_schemas_fetched`, `_on_transformed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from operator import length_hint
from typing import NamedTuple

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
from headrace.tuning import TUNING, Tuning


class Incomplete(NamedTuple):
    """Requests that have to wait before they are complete, by what they wait for first.

    Attributes:
        awaiting_object: their values are in stores.
        awaiting_schema: the schemas of their records are in a registry.
        awaiting_worker: a worker decompresses or decodes their values, or makes their inputs.
    """

    awaiting_object: list[PendingClaim]
    awaiting_schema: list[PendingTransform]
    awaiting_worker: list[PendingValue]

    def __bool__(self) -> bool:
        return any(self)

    def requests(self) -> list[Request]:
        """Return all of them."""
        return [each.request for waiting in self for each in waiting]

    def take(self) -> Incomplete:
        """Remove all; return those that have not ended meanwhile."""
        taken = Incomplete(
            [each for each in self.awaiting_object if each.request.failure is None],
            [each for each in self.awaiting_schema if each.request.failure is None],
            [each for each in self.awaiting_worker if each.request.failure is None],
        )
        for waiting in self:
            waiting.clear()
        return taken


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
        tuning: Tuning = TUNING,
        fetcher: ClaimFetcher | None = None,
        transforms: TransformPool | None = None,
    ) -> None:
        self._tuning = tuning.ingest
        self._source = source
        self._sender = RequestSender(items, answers, source.deferral, instruments)
        self._metrics = instruments.metrics
        # `RequestReader.read` adds the requests that have to wait; `_dispatch` takes them.
        self._incomplete = Incomplete([], [], [])
        decompressor = InlineDecompressor(rules.limits, tuning.ingest)
        self._workers = transforms or TransformPool(
            [TransformThread(tuning.transforms)], tuning.ingest.transformed_bytes
        )
        self._transforms = TransformWaits(
            self._workers,
            self._on_transformed,
            source.quarantine.gate,
            instruments.metrics,
            instruments.clock,
            tuning.ingest,
        )
        self._schemas = SchemaWaits(self._on_schemas_fetched, instruments.clock, tuning.schemas)
        self._claims: ClaimWaits | None = None
        if fetcher is not None:
            self._claims = ClaimWaits(
                fetcher,
                rules,
                self._on_object_fetched,
                source.tracker.budget,
                source.freed,
                instruments.clock,
                tuning.ingest,
            )
        self._rules = replace(
            rules,
            decompressor=decompressor,
            transform_later=self._incomplete.awaiting_worker.append,
            fetch_schema_later=self._incomplete.awaiting_schema.append,
            read_claim=None if fetcher is None else fetcher.read_claim,
            fetch_later=self._incomplete.awaiting_object.append,
        )
        self._reader = RequestReader(self._rules, decompressor, instruments.clock, tuning.ingest)

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
            read: list[Request] = []
            if polled.skipped is not None:
                await self._sender.send_skipped(assignment, polled.skipped)
            while length_hint(records, 1) and not assignment.revoked:
                read = self._reader.read(polled, records)
                if not read:
                    break
                await self._dispatch(polled, read)
                # Yield even without a pause: the other stages work in between.
                # Those that have ended take no more time from others.
                ahead = assignment.in_flight - assignment.answering
                is_far_ahead = ahead > self._tuning.far_ahead_requests
                pause_s = self._tuning.far_ahead_pause_s if is_far_ahead else 0.0
                await asyncio.sleep(len(read) * pause_s)
            # Otherwise the last chunk would stay in memory while the next one is awaited.
            del polled, records, read

    async def _dispatch(self, polled: PolledRecords, requests: Sequence[Request]) -> None:
        """Send on the requests that are complete, and let the others wait."""
        # Records that cancel a request are not admitted, so they have the null ack.
        cancelling = [each for each in requests if each.ack_handle is NULL_ACK]
        if not (cancelling or self._incomplete):
            await self._sender.send_read(polled, list(requests))
            return
        # First, since requests that are cancelled now are complete: they have ended.
        left = self._cancel(cancelling) if cancelling else []
        incomplete = self._incomplete.take()
        waiting = set(incomplete.requests())
        complete = [
            each for each in requests if each not in waiting and each.ack_handle is not NULL_ACK
        ]
        # Before the others wait for room: these need not wait for it.
        await self._sender.send_read(polled, complete)
        if polled.is_isolated:
            await self._complete_alone(polled, incomplete)
        else:
            await self._let_wait(polled, incomplete)
        if left:
            # Last: what they cancel must have been sent before.
            await self._transforms.passed_on()
            await self._sender.send_charged(left)

    def _cancel(self, cancelling: Sequence[Request]) -> list[Request]:
        """End the requests that wait here and that records cancel, those read with them included;
        return the records that cancel none of them.
        """
        found = find_cancelled(cancelling, self._incomplete.requests())
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

    async def _let_wait(self, polled: PolledRecords, incomplete: Incomplete) -> None:
        """Let requests wait, as far as their models' shares have room."""
        # One after the other: charged together, they would leave no room for what fits.
        for transform in incomplete.awaiting_schema:
            self._transforms.reserve(transform)
            if await self._sender.take_room(polled, transform.request):
                self._schemas.add(transform)
        for payload in incomplete.awaiting_worker:
            self._transforms.reserve(payload)
            payload.is_reread = polled.is_reread
            if await self._sender.take_room(polled, payload.request):
                self._transforms.add(payload)
        # Last, so that other requests do not wait for room for these.
        for claimed in incomplete.awaiting_object:
            assert self._claims is not None
            is_charged = self._source.deferral is not None
            if is_charged:
                charge(claimed, 1)
            if await self._sender.take_room(polled, claimed.request):
                self._claims.add(claimed, is_charged=is_charged)

    async def _complete_alone(self, polled: PolledRecords, incomplete: Incomplete) -> None:
        """Complete the request that runs alone, and pass it on, unless it is left in the log:
        nothing else runs until it has been answered.
        """
        assert polled.isolation is not None
        waiting, payloads = list(incomplete.awaiting_schema), []
        for value in incomplete.awaiting_worker:
            if not isinstance(value, PendingCompressed):
                payloads.append(value)
                continue
            await self._transforms.run_alone(value)
            decoded = self._decode_decompressed(value)
            waiting += decoded.awaiting_schema
            payloads += decoded.awaiting_worker
            if not decoded.is_pending:
                await self._sender.send_read(polled, [decoded.request])
        for pending_claim in incomplete.awaiting_object:
            assert self._claims is not None
            claimed = await self._claims.fetch_alone(pending_claim)
            if claimed is None:
                polled.isolation.leave()
                continue
            waiting += claimed.awaiting_schema
            payloads += claimed.awaiting_worker
            if not claimed.is_pending:
                await self._sender.send_read(polled, [claimed.request])
        for payload in waiting:
            if await self._schemas.fetch_alone(payload):
                payloads.append(payload)
            else:
                polled.isolation.leave()
        for each in payloads:
            await self._sender.send_read(polled, [await self._transforms.run_alone(each)])

    async def _on_object_fetched(self, claimed: Decoded) -> None:
        """Pass on a request whose object is here, or that has ended, or let it wait further."""
        if claimed.is_pending:
            self._let_wait_further(claimed)
            return
        await self._sender.send_charged([claimed.request])

    def _let_wait_further(self, claimed: Decoded) -> None:
        """Let a request whose value is here wait for its schema or for a worker."""
        for payload in claimed.awaiting_schema:
            self._transforms.reserve(payload)
            self._schemas.add(payload)
        for value in claimed.awaiting_worker:
            self._transforms.reserve(value)
            self._transforms.add(value)

    def _on_schemas_fetched(self, payloads: Sequence[PendingTransform]) -> None:
        """Let payloads whose schemas are known, or whose requests have ended, wait for a worker."""
        for payload in payloads:
            self._transforms.add(payload)

    async def _on_transformed(self, payloads: Sequence[PendingValue]) -> None:
        """Pass on requests whose inputs were made, or that have ended; those whose values were
        decompressed may have to wait further.
        """
        for decoded in [self._decode_decompressed(payload) for payload in payloads]:
            if decoded.is_pending:
                self._let_wait_further(decoded)
                payloads = [each for each in payloads if each.request is not decoded.request]
        await self._sender.send_transformed(payloads)

    def _decode_decompressed(self, payload: PendingValue) -> Decoded:
        """Decode a value that a worker has decompressed. The request of any other payload, whose
        inputs a worker has made, is returned as it is.
        """
        request = payload.request
        if isinstance(payload, PendingCompressed) and request.failure is None:
            bind_decompressed(request, payload.plain, self._rules)
            _, awaiting_schema, awaiting_worker = self._incomplete.take()
            for value in (*awaiting_schema, *awaiting_worker):
                value.is_reread = payload.is_reread
            return Decoded(request, awaiting_schema, awaiting_worker)
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


def _divide(requests: list[Request]) -> tuple[list[Request], list[Request]]:
    """Split requests into (runnable, ended)."""
    runnable = [request for request in requests if request.failure is None]
    if len(runnable) == len(requests):
        return runnable, []
    return runnable, [request for request in requests if request.failure is not None]
