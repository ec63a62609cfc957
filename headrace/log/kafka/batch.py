"""One batch of records on its way to one partition."""

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
"""One batch is under way per partition, so this over the round trip is a partition's throughput."""


class Acknowledgement:
    """A batch's end as one caller awaits it: cancelling that leaves the others who share it."""

    __slots__ = ("_ended",)

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended

    def __await__(self) -> Generator[Any, None, None]:
        if not self._ended.done():
            yield from asyncio.shield(self._ended)
        self._ended.result()


class Packed:
    """Records that one produce request carries to a partition, as many as its topic takes.

    Args:
        partition: where they go.
        rules: what the topic takes.
        codec: aiokafka's number of the compression.
        is_transactional: whether they belong to a transaction, which the batch itself says.
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
        """Take records from `start` on.

        Returns:
            the first that was not taken, and why the topic will never take it; None where it
            is the next batch's, since this one is full, or where all were taken.
        """
        builder, needs_key = self.builder, self._rules.needs_key
        # aiokafka's own `append` serializes keys and values first, and these are bytes.
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
                # The builder takes the first record of a batch however large it is.
                if offset == 0 and (size := builder.size()) > self._rules.limit_bytes:
                    builder = self.builder = self._new_builder()
                    return index, self._too_large(size)
                offset += 1
        except UnicodeEncodeError:
            if not offset:
                self.builder = self._new_builder(takes_any_name=True)
                return self.take(records, index)
            # It begins the next batch, which takes such names.
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

    aiokafka's builder in C encodes names itself, strictly. Its builder in Python, which is slower,
    calls their `encode`, and so takes names that have one of their own.
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
        """Without the check of the builder's class."""
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
        """None where the batch is full."""
        raw = [(_RawName(name), content) for name, content in headers]
        return self._records.append(offset, timestamp_ms, key, value, raw)


class _RawName:
    """A header's name that encodes to the bytes as which it was read."""

    __slots__ = ("_raw",)

    def __init__(self, name: str) -> None:
        self._raw = name.encode("utf-8", "surrogateescape")

    def encode(self, _encoding: str) -> bytes:
        """As `str.encode` is called."""
        return self._raw


class Batch(Packed):
    """Packed records, and the acknowledgement that they share.

    Args:
        partition: where they go.
        rules: what the topic takes.
        codec: aiokafka's number of the compression.
        deadline_s: after this the acknowledgement fails, whatever has become of the records.
        overdue: makes the error for that, and is told of it.
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
        """For one run of the batch."""
        return Acknowledgement(self.ended)

    def succeed(self) -> None:
        """The broker has it."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: HeadraceError) -> None:
        """It is refused, or nobody knows."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_exception(error)
            # Whoever does not await it has chosen not to know.
            self.ended.exception()
