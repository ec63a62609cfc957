"""Writing records until the log has acknowledged them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from headrace.errors import Rejected, Retriable
from headrace.log.errors import LogRefused, RecordTooLarge, TopicForbidden, UnknownPartition
from headrace.log.port import NewRecord, Producer, TopicPartition
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

ORDERED_PIECE_BYTES = 64 * 1024
"""Less than both logs put into one batch: a piece is taken or refused as a whole."""
_RECORD_BYTES = 100
"""What a record takes beside its key, value and headers, at most."""


class _Unsent(Retriable):
    """Some records are not acknowledged."""


async def deliver(
    producer: Producer,
    partition: TopicPartition,
    records: Sequence[NewRecord],
    metrics: Metrics | None = None,
) -> dict[int, Rejected]:
    """Write records of one partition and wait until they are acknowledged.

    While no broker answers it tries again, with backoff, until it is cancelled; a record whose
    acknowledgement was lost is then written twice. A batch that is refused is taken apart.

    Returns:
        By index, in order, the records that are refused by themselves: `RecordTooLarge`,
        `RecordRefused`, or all by `UnknownPartition` or `TopicForbidden`. All others are written.
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
                if metrics is not None:
                    metrics.retried("send", len(first))
                first = await delivery.attempt(first)
                if first:
                    raise _Unsent(f"{partition}: {len(first)} records are not acknowledged")
    return dict(sorted(delivery.refused.items()))


async def deliver_in_order(
    producer: Producer,
    partition: TopicPartition,
    records: Sequence[NewRecord],
    metrics: Metrics,
) -> tuple[int, Rejected] | None:
    """Write records of one partition, none before the one before it is acknowledged or refused.

    It goes by pieces that a batch holds. Retries are as in `deliver`.

    Returns:
        the first record that is refused by itself, by its index, and why: what comes before it is
        written, what comes after it is not. None when all are written.
    """
    start = 0
    for stop in _pieces(records):
        refused = await _write_piece(producer, partition, records[start:stop], metrics)
        if refused is not None:
            return start + refused[0], refused[1]
        start = stop
    return None


def _pieces(records: Sequence[NewRecord]) -> Iterator[int]:
    """Where each piece ends."""
    filled = 0
    for index, record in enumerate(records):
        size = _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
        size += sum(len(name) + len(value or b"") for name, value in record.headers)
        if filled and filled + size > ORDERED_PIECE_BYTES:
            yield index
            filled = 0
        filled += size
    if records:
        yield len(records)


async def _write_piece(
    producer: Producer,
    partition: TopicPartition,
    records: Sequence[NewRecord],
    metrics: Metrics,
) -> tuple[int, Rejected] | None:
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(Retriable),
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        before_sleep=_say_so,
    ):
        with attempt:
            if attempt.retry_state.attempt_number > 1:
                metrics.retried("send", len(records))
            try:
                for run in await producer.send(partition, records):
                    await run.acknowledged
            except (UnknownPartition, TopicForbidden) as error:
                return 0, error
            except Rejected as error:
                refusal = error
            else:
                return None
    if len(records) == 1:
        return 0, refusal
    middle = len(records) // 2
    refused = await _write_piece(producer, partition, records[:middle], metrics)
    if refused is not None:
        return refused
    refused = await _write_piece(producer, partition, records[middle:], metrics)
    return None if refused is None else (middle + refused[0], refused[1])


def too_large(partition: TopicPartition, refused: Mapping[int, Rejected]) -> list[int]:
    """The indexes of refused records, for a topic of ours, which refuses for size alone.

    Raises:
        LogRefused: the topic was deleted, is set up in another way than ours are, or we may not
            write to it.
    """
    for error in refused.values():
        if not isinstance(error, RecordTooLarge):
            raise LogRefused(f"{partition}: {error.message}") from error
    return list(refused)


def _say_so(state: RetryCallState) -> None:
    log.warning(Event.SEND_RETRIED, attempt=state.attempt_number, reason=str(state.outcome))


class _Delivery:
    """The records of one `deliver`, and which of them were refused."""

    def __init__(
        self, producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> None:
        self._producer = producer
        self._partition = partition
        self._records = records
        self.refused: dict[int, Rejected] = {}

    async def attempt(self, indexes: Sequence[int]) -> Sequence[int]:
        """Try once; returns what is to be tried again."""
        records = [self._records[index] for index in indexes]
        try:
            runs = await self._producer.send(self._partition, records)
        except (UnknownPartition, TopicForbidden) as error:
            self.refused |= dict.fromkeys(indexes, error)
            return []
        except Rejected as error:
            return await self._halve(indexes, error)
        except Retriable as error:
            log.warning(Event.SEND_FAILED, partition=str(self._partition), reason=str(error))
            return indexes
        again: list[int] = []
        start = 0
        for run in runs:
            part = indexes[start : start + run.size]
            start += run.size
            try:
                await run.acknowledged
            except TopicForbidden as error:
                self.refused |= dict.fromkeys(part, error)
            except Rejected as error:
                again += await self._halve(part, error)
            except Retriable as error:
                log.warning(Event.SEND_FAILED, partition=str(self._partition), reason=str(error))
                again += part
        return again

    async def _halve(self, indexes: Sequence[int], error: Rejected) -> Sequence[int]:
        """What is refused is the batch, which may hold no record that is refused by itself."""
        if len(indexes) == 1:
            self.refused[indexes[0]] = error
            return []
        middle = len(indexes) // 2
        return [
            *await self.attempt(indexes[:middle]),
            *await self.attempt(indexes[middle:]),
        ]
