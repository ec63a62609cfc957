"""The control topic on the log: read its records, and write one change as a transaction.

Two operators may change the deployment at once. Each change is a transaction of the transactional
id `{namespace}.control`: entering its producer fences every other writer and ends what it left
open, so that the records read afterwards are all that there will be before ours. If one of them is
newer than what the operator has seen, or if another writer fences us before the commit, the change
is not made, and the error names the generation that came before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog

from headrace.config import Settings
from headrace.errors import ConfigurationError, Rejected, Retriable
from headrace.log.errors import Fenced, LogUnavailable
from headrace.log.port import Consumer, Log, NewRecord, Record, TopicPartition
from headrace.models.wanted import Author, Change, Deployment, fold, make_record
from headrace.primitives.backoff import Backoff
from headrace.protocol.codec.control import decode_control, encode_control
from headrace.protocol.control import ControlRecord
from headrace.telemetry.logs import Event
from headrace.topics import Topic
from headrace.tuning import TUNING, ControlTuning

log = structlog.get_logger(__name__)


class ChangeOvertaken(Retriable):
    """Another change was made first.

    Args:
        seen: the generation that the change was meant for.
        last: the latest record; None if the topic has none.
    """

    def __init__(self, seen: int, last: ControlRecord | None) -> None:
        if (0 if last is None else last.generation) == seen:
            found = "got another change that is being written"
        elif last is None:
            found = "got an empty topic"
        else:
            found = f"got generation {last.generation}, {last.action} by {last.who}"
        super().__init__(f"control topic: expected generation {seen}, {found}; nothing was changed")
        self.last = last


class ControlReader:
    """Reads the control topic from its beginning; see `open_reader`."""

    def __init__(
        self, reader: Consumer, partition: TopicPartition, tuning: ControlTuning = TUNING.control
    ) -> None:
        self._reader = reader
        self._partition = partition
        self._tuning = tuning

    async def read_to_end(self) -> list[ControlRecord]:
        """Return the records from the current position to the end that the topic has now.

        Raises:
            LogUnavailable: not read within the deadline.
            UnknownFormat: a later release wrote one of them.
        """
        records: list[ControlRecord] = []
        limit_s = self._tuning.read_timeout_s
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        end = (await self._reader.end_offsets([self._partition]))[self._partition]
        # The position passes transaction markers, which end a transaction without being records.
        while await self._reader.position(self._partition) < end:
            if loop.time() > deadline_s:
                raise LogUnavailable(f"{self._partition}: not read to its end within {limit_s:g} s")
            # Behind the last record stands the marker of its transaction, which ends no poll.
            records += await self.poll(self._tuning.marker_poll_s)
        return records

    async def poll(self, timeout_s: float | None = None) -> list[ControlRecord]:
        """Return the next records; none after a while without any.

        Args:
            timeout_s: the while; None takes that of the tuning values.

        Raises:
            UnknownFormat: a later release wrote one of them.
            OffsetOutOfRange: the topic was deleted, or retention has removed records.
        """
        tuning = self._tuning
        polled = await self._reader.poll(
            tuning.poll_s if timeout_s is None else timeout_s, tuning.poll_records
        )
        return [
            each
            for records in polled.values()
            for record in records
            if (each := _decode_or_skip(record)) is not None
        ]


def _decode_or_skip(record: Record) -> ControlRecord | None:
    try:
        return decode_control(record.value or b"")
    except Rejected as error:
        log.warning(
            Event.INTERNAL_RECORD_UNREADABLE,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=error.message,
        )
        return None


class _Outcome(NamedTuple):
    """Records of the topic, and the state that they amount to."""

    records: list[ControlRecord]
    state: Deployment


class ControlTopic:
    """The control topic of a deployment.

    Args:
        log_: the log.
        settings: give the namespace and the topic's name.
        tuning: deadlines, and how often there is a snapshot.
    """

    def __init__(
        self, log_: Log, settings: Settings, tuning: ControlTuning = TUNING.control
    ) -> None:
        self._log = log_
        self._tuning = tuning
        self._partition = TopicPartition(settings.topic(Topic.CONTROL), 0)
        self._transactional_id = f"{settings.namespace}.control"
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)

    async def require(self) -> None:
        """Check that the topic exists.

        Raises:
            ConfigurationError: it does not.
            LogUnavailable: no broker answered.
        """
        name = self._partition.topic
        if (await self._log.describe_topics([name]))[name] is None:
            raise ConfigurationError(
                f"topic {name}: expected it to exist; `headrace topics create`"
            )

    @asynccontextmanager
    async def open_reader(self) -> AsyncIterator[ControlReader]:
        """Open a reader at the beginning of the topic.

        Raises:
            LogUnavailable: no broker answered.
        """
        async with self._log.reader([self._partition]) as reader:
            begin = await reader.beginning_offsets([self._partition])
            reader.seek(self._partition, begin[self._partition])
            yield ControlReader(reader, self._partition, self._tuning)

    async def read(self) -> list[ControlRecord]:
        """Return all records, the oldest first.

        Raises:
            LogUnavailable: not read within the deadline.
            UnknownFormat: a later release wrote one of them.
        """
        async with self.open_reader() as reader:
            return await reader.read_to_end()

    async def write(
        self, change: Change, seen: int, author: Author, now_ms: int
    ) -> ControlRecord | None:
        """Make a change, if nothing has changed since the generation that its author saw.

        Args:
            change: the change.
            seen: the generation that its author has seen.
            author: who makes it, and why.
            now_ms: epoch milliseconds.

        Returns:
            The record that was written; None if the change would change nothing.

        Raises:
            ChangeOvertaken: another change was made first.
            ChangeRefused: the change makes no sense.
            LogUnavailable: the outcome is unknown; the topic shows it.
        """
        change_id = secrets.token_hex(8)
        try:
            async with self._log.transactional_producer(
                self._transactional_id, self._transactional_id
            ) as producer:
                # Read after entering, never before: only then are all earlier changes there.
                current = await self._read_state()
                if current.state.generation != seen:
                    raise ChangeOvertaken(seen, current.records[-1] if current.records else None)
                record = make_record(
                    change,
                    current.state,
                    author,
                    change_id,
                    now_ms,
                    self._tuning.snapshot_every,
                )
                if record is not None:
                    written = NewRecord(None, encode_control(record))
                    await producer.commit_transaction({self._partition: [written]}, {})
                return record
        except (Fenced, LogUnavailable) as error:
            return await self._find_out(change_id, seen, error)

    async def _find_out(self, change_id: str, seen: int, error: Retriable) -> ControlRecord:
        """Return our record if it was committed after all.

        A writer that fenced us ended our transaction when it entered. We must not enter again to
        learn the outcome, because that would fence the winner.

        Raises:
            ChangeOvertaken: another writer took over.
            LogUnavailable: the record is not there (yet).
        """
        records: Sequence[ControlRecord] = ()
        for attempt in range(self._tuning.outcome_reads):
            records = await self.read()
            for record in records:
                if record.change_id == change_id:
                    return record
            if records and records[-1].generation > seen:
                break
            await asyncio.sleep(self._backoff.pause_s(attempt))
        last = records[-1] if records else None
        if isinstance(error, Fenced) or (last is not None and last.generation > seen):
            raise ChangeOvertaken(seen, last) from error
        raise LogUnavailable(
            f"control topic: the change may or may not have been made, since {error}; "
            "`headrace models history` shows it"
        ) from error

    async def _read_state(self) -> _Outcome:
        records = await self.read()
        return _Outcome(records, fold(records))
