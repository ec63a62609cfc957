"""Ingest's path: records of one partition → requests, checked → on to the batcher, or answered."""

from __future__ import annotations

from headrace.clock import Clock
from headrace.config import LimitSettings
from headrace.flow.channel import Outlet
from headrace.flow.source import Delivery, Source
from headrace.messages import Request
from headrace.services.ingest.reading import ModelLookup, read_request


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
        models: ModelLookup,
        limits: LimitSettings,
        clock: Clock,
    ) -> None:
        self._source = source
        self._items = items
        self._answers = answers
        self._models = models
        self._limits = limits
        self._clock = clock

    async def run(self) -> None:
        """Until the source stops reading."""
        while (delivery := await self._source.receive()) is not None:
            able, ended = self._read(delivery)
            if ended:
                await self._answers.send(ended)
            if able:
                await self._items.send(able)
        self._items.close()
        self._answers.close()

    def _read(self, delivery: Delivery) -> tuple[list[Request], list[Request]]:
        """Admit and check the records; what was answered before this assignment is passed over."""
        assignment = delivery.assignment
        now_us = self._clock()
        able: list[Request] = []
        ended: list[Request] = []
        for record in delivery.records:
            if record.offset in assignment.progress:
                assignment.skip(record.offset)
                continue
            request = read_request(record, assignment, self._models, self._limits, now_us)
            (able if request.failure is None else ended).append(request)
        return able, ended
