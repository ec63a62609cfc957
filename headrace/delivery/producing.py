"""Writing records until the log has acknowledged them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from headrace.errors import Rejected, Retriable, drop_tracebacks
from headrace.log.errors import LogRefused, RecordTooLarge, TopicForbidden, UnknownPartition
from headrace.log.port import NewRecord, Producer, TopicPartition
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import DeliveryTuning

log = structlog.get_logger(__name__)


class _Unsent(Retriable):
    """Some records are not acknowledged."""


async def deliver(
    producer: Producer,
    partition: TopicPartition,
    records: Sequence[NewRecord],
    metrics: Metrics | None = None,
    wanted: Callable[[int], bool] | None = None,
    *,
    tuning: DeliveryTuning,
) -> dict[int, Rejected]:
    """Write records of one partition and wait until they are acknowledged.

    While no broker answers, retry with backoff until cancelled. A record whose acknowledgement was
    lost is then written twice. A record is not retried once `wanted(index)` is False. A refused
    batch is halved to find the refused records.

    Returns:
        the error of each refused record by index, in order: `RecordTooLarge`, `RecordRefused`, or
        for all records `UnknownPartition` or `TopicForbidden`. All others are written, or no
        longer wanted.
    """
    writing = _Writing(producer, partition, records)
    unsent = await writing.attempt(range(len(records)))
    if unsent:
        async for attempt in _until_acknowledged(tuning):
            with attempt:
                if metrics is not None:
                    metrics.retried("send", len(unsent))
                if wanted is not None:
                    unsent = list(filter(wanted, unsent))
                unsent = await writing.attempt(unsent)
                if unsent:
                    raise _Unsent(f"{partition}: {len(unsent)} records are not acknowledged")
    return dict(sorted(writing.refused.items()))


async def deliver_in_order(
    producer: Producer,
    partition: TopicPartition,
    records: Sequence[NewRecord],
    metrics: Metrics,
    wanted: Callable[[], bool] | None = None,
    *,
    tuning: DeliveryTuning,
) -> tuple[int, Rejected] | None:
    """Write records of one partition in order, up to the first refused one.

    One batch is sent at a time: one that follows could be written although this one is not. Retries
    are as in `deliver`; none is made once the records are no longer `wanted`.

    Returns:
        index and error of the first refused record: those before it are written, those after it
        are not. None if all are written, or no longer wanted.
    """
    return await _InOrder(producer, partition, metrics, wanted, tuning).write(records)


class _InOrder:
    """Writes batches one after another."""

    def __init__(
        self,
        producer: Producer,
        partition: TopicPartition,
        metrics: Metrics,
        wanted: Callable[[], bool] | None,
        tuning: DeliveryTuning,
    ) -> None:
        self._tuning = tuning
        self._producer = producer
        self._partition = partition
        self._metrics = metrics
        self._wanted = wanted

    async def write(self, records: Sequence[NewRecord]) -> tuple[int, Rejected] | None:
        """Return index and error of the first refused record; none after it is written."""
        start, most = 0, len(records)
        while start < len(records):
            async for attempt in _until_acknowledged(self._tuning):
                with attempt:
                    if self._wanted is not None and not self._wanted():
                        return None
                    if attempt.retry_state.attempt_number > 1:
                        self._metrics.retried("send", len(records) - start)
                    size, error = await self._send(records[start : start + most])
            if error is None:
                start, most = start + size, len(records)
            elif size == 1 or isinstance(error, UnknownPartition | TopicForbidden):
                return start, error
            else:
                most = size // 2  # find the refused record
        return None

    async def _send(self, records: Sequence[NewRecord]) -> tuple[int, Rejected | None]:
        """Send a batch once; return its size, and why it is refused. Raises `Retriable`."""
        size = len(records)
        try:
            first, *_ = await self._producer.send(self._partition, records, first_batch_only=True)
            size = first.size
            await first.acknowledged
        except Rejected as error:
            drop_tracebacks(error)
            return size, error
        return size, None


def _until_acknowledged(tuning: DeliveryTuning) -> AsyncRetrying:
    pauses = Pauses(Backoff(tuning.send_retry_first_s, tuning.send_retry_max_s, jitter=0.5))
    return AsyncRetrying(
        retry=retry_if_exception_type(Retriable),
        wait=lambda _: pauses.next_s(),
        before_sleep=_log_retry,
    )


def refused_for_size(refused: Mapping[int, Rejected]) -> list[int]:
    """Return the indexes of refused records, for an internal topic, which refuses only for size.

    Raises:
        LogRefused: the topic was deleted, has an unexpected configuration, or may not be written
            to.
    """
    for error in refused.values():
        if not isinstance(error, RecordTooLarge):
            raise LogRefused(error.message) from error  # it has the name of the topic
    return list(refused)


def _log_retry(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    reason = "" if error is None else str(error)
    if error is not None:
        drop_tracebacks(error)  # its frames refer to the error, through the state, and the records
    log.warning(Event.SEND_RETRIED, attempt=state.attempt_number, reason=reason)


class _Writing:
    """The records of one `deliver` call, and which of them were refused.

    Errors are kept without tracebacks, which refer back to this object and to the errors: the
    records would stay in memory until the next garbage collection.
    """

    def __init__(
        self, producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> None:
        self._producer = producer
        self._partition = partition
        self._records = records
        self.refused: dict[int, Rejected] = {}

    async def attempt(self, indexes: Sequence[int]) -> Sequence[int]:
        """Send once; return the indexes to retry."""
        records = self._records
        if len(indexes) < len(records):
            records = [records[index] for index in indexes]
        try:
            batches = await self._producer.send(self._partition, records)
        except (UnknownPartition, TopicForbidden) as error:
            drop_tracebacks(error)
            self.refused |= dict.fromkeys(indexes, error)
            return []
        except Rejected as error:
            return await self._halve(indexes, error)
        except Retriable as error:
            log.warning(Event.SEND_FAILED, partition=str(self._partition), reason=str(error))
            return indexes
        again: list[int] = []
        start = 0
        for sent in batches:
            part = indexes[start : start + sent.size]
            start += sent.size
            try:
                await sent.acknowledged
            except TopicForbidden as error:
                drop_tracebacks(error)
                self.refused |= dict.fromkeys(part, error)
            except Rejected as error:
                again += await self._halve(part, error)
            except Retriable as error:
                drop_tracebacks(error)
                log.warning(Event.SEND_FAILED, partition=str(self._partition), reason=str(error))
                again += part
        return again

    async def _halve(self, indexes: Sequence[int], error: Rejected) -> Sequence[int]:
        """Retry a refused batch in halves: its records may be accepted in smaller batches."""
        drop_tracebacks(error)
        if len(indexes) == 1:
            self.refused[indexes[0]] = error
            return []
        middle = len(indexes) // 2
        return [
            *await self.attempt(indexes[:middle]),
            *await self.attempt(indexes[middle:]),
        ]
