"""Memory channels between two stages of one process.

A `Channel` holds at most one chunk, which may grow; the byte budget of the source, not the
channels, bounds the work in a process. A `BatchQueue` is driven by its consumer: a free executor
instance requests the next batch, so no batch closes before an instance can run it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
K = TypeVar("K")


class Inlet(Protocol[T_co]):
    """Stream from which a stage receives its chunks."""

    async def receive(self) -> T_co | None:
        """Return the next chunk; None at the end of the stream."""
        ...


class Outlet(Protocol[T_contra]):
    """Stream to which a stage sends its chunks."""

    async def send(self, chunk: T_contra) -> None:
        """Send a chunk; wait while the receiver is behind."""
        ...

    def close(self) -> None:
        """Close this writer: it sends no more chunks."""
        ...


MAX_JOINED = 512
JOIN_S = 0.002
"""Longest time that a writer that never waits otherwise may hold the event loop."""


def join_lists(waiting: list[T], chunk: list[T]) -> bool:
    """Append a chunk to the waiting one; return False if the result would be too long."""
    if len(waiting) + len(chunk) > MAX_JOINED:
        return False
    waiting += chunk
    return True


class Channel(Generic[T]):
    """Connect any number of writers to one reader, one chunk at a time.

    Args:
        join: appends a chunk to the waiting one, and returns False if that would be too long. It
            saves the reader's cost per chunk, because small models have small batches. None:
            chunks are never joined.
    """

    def __init__(self, join: Callable[[T, T], bool] | None = None) -> None:
        self._join = join
        self._put_s = 0.0
        self._chunk: T | None = None
        self._writers = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def writer(self) -> ChannelWriter[T]:
        """Return a new writer. The stream ends when all writers are closed."""
        self._writers += 1
        return ChannelWriter(self)

    async def receive(self) -> T | None:
        """See `Inlet`."""
        while self._chunk is None:
            if not self._writers:
                return None
            self._filled.clear()
            await self._filled.wait()
        chunk, self._chunk = self._chunk, None
        self._emptied.set()
        return chunk

    async def put(self, chunk: T) -> None:
        """Called by writers."""
        while self._chunk is not None:
            if self._joined(self._chunk, chunk):
                return
            self._emptied.clear()
            await self._emptied.wait()
        self._chunk = chunk
        self._filled.set()
        if self._join is not None:
            self._put_s = time.perf_counter()

    def _joined(self, waiting: T, chunk: T) -> bool:
        return (
            self._join is not None
            and time.perf_counter() - self._put_s < JOIN_S
            and self._join(waiting, chunk)
        )

    def writer_closed(self) -> None:
        """Called by writers, once each."""
        self._writers -= 1
        self._filled.set()


class ChannelWriter(Generic[T]):
    """One writer's end of a `Channel`; see `Outlet`."""

    def __init__(self, channel: Channel[T]) -> None:
        self._channel: Channel[T] | None = channel

    async def send(self, chunk: T) -> None:
        assert self._channel is not None, "sent after close"
        await self._channel.put(chunk)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.writer_closed()


class Ask(NamedTuple):
    """State of a consumer when it requests a batch.

    Attributes:
        at_once: the consumer will not request again, so nothing may be held back.
        close_at_us: the consumer is busy until this time (on the supplier's clock); until then a
            batch that can still grow is held back. 0: the consumer is idle.
    """

    at_once: bool = False
    close_at_us: int = 0


IDLE = Ask()

Supply: TypeAlias = Callable[[K | None, Ask], T | None]


class BatchQueue(Generic[K, T]):
    """Hand out the pieces of `supply`, one to each consumer, as soon as there is one.

    Args:
        supply: called synchronously; returns the next piece for a key (None: for any key), or
            None while there is none. The owner calls `kick` whenever that may have changed, and
            when the time `due_us` has come.
    """

    def __init__(self, supply: Supply[K, T]) -> None:
        self._supply = supply
        self._first: dict[K, deque[T]] = {}
        self._waiting: deque[tuple[BatchConsumer[K, T], asyncio.Future[T | None]]] = deque()
        self._closed = asyncio.Event()

    def puller(self, key: K | None) -> BatchConsumer[K, T]:
        """Return a new consumer for this key; None: for any key."""
        return BatchConsumer(self, key)

    def take(self, puller: BatchConsumer[K, T]) -> T | None:
        """Return the next piece without waiting; None if there is none."""
        return self._next(puller.key, puller.ask)

    def put_first(self, key: K, piece: T) -> None:
        """Hand out a piece for this key ahead of everything in the supply."""
        self._first.setdefault(key, deque()).append(piece)
        self.kick()

    def _next(self, key: K | None, ask: Ask) -> T | None:
        if self._first and key is not None and (pieces := self._first.get(key)):
            piece = pieces.popleft()
            if not pieces:
                del self._first[key]
            return piece
        return self._supply(key, ask)

    async def wait(self, puller: BatchConsumer[K, T]) -> T | None:
        """Wait for the next piece; called by consumers."""
        if self._closed.is_set():
            return None
        waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((puller, waiter))
        return await waiter

    def due_us(self, now_us: int) -> int | None:
        """Return the earliest `close_at_us` of a waiting consumer after `now_us`, or None."""
        moments = [
            puller.ask.close_at_us
            for puller, waiter in self._waiting
            if puller.ask.close_at_us > now_us and not waiter.done()
        ]
        return min(moments, default=None)

    def kick(self) -> None:
        """Serve the waiting consumers, longest waiting first, while the supply has pieces."""
        left: deque[tuple[BatchConsumer[K, T], asyncio.Future[T | None]]] = deque()
        empty: set[tuple[K | None, Ask]] = set()
        for puller, waiter in self._waiting:
            if waiter.done():  # its consumer was cancelled
                continue
            asked = (puller.key, puller.ask)
            piece = None if asked in empty else self._next(*asked)
            if piece is None:
                empty.add(asked)
            if piece is None and not self._closed.is_set() and not puller.ask.at_once:
                left.append((puller, waiter))
            else:
                waiter.set_result(piece)
        self._waiting = left

    def close(self) -> None:
        """Wake the waiting consumers; later pulls return what is left, then None."""
        self._closed.set()
        self.kick()

    async def ended(self) -> None:
        """Wait until the queue is closed."""
        await self._closed.wait()


class BatchConsumer(Generic[K, T]):
    """Consumer of the pieces of one key, one at a time."""

    def __init__(self, channel: BatchQueue[K, T], key: K | None) -> None:
        self._channel = channel
        self.key = key
        self.ask = IDLE

    def take(self) -> T | None:
        """Return the next piece without waiting; None if there is none."""
        self.ask = Ask(self.ask.at_once)
        return self._channel.take(self)

    async def pull(self, close_at_us: int = 0) -> T | None:
        """Return the next piece; None when the queue is closed and empty, or after `release`.

        Args:
            close_at_us: see `Ask`.
        """
        self.ask = Ask(self.ask.at_once, close_at_us)
        piece = self._channel.take(self)
        if piece is not None or self.ask.at_once:
            return piece
        return await self._channel.wait(self)

    def hurry(self) -> None:
        """Withdraw `close_at_us`: the consumer is idle now, so a pending `pull` returns at once if
        anything is queued.
        """
        if self.ask.close_at_us:
            self.ask = Ask(self.ask.at_once)
            self._channel.kick()

    def release(self) -> None:
        """Stop waiting: from now on return only what is already there."""
        self.ask = Ask(at_once=True)
        self._channel.kick()
