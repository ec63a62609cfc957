"""What lies ahead of a source, and how quickly it gets through.

End offsets are asked for in the background, every few seconds; a source without an answer keeps
the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.errors import Rejected, Retriable
from headrace.log.port import Consumer, TopicPartition
from headrace.telemetry.logs import Event
from headrace.telemetry.throughput import Throughput

log = structlog.get_logger(__name__)

LOOK_S = 1.0
ASK_S = 5.0


class Backlog:
    """Looks ahead, in `run`.

    Args:
        records: counts what is not answered, read or not.

    Attributes:
        settled: records answered from the beginning; the source counts here.
        ends: the end offset of each of our partitions, as last told.
        throughput: what was learned.
    """

    def __init__(self, records: Callable[[], int]) -> None:
        self._records = records
        self.settled = 0
        self.ends: dict[TopicPartition, int] = {}
        self.throughput = Throughput()

    async def run(self, consumer: Consumer) -> None:
        """Until cancelled."""
        asked_s = 0.0
        while True:
            if time.monotonic() - asked_s >= ASK_S:
                await self._ask(consumer)
                asked_s = time.monotonic()
            self.throughput.observe(time.monotonic(), self.settled, self._records())
            await asyncio.sleep(LOOK_S)

    def forget(self, partitions: Sequence[TopicPartition]) -> None:
        """They are not ours any more."""
        for partition in partitions:
            self.ends.pop(partition, None)

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
