"""Ingest's path: records of one partition → requests, checked → on to the batcher, or answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from headrace.flow.channel import Outlet
from headrace.flow.inflight import Assignment
from headrace.flow.skipping import skipped_range
from headrace.flow.source import Source
from headrace.flow.suspects import Unit
from headrace.log.port import Record
from headrace.messages import Request
from headrace.services.ingest.reading import (
    Rules,
    read_condemned,
    read_request,
    read_transformed,
)
from headrace.services.ingest.transforming import Payload, TransformThread
from headrace.telemetry.instruments import Instruments

FAR_AHEAD = 4096
PAUSE_S = 40e-6
"""With more than so many requests of a partition in flight, a pause follows for each that was read.
Reading on is still of use, to refuse early what will be late and to see whose turn it is; but it
must not take the time of what was read before."""

HOLD_LOOP_S = 0.01
"""Records are read for this long at a time; images, or large JSON, take milliseconds each."""
_NOBODY: frozenset[Unit] = frozenset()


class IngestService:
    """Reads request records and lets through what can run.

    Args:
        items: takes the requests that can run.
        answers: takes those that cannot, with their failures.
    """

    def __init__(
        self,
        source: Source,
        items: Outlet[list[Request]],
        answers: Outlet[list[Request]],
        rules: Rules,
        instruments: Instruments,
    ) -> None:
        self._source = source
        self._items = items
        self._answers = answers
        self._deferred: list[Payload] = []
        self._rules = rules._replace(defer=self._deferred.append)
        self._transforms = TransformThread()
        self._tracing = instruments.tracing
        self._clock = instruments.clock

    async def run(self) -> None:
        """Until the source stops reading."""
        while (delivery := await self._source.receive()) is not None:
            assignment, records = delivery.assignment, iter(delivery.records)
            if delivery.skipped is not None:
                await self._answers.send([skipped_range(assignment, delivery.skipped)])
            condemned = delivery.trial.condemned if delivery.trial is not None else _NOBODY
            while not assignment.void:
                able, ended = self._read(assignment, records, condemned)
                if self._deferred:
                    able, ended = await self._transform(able, ended)
                if ended:
                    await self._answers.send(ended)
                if able:
                    await self._items.send(able)
                if not (able or ended):
                    break
                far_ahead = assignment.in_flight > FAR_AHEAD
                await asyncio.sleep((len(able) + len(ended)) * PAUSE_S if far_ahead else 0)
        self._transforms.close()
        self._items.close()
        self._answers.close()

    async def _transform(
        self, able: list[Request], ended: list[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Those that were deferred come after the others of their chunk."""
        payloads = self._deferred[:]
        self._deferred.clear()
        await self._transforms.run(payloads)
        requests = [read_transformed(payload) for payload in payloads]
        if self._tracing is not None:
            self._tracing.ingested(requests, self._clock())
        late = {id(request) for request in requests}
        able = [one for one in able if id(one) not in late]
        return (
            able + [one for one in requests if one.failure is None],
            ended + [one for one in requests if one.failure is not None],
        )

    def _read(
        self, assignment: Assignment, records: Iterator[Record], condemned: frozenset[Unit]
    ) -> tuple[list[Request], list[Request]]:
        """Admit and check records, for a moment; both lists are empty when there are no more.

        What was answered before this assignment is passed over.
        """
        now_us = self._clock()
        until_s = time.perf_counter() + HOLD_LOOP_S
        able: list[Request] = []
        ended: list[Request] = []
        chains = assignment.chains
        for record in records:
            if record.offset in assignment.progress:
                assignment.skip(record.offset)
                continue
            if condemned and (record.offset, 0) in condemned:
                request = read_condemned(record, assignment, self._rules, now_us)
            else:
                request = read_request(record, assignment, self._rules, now_us)
            # One that cancels is not admitted: no answer of its own could go before another.
            if chains is not None and assignment.last_delivered == record.offset:
                request.after = chains.follow(record.key, record.offset)
            (able if request.failure is None else ended).append(request)
            if time.perf_counter() >= until_s:
                break
        if self._tracing is not None:
            checked_us = self._clock()
            deferred = {id(payload.request) for payload in self._deferred}
            ready = [one for one in able if id(one) not in deferred] if deferred else able
            self._tracing.ingested(ready, checked_us)
            self._tracing.ingested(ended, checked_us)
        return able, ended
