"""Lag of a source, and its throughput.

End offsets are queried in the background, every few seconds; if that fails, the last ones stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.consumer.throughput import Throughput
from headrace.errors import Rejected, Retriable
from headrace.log.port import Consumer, TopicPartition
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class Stall:
    """Time for which records have been waiting while none was answered."""

    def __init__(self) -> None:
        self._acked = 0
        self._since_s: float | None = None

    def look(self, now_s: float, acked: int, *, waits: bool) -> None:
        """Take note of how many were answered, from the beginning, and whether any record waits."""
        if not waits:
            self._since_s = None
        elif self._since_s is None or acked != self._acked:
            self._since_s = now_s
        self._acked = acked

    def for_s(self, now_s: float, acked: int) -> float:
        """Return the time without an answer; 0 while nothing waits, or something was answered."""
        if self._since_s is None or acked != self._acked:
            return 0.0
        return now_s - self._since_s


class LagMonitor:
    """Looks ahead, in `run`.

    Args:
        records: counts what is not answered, read or not.
        is_working: whether records that were read wait for their answers.

    Attributes:
        stall: whether the source gets on.
        acknowledged: records answered from the beginning; the source counts here.
        ends: the end offset of each of our partitions, as last told.
        throughput: what was learned.
    """

    def __init__(
        self,
        records: Callable[[], int],
        is_working: Callable[[], bool],
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._tuning = tuning
        self._records = records
        self._is_working = is_working
        self.stall = Stall()
        self.acked = 0
        self.ends: dict[TopicPartition, int] = {}
        self.throughput = Throughput()

    async def run(self, consumer: Consumer) -> None:
        """Until cancelled."""
        asked_s = 0.0
        while True:
            if time.monotonic() - asked_s >= self._tuning.end_offsets_interval_s:
                await self._ask(consumer)
                asked_s = time.monotonic()
            self.throughput.observe(time.monotonic(), self.acked, self._records())
            waits = self._is_working() or await self._is_unread(consumer)
            self.stall.look(time.monotonic(), self.acked, waits=waits)
            await asyncio.sleep(self._tuning.throughput_interval_s)

    def forget(self, partitions: Sequence[TopicPartition]) -> None:
        """They are not ours any more."""
        for partition in partitions:
            self.ends.pop(partition, None)

    async def _is_unread(self, consumer: Consumer) -> bool:
        """Whether the log has records that are not read. Where its end is no record, such as the
        marker of a transaction, reading stands behind that all the same.
        """
        for partition in consumer.assignment():
            try:
                if await consumer.position(partition) < self.ends.get(partition, 0):
                    return True
            except Retriable:
                continue  # revoked this moment, or not known yet
        return False

    async def _ask(self, consumer: Consumer) -> None:
        ours = sorted(consumer.assignment())
        if not ours:
            return
        try:
            ends = await consumer.end_offsets(ours)
        except (Retriable, Rejected) as error:
            log.warning(Event.END_UNKNOWN, reason=str(error))
            return
        still_ours = consumer.assignment()
        self.ends.update((each, end) for each, end in ends.items() if each in still_ours)
