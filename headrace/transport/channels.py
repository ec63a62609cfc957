"""Memory channels: how two stages of one process are joined.

A `Channel` passes chunks on and holds one, which may grow; what bounds the work in a process is
the byte budget at its source, not its channels. A `BatchQueue` turns the direction round: a free
executor asks for the next batch, so that no batch closes before somebody can run it.
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
    """Where a stage's chunks come from."""

    async def receive(self) -> T_co | None:
        """The next chunk; None when there will be no more."""
        ...


class Outlet(Protocol[T_contra]):
    """Where a stage's chunks go."""

    async def send(self, chunk: T_contra) -> None:
        """Hand a chunk on; waits while the receiver is behind."""
        ...

    def close(self) -> None:
        """Say that nothing more comes from this writer."""
        ...


MAX_JOINED = 512
JOIN_S = 0.002
"""A writer that never waits otherwise holds the event loop for so long at most."""


def join_lists(waiting: list[T], chunk: list[T]) -> bool:
    """Put a chunk behind the one that waits; False when that would become too long."""
    if len(waiting) + len(chunk) > MAX_JOINED:
        return False
    waiting += chunk
    return True


class Channel(Generic[T]):
    """Joins any number of writers to one reader, one chunk at a time.

    Args:
        join: puts a chunk into the one that waits, if it may grow so far: the reader has costs
            for each chunk, and a small model's batches are small. None: chunks stay apart.
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
        """A new writer. When all writers are closed, the reader comes to the end."""
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
    """How one who pulls asks.

    Attributes:
        at_once: it will not come again, so that nothing must be held back.
        close_at_us: it is busy, and can take nothing before this moment (on its
            supplier's clock); until then a piece that can still grow is held back. 0: it is idle.
    """

    at_once: bool = False
    close_at_us: int = 0


IDLE = Ask()

Supply: TypeAlias = Callable[[K | None, Ask], T | None]


class BatchQueue(Generic[K, T]):
    """Hands out what `supply` gives, one piece to each puller, as soon as there is one.

    Args:
        supply: asked, synchronously, for the next piece for a key, or for any key when it is
            None; answers None while there is none. The owner calls `kick` when that may have
            changed; a moment that was asked for, `due_us`, changes it as well.
    """

    def __init__(self, supply: Supply[K, T]) -> None:
        self._supply = supply
        self._first: dict[K, deque[T]] = {}
        self._waiting: deque[tuple[BatchConsumer[K, T], asyncio.Future[T | None]]] = deque()
        self._closed = asyncio.Event()

    def puller(self, key: K | None) -> BatchConsumer[K, T]:
        """A new puller for this key; None: for any."""
        return BatchConsumer(self, key)

    def take(self, puller: BatchConsumer[K, T]) -> T | None:
        """What there is now, without waiting."""
        return self._next(puller.key, puller.ask)

    def put_first(self, key: K, piece: T) -> None:
        """Hand out a piece for this key before anything that the supply gives."""
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
        """Called by pullers."""
        if self._closed.is_set():
            return None
        waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((puller, waiter))
        return await waiter

    def due_us(self, now_us: int) -> int | None:
        """The next moment at which one who waits, and is busy until then, wants its piece."""
        moments = [
            puller.ask.close_at_us
            for puller, waiter in self._waiting
            if puller.ask.close_at_us > now_us and not waiter.done()
        ]
        return min(moments, default=None)

    def kick(self) -> None:
        """Serve those who wait, the longest waiting first, as far as the supply reaches."""
        left: deque[tuple[BatchConsumer[K, T], asyncio.Future[T | None]]] = deque()
        empty: set[tuple[K | None, Ask]] = set()
        for puller, waiter in self._waiting:
            if waiter.done():  # its puller was cancelled
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
        """Let those who wait go; later pulls get what is left, then None."""
        self._closed.set()
        self.kick()

    async def ended(self) -> None:
        """Wait until the channel is closed."""
        await self._closed.wait()


class BatchConsumer(Generic[K, T]):
    """One who pulls pieces of one key, one at a time."""

    def __init__(self, channel: BatchQueue[K, T], key: K | None) -> None:
        self._channel = channel
        self.key = key
        self.ask = IDLE

    def take(self) -> T | None:
        """The next piece if there is one now."""
        self.ask = Ask(self.ask.at_once)
        return self._channel.take(self)

    async def pull(self, close_at_us: int = 0) -> T | None:
        """The next piece; None when there will be no more, or after `release`.

        Args:
            close_at_us: see `Ask`.
        """
        self.ask = Ask(self.ask.at_once, close_at_us)
        piece = self._channel.take(self)
        if piece is not None or self.ask.at_once:
            return piece
        return await self._channel.wait(self)

    def hurry(self) -> None:
        """It is idle earlier than it said: whoever waits in `pull` gets what there is."""
        if self.ask.close_at_us:
            self.ask = Ask(self.ask.at_once)
            self._channel.kick()

    def release(self) -> None:
        """Pull no more than what is there already."""
        self.ask = Ask(at_once=True)
        self._channel.kick()
