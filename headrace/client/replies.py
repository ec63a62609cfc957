"""Read the answers to one client from one partition and match them to the waiting calls.

Other clients may share the partition. An answer without a waiting call is dropped and counted:
`late` if it is this client's (its caller gave up, or it is the second copy that at-least-once
delivery allows), `foreign` if it is another client's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from headrace.errors import HeadraceError
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Log, Record, TopicPartition

CORRELATION_ID = "kafka_correlationId"

POLL_TIMEOUT_S = 0.2
"""Timeout of one poll; closing may wait this long for the last one."""

POLL_MAX_RECORDS = 1000

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for the current poll on closing; its own timeout normally ends it earlier."""


class ClientClosed(HeadraceError):
    """The client is closed or can no longer read answers; the request may have been served."""


def last_header(headers: Sequence[tuple[str, bytes | None]], name: str) -> bytes | None:
    """Return the last value of a header, which is the one that counts; None if absent."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


class Replies:
    """Read one partition and set each answer as the result of its waiting future.

    Args:
        log: an open log; this object opens its own reader.
        partition: partition of the responses topic.
    """

    def __init__(self, log: Log, partition: TopicPartition) -> None:
        self.partition = partition
        self.late = 0
        self.foreign = 0
        self._log = log
        self._prefix = secrets.token_hex(6).encode() + b"-"
        self._count = 0
        self._waiting: dict[bytes, asyncio.Future[Record]] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start reading; after this returns, no answer to a later request can be missed."""
        async with AsyncExitStack() as stack:
            consumer = await stack.enter_async_context(self._log.reader([self.partition]))
            ends = await consumer.end_offsets([self.partition])
            consumer.seek(self.partition, ends[self.partition])
            # This object owns the task and ends it on exit: a TaskGroup would wrap whatever the
            # user's own block raises into an exception group.
            task = asyncio.create_task(self._read(consumer), name=f"replies {self.partition}")
            stack.push_async_callback(self._join, task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._fail_waiting(ClientClosed("the client was closed before the answer came"))
        await self._stack.aclose()

    def expect(self) -> tuple[bytes, asyncio.Future[Record]]:
        """Return a new correlation id and the future of its answer; call `forget` afterwards.

        Raises:
            ClientClosed: reading has ended.
        """
        if self._stopping:
            raise ClientClosed("the client is closed")
        if self._failure is not None:
            raise ClientClosed(f"answers can no longer be read: {self._failure}") from self._failure
        self._count += 1
        correlation_id = b"%s%d" % (self._prefix, self._count)
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        return correlation_id, future

    def forget(self, correlation_id: bytes) -> None:
        """Stop waiting for this answer."""
        future = self._waiting.pop(correlation_id, None)
        if future is not None:
            future.cancel()

    async def _read(self, consumer: Consumer) -> None:
        try:
            while not self._stopping:
                try:
                    records = await consumer.poll(POLL_TIMEOUT_S, POLL_MAX_RECORDS)
                except OffsetOutOfRange as error:
                    await self._reposition(consumer, error.positions.get(self.partition, 0))
                else:
                    self._hand_out(records.get(self.partition, ()))
        except HeadraceError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._fail_waiting(ClientClosed(f"answers can no longer be read: {error}"))

    def _hand_out(self, records: Iterable[Record]) -> None:
        for record in records:
            correlation_id = last_header(record.headers, CORRELATION_ID)
            future = self._waiting.get(correlation_id) if correlation_id is not None else None
            if future is not None and not future.done():
                future.set_result(record)
            elif correlation_id is not None and correlation_id.startswith(self._prefix):
                self.late += 1
            else:
                self.foreign += 1

    async def _reposition(self, consumer: Consumer, position: int) -> None:
        """Seek to existing records after retention deleted ours or the topic was recreated."""
        offsets = await consumer.beginning_offsets([self.partition])
        if position >= offsets[self.partition]:
            offsets = await consumer.end_offsets([self.partition])
        consumer.seek(self.partition, offsets[self.partition])

    def _fail_waiting(self, error: ClientClosed) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClientClosed(str(error)))
                future.exception()  # marks it retrieved: its caller may have gone

    async def _join(self, task: asyncio.Task[None]) -> None:
        self._stopping = True
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await task
