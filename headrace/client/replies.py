"""The answers to one client: they come on one partition, and are matched to those who wait.

The partition is shared by chance with other clients. An answer whose correlation id nobody waits
for is dropped and counted: `late` when it is ours (its caller gave up, or it is the second copy
that at-least-once delivery allows), `foreign` when it is another client's.
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
"""How long one poll waits; leaving takes at most this much longer than the last poll."""

POLL_MAX_RECORDS = 1000

CLOSE_TIMEOUT_S = 10.0
"""How long leaving waits for the poll under way; it ends by its own timeout before that."""


class ClientClosed(HeadraceError):
    """The client is closed, or can no longer read answers; what was asked may have been done."""


def last_header(headers: Sequence[tuple[str, bytes | None]], name: str) -> bytes | None:
    """The value that counts of a header: the last one."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


class Replies:
    """Reads one partition and hands each answer to the future that waits for it.

    Args:
        log: entered already; the reader is ours.
        partition: of the topic of answers.
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
        """Start reading; when this returns, no answer to a later request can be missed."""
        async with AsyncExitStack() as stack:
            consumer = await stack.enter_async_context(self._log.reader([self.partition]))
            ends = await consumer.end_offsets([self.partition])
            consumer.seek(self.partition, ends[self.partition])
            # The task's parent is this object, which ends it before it is left: a TaskGroup here
            # would wrap whatever the user's own block raises into an exception group.
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
        """A new correlation id and the future of its answer; `forget` it in the end.

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
        """Nobody waits for this answer any more."""
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
        """Retention overtook us, or the topic was made anew: go on with what is there."""
        offsets = await consumer.beginning_offsets([self.partition])
        if position >= offsets[self.partition]:
            offsets = await consumer.end_offsets([self.partition])
        consumer.seek(self.partition, offsets[self.partition])

    def _fail_waiting(self, error: ClientClosed) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClientClosed(str(error)))
                future.exception()  # its caller may have given up meanwhile

    async def _join(self, task: asyncio.Task[None]) -> None:
        self._stopping = True
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await task
