"""A batch of records for one partition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from headrace.errors import HeadraceError
from headrace.log.errors import RecordRefused, RecordTooLarge
from headrace.log.kafka.admin import Rules
from headrace.log.port import Headers, NewRecord, TopicPartition

MAX_BATCH_BYTES: Final = 256 * 1024
"""One batch is in flight per partition, so a partition's throughput is this size per round trip."""


class Acknowledgement:
    """One caller's view of the end of a batch: cancelling it does not affect the other callers."""

    __slots__ = ("_ended",)

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended

    def __await__(self) -> Generator[Any, None, None]:
        if not self._ended.done():
            yield from asyncio.shield(self._ended)
        self._ended.result()


class Packed:
    """Records for one produce request to a partition, as many as its topic accepts.

    Args:
        partition: the target.
        rules: the topic's limits.
        codec: aiokafka's number of the compression.
        is_transactional: whether the records belong to a transaction; the batch's header says so.
    """

    __slots__ = ("_codec", "_is_transactional", "_rules", "builder", "full", "partition")

    def __init__(
        self,
        partition: TopicPartition,
        rules: Rules,
        codec: int,
        *,
        is_transactional: bool = False,
    ) -> None:
        self.partition = partition
        self.full = False
        self._rules = rules
        self._codec = codec
        self._is_transactional = is_transactional
        self.builder = self._new_builder()

    def take(
        self, records: Sequence[NewRecord], start: int
    ) -> tuple[int, RecordTooLarge | RecordRefused | None]:
        """Add records from `start` on.

        Returns:
            The index of the first record not added, and the error if the topic will never accept
            it; None if it belongs in the next batch, because this one is full, or if all were
            added.
        """
        builder, needs_key = self.builder, self._rules.needs_key
        # aiokafka's own `append` serializes keys and values first; these are bytes already.
        append, offset = builder._builder.append, builder._relative_offset
        now_ms = time.time_ns() // 1_000_000
        left = records[start:] if start else records
        index = start
        try:
            for index, (key, value, headers, timestamp_ms) in enumerate(left, start):
                if key is None and needs_key:
                    return index, self._needs_key()
                added = append(
                    offset,
                    now_ms if timestamp_ms is None else timestamp_ms,
                    key,
                    value,
                    headers if type(headers) is list else list(headers),
                )
                if added is None:
                    self.full = True
                    return index, None
                # The builder accepts the first record of a batch regardless of its size.
                if offset == 0 and (size := builder.size()) > self._rules.limit_bytes:
                    builder = self.builder = self._new_builder()
                    return index, self._too_large(size)
                offset += 1
        except UnicodeEncodeError:
            if not offset:
                self.builder = self._new_builder(takes_any_name=True)
                return self.take(records, index)
            # Leave this record to the next batch, whose builder accepts such names.
            self.full = True
            return index, None
        finally:
            builder._relative_offset = offset
        return len(records), None

    def _needs_key(self) -> RecordRefused:
        return RecordRefused(
            f"send to {self.partition}: expected a record with a key, since the topic is "
            "compacted, got one without"
        )

    def _too_large(self, size: int) -> RecordTooLarge:
        return RecordTooLarge(
            f"send to {self.partition}: expected at most {self._rules.limit_bytes} bytes "
            f"in a batch (max.message.bytes), got a record that makes {size}"
        )

    def _new_builder(self, *, takes_any_name: bool = False) -> BatchBuilder:
        builder_class = AnyNameBuilder if takes_any_name else BatchBuilder
        return builder_class(
            min(MAX_BATCH_BYTES, self._rules.limit_bytes),
            self._codec,
            is_transactional=self._is_transactional,
        )


class AnyNameBuilder(BatchBuilder):  # type: ignore[misc]  # aiokafka publishes no types
    """Builds a batch whose headers may have names that are not UTF-8, as dead letters may.

    aiokafka's builder in C encodes names itself, strictly. Its slower builder in Python calls the
    `encode` method of each name, and so accepts names that bring their own.
    """

    def __init__(self, batch_bytes: int, codec: int, *, is_transactional: bool) -> None:
        super().__init__(batch_bytes, codec, is_transactional=is_transactional)
        self._builder = _AnyNameRecords(
            2,
            codec,
            is_transactional=is_transactional,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=0,
            batch_size=batch_bytes,
        )

    def _set_producer_state(self, producer_id: int, producer_epoch: int, sequence: int) -> None:
        """Set the producer id, epoch and sequence, without the base class's check of the builder's
        type.
        """
        self._builder.set_producer_state(producer_id, producer_epoch, sequence)


class _AnyNameRecords:
    """The part of aiokafka's builder in Python that `Packed` and `BatchBuilder` use."""

    def __init__(self, *args: int, **options: int) -> None:
        self._records = _DefaultRecordBatchBuilderPy(*args, **options)
        self.size = self._records.size
        self.build = self._records.build
        self.set_producer_state = self._records.set_producer_state

    def append(
        self,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
    ) -> Any:
        """Append a record; return None if the batch is full."""
        raw = [(_RawName(name), content) for name, content in headers]
        return self._records.append(offset, timestamp_ms, key, value, raw)


class _RawName:
    """A header name that encodes to the bytes from which it was decoded."""

    __slots__ = ("_raw",)

    def __init__(self, name: str) -> None:
        self._raw = name.encode("utf-8", "surrogateescape")

    def encode(self, _encoding: str) -> bytes:
        """Return the original bytes; replaces `str.encode`."""
        return self._raw


class Batch(Packed):
    """Packed records, and the acknowledgement that they share.

    Args:
        partition: the target.
        rules: the topic's limits.
        codec: aiokafka's number of the compression.
        deadline_s: the acknowledgement fails after this, whatever has become of the records.
        overdue: called at the deadline; returns the error.
    """

    __slots__ = ("_timer", "ended")

    def __init__(
        self,
        partition: TopicPartition,
        rules: Rules,
        codec: int,
        deadline_s: float,
        overdue: Callable[[Batch], HeadraceError],
    ) -> None:
        super().__init__(partition, rules, codec)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(deadline_s, lambda: self.fail(overdue(self)))

    @property
    def acknowledged(self) -> Acknowledgement:
        """Return an acknowledgement for one run of the batch."""
        return Acknowledgement(self.ended)

    def succeed(self) -> None:
        """Mark the batch as acknowledged by the broker."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: HeadraceError) -> None:
        """Fail the acknowledgement: the batch was refused, or its outcome is unknown."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_exception(error)
            # Mark the error as retrieved: a caller may choose not to await it.
            self.ended.exception()
