"""Background commits: acknowledged offsets are committed together after a short delay.

Only one commit runs at a time, so that an older one cannot overtake a newer one and move the group
backwards. A failed commit is not resent: the next one is made from the offsets at that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import structlog

from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.errors import Retriable
from headrace.log.errors import Fenced
from headrace.log.port import Committed, Consumer, TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, DeliveryTuning

log = structlog.get_logger(__name__)


class Committer:
    """Commits the progress of an in-flight tracker, and of source partitions not read here.

    Args:
        acked: set whenever there may be something new to commit.
        transactions: set for exactly-once delivery, where transactions commit, most of them with
            answers: the committer commits only what no answer carries.

    Attributes:
        failures: number of failed commits; `last_failure` is the reason of the last.
    """

    def __init__(
        self,
        tracker: InFlightTracker,
        source_offsets: SourceOffsets | None,
        metrics: Metrics,
        acked: AutoResetEvent,
        transactions: PartitionTransactions | None = None,
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tracker = tracker
        self._transactions = transactions
        self._tuning = tuning
        self._interval_s = (
            tuning.commit_interval_s
            if transactions is None
            else tuning.transactional_commit_interval_s
        )
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)
        self._source_offsets = source_offsets
        self._metrics = metrics
        self._acked = acked
        self._turn = asyncio.Lock()
        self._encoding_s = 0.0
        self._pending_since_s: float | None = None
        self.failures = 0
        self.last_failure = ""

    def age_s(self) -> float:
        """Return how long a commit has been pending; 0 if none is."""
        since_s = self._pending_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def run(self, consumer: Consumer) -> None:
        """Commit whenever there is something to commit, until cancelled."""
        tuning = self._tuning
        refresh_s = time.monotonic() + tuning.commit_refresh_interval_s
        pauses = Pauses(self._backoff)
        while True:
            if time.monotonic() >= refresh_s:
                refresh_s = time.monotonic() + tuning.commit_refresh_interval_s
                self._forget_committed()
            pause_s = self._interval_s
            if not await self.commit(consumer):
                pause_s = pauses.next_s()
            else:
                pauses.reset()
                if not self._committable():
                    await self._acked.wait(refresh_s - time.monotonic())
            # Encoding many answered ranges is slow, so it must not take the whole event loop.
            await asyncio.sleep(max(pause_s, self._encoding_s / tuning.encoding_share))

    async def commit(
        self, consumer: Consumer, revoked: Collection[TopicPartition] | None = None
    ) -> bool:
        """Commit now; return False if that failed and may be retried.

        Args:
            consumer: the consumer whose group commits.
            revoked: partitions read here to which the commit is limited; None for all.
        """
        async with self._turn:
            offsets = self._committable()
            if revoked is not None:
                offsets = {
                    partition: committed
                    for partition, committed in offsets.items()
                    if partition in revoked or self._tracker.get(partition) is None
                }
            if not offsets:
                self._pending_since_s = None
                return True
            if self._pending_since_s is None:
                self._pending_since_s = time.monotonic()
            try:
                await self._write(consumer, offsets)
            except Fenced as error:
                # The group is rebalancing: these partitions are no longer assigned to us.
                log.warning(Event.COMMIT_REFUSED, reason=str(error))
                return self._failed(error)
            except Retriable as error:
                log.warning(Event.COMMIT_FAILED, reason=str(error))
                return self._failed(error)
            self._pending_since_s = None
            return True

    async def _write(self, consumer: Consumer, offsets: dict[TopicPartition, Committed]) -> None:
        if self._transactions is not None:
            await _commit_remaining(
                self._transactions, {partition.partition for partition in offsets}
            )
            return
        with self._metrics.commit():
            await consumer.commit(offsets)
        self._tracker.note_committed(offsets)
        if self._source_offsets is not None:
            self._source_offsets.note_committed(offsets)

    def _failed(self, error: Retriable) -> bool:
        self.failures += 1
        self.last_failure = str(error)
        return False

    def _committable(self) -> dict[TopicPartition, Committed]:
        began_s = time.perf_counter()
        offsets = self._tracker.committable()
        if self._source_offsets is not None:
            offsets |= self._source_offsets.committable()
        self._encoding_s = time.perf_counter() - began_s
        return offsets

    def _forget_committed(self) -> None:
        self._tracker.forget_committed()
        if self._source_offsets is not None:
            self._source_offsets.forget_committed()


async def _commit_remaining(transactions: PartitionTransactions, numbers: Collection[int]) -> None:
    """Run one transaction per source partition concurrently, since each may wait for its lock.

    Raises:
        Retriable: some of them were not committed; the others were.
    """
    failures: list[Retriable] = []

    async def commit(number: int) -> None:
        try:
            await transactions.commit_remaining(number)
        except Retriable as error:
            failures.append(error)

    async with asyncio.TaskGroup() as tasks:
        for number in sorted(numbers):
            tasks.create_task(commit(number), name=f"commit-remaining-{number}")
    if failures:
        raise failures[0]
