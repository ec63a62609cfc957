"""Writing records until the log has acknowledged them."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from headrace.errors import Retriable
from headrace.log.port import NewRecord, Producer, RecordTooLarge, TopicPartition

log = structlog.get_logger(__name__)


class _Unsent(Retriable):
    """Some records are not acknowledged."""


async def deliver(
    producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
) -> list[int]:
    """Write records of one partition and wait until they are acknowledged.

    While no broker answers it tries again, with backoff, until it is cancelled; a record whose
    acknowledgement was lost is then written twice. A batch that is too large is taken apart.

    Returns:
        The indexes of the records that are too large by themselves; all others are written.
    """
    delivery = _Delivery(producer, partition, records)
    first = await delivery.attempt(range(len(records)))
    if first:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(_Unsent),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            before_sleep=_say_so,
        ):
            with attempt:
                first = await delivery.attempt(first)
                if first:
                    raise _Unsent(f"{partition}: {len(first)} records are not acknowledged")
    return delivery.too_large


def _say_so(state: RetryCallState) -> None:
    log.warning("send_retried", attempt=state.attempt_number, reason=str(state.outcome))


class _Delivery:
    """The records of one `deliver`, and which of them were refused."""

    def __init__(
        self, producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> None:
        self._producer = producer
        self._partition = partition
        self._records = records
        self.too_large: list[int] = []

    async def attempt(self, indexes: Sequence[int]) -> Sequence[int]:
        """Try once; returns what is to be tried again."""
        records = [self._records[index] for index in indexes]
        try:
            runs = await self._producer.send(self._partition, records)
        except RecordTooLarge:
            return await self._halve(indexes)
        except Retriable as error:
            log.warning("send_failed", partition=str(self._partition), reason=str(error))
            return indexes
        again: list[int] = []
        start = 0
        for run in runs:
            part = indexes[start : start + run.size]
            start += run.size
            try:
                await run.acknowledged
            except RecordTooLarge:
                again += await self._halve(part)
            except Retriable as error:
                log.warning("send_failed", partition=str(self._partition), reason=str(error))
                again += part
        return again

    async def _halve(self, indexes: Sequence[int]) -> Sequence[int]:
        """The limit is per batch, so a refused batch may hold no record that is too large."""
        if len(indexes) == 1:
            self.too_large += indexes
            return []
        middle = len(indexes) // 2
        return [
            *await self.attempt(indexes[:middle]),
            *await self.attempt(indexes[middle:]),
        ]
