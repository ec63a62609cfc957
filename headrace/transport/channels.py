"""Streams of chunks between stages, and the queue from which executor instances pull batches.

A stage that shares its process with the one before it is called directly: its `SendStream` works
on a chunk in the sender's turn of the event loop, and makes the sender wait while it is behind.
Nothing is queued between the two; the byte budget of the source bounds the work in a process. A
`BatchQueue` is driven by its consumer: a free executor instance requests the next batch, so no
batch closes before an instance can run it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
K = TypeVar("K")

ModelKey: TypeAlias = tuple[str, str]
"""Key of a batch queue: a model's name and version."""


class ReceiveStream(Protocol[T_co]):
    """Stream from which a stage receives its chunks."""

    async def receive(self) -> T_co | None:
        """Return the next chunk; None at the end of the stream."""
        ...


class SendStream(Protocol[T_contra]):
    """Stream to which a stage sends its chunks."""

    def is_full(self) -> bool:
        """Return True while `send` would wait."""
        ...

    def send_nowait(self, chunk: T_contra) -> None:
        """Send a chunk without waiting; call it only while the stream is not full."""
        ...

    async def send(self, chunk: T_contra) -> None:
        """Send a chunk; wait while the receiver is behind."""
        ...

    def close(self) -> None:
        """Close this writer: it sends no more chunks."""
        ...


class Receiver(Protocol[T_contra]):
    """Stage that several writers send to."""

    def is_full(self) -> bool: ...
    def send_nowait(self, chunk: T_contra) -> None: ...
    async def send(self, chunk: T_contra) -> None: ...


class Writers(Generic[T]):
    """The writers that send to one stage. Its input ends when all of them are closed."""

    def __init__(self, receiver: Receiver[T]) -> None:
        self._receiver = receiver
        self._open = 0
        self._closed = asyncio.Event()

    def writer(self) -> Writer[T]:
        """Return a new writer."""
        self._open += 1
        return Writer(self._receiver, self._writer_closed)

    async def closed(self) -> None:
        """Wait until all writers are closed."""
        await self._closed.wait()

    def _writer_closed(self) -> None:
        self._open -= 1
        if not self._open:
            self._closed.set()


class Writer(Generic[T]):
    """One of the writers that send to a stage; see `SendStream`."""

    def __init__(self, receiver: Receiver[T], on_close: Callable[[], None]) -> None:
        self.is_full = receiver.is_full
        self.send_nowait = receiver.send_nowait
        self.send = receiver.send
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        """Close this writer; closing it again does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class Demand(NamedTuple):
    """State of a consumer when it requests a batch.

    Attributes:
        is_last: the consumer will not request again, so a batch may not be delayed to grow.
        close_at_us: the consumer is busy until this time (on the supplier's clock); until then a
            batch that can still grow is delayed. 0: the consumer is idle.
    """

    is_last: bool = False
    close_at_us: int = 0


IDLE = Demand()

Supply: TypeAlias = Callable[[K | None, Demand], T | None]


class BatchQueue(Generic[K, T]):
    """Hand out the batches of `supply`, one to each consumer, as soon as there is one.

    Args:
        supply: called synchronously; returns the next batch for a key (None: for any key), or
            None while there is none. The owner calls `notify` whenever that may have changed, and
            when the time `due_us` has come.
        waits: returns whether something waits in the supply for a key, due or not.
    """

    def __init__(self, supply: Supply[K, T], waits: Callable[[K], bool] = lambda _: False) -> None:
        self._supply = supply
        self._waits = waits
        self._first: dict[K, deque[T]] = {}
        self._waiting: deque[_WaitingConsumer[K, T]] = deque()
        self._closed = asyncio.Event()

    def consumer(self, key: K | None) -> BatchConsumer[K, T]:
        """Return a new consumer for this key; None: for any key."""
        return BatchConsumer(self, key)

    def pull_nowait(self, consumer: BatchConsumer[K, T]) -> T | None:
        """Return the next batch without waiting; None if there is none."""
        return self._next(consumer.key, consumer.demand)

    def put_first(self, key: K, batch: T) -> None:
        """Hand out a batch for this key ahead of everything in the supply."""
        self._first.setdefault(key, deque()).append(batch)
        self.notify()

    def take_first(self, key: K) -> list[T]:
        """Remove and return the batches of `put_first` for a key, which nothing will run."""
        return [*self._first.pop(key, ())]

    def has_waiting(self, key: K) -> bool:
        """Return whether anything waits for a key, whether a batch is due or not."""
        return key in self._first or self._waits(key)

    def _next(self, key: K | None, demand: Demand) -> T | None:
        if self._first and key is not None and (batches := self._first.get(key)):
            batch = batches.popleft()
            if not batches:
                del self._first[key]
            return batch
        return self._supply(key, demand)

    async def wait(
        self, consumer: BatchConsumer[K, T], run_now: Callable[[T], bool] | None = None
    ) -> T | None:
        """Wait for the next batch; called by consumers."""
        if self._closed.is_set():
            return None
        waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingConsumer(consumer, waiter, run_now))
        return await waiter

    def due_us(self, now_us: int) -> int | None:
        """Return the earliest `close_at_us` of a waiting consumer after `now_us`, or None."""
        moments = [
            consumer.demand.close_at_us
            for consumer, waiter, _ in self._waiting
            if consumer.demand.close_at_us > now_us and not waiter.done()
        ]
        return min(moments, default=None)

    def notify(self) -> None:
        """Serve the waiting consumers, longest waiting first, while the supply has batches."""
        left: deque[_WaitingConsumer[K, T]] = deque()
        empty: set[tuple[K | None, Demand]] = set()
        for waiting in self._waiting:
            consumer, waiter, run_now = waiting
            if waiter.done():  # its consumer was cancelled
                continue
            if consumer.is_stopped:
                waiter.set_result(None)
                continue
            requested = (consumer.key, consumer.demand)
            batch = None if requested in empty else self._next(*requested)
            # One batch at most is run in this turn, so that it does not become a long one.
            if batch is not None and run_now is not None and run_now(batch):
                batch = self._next(*requested)
            if batch is None:
                empty.add(requested)
            if batch is None and not self._closed.is_set() and not consumer.demand.is_last:
                left.append(waiting)
            else:
                waiter.set_result(batch)
        self._waiting = left

    def close(self) -> None:
        """Wake the waiting consumers; later pulls return what is left, then None."""
        self._closed.set()
        self.notify()

    async def ended(self) -> None:
        """Wait until the queue is closed."""
        await self._closed.wait()


class _WaitingConsumer(NamedTuple, Generic[K, T]):
    """A consumer that waits for a batch."""

    consumer: BatchConsumer[K, T]
    waiter: asyncio.Future[T | None]
    run_now: Callable[[T], bool] | None


class BatchConsumer(Generic[K, T]):
    """Consumer of the batches of one key, one at a time.

    Attributes:
        is_stopped: it takes nothing more; see `stop`.
    """

    def __init__(self, queue: BatchQueue[K, T], key: K | None) -> None:
        self._queue = queue
        self.key = key
        self.demand = IDLE
        self.is_stopped = False

    def pull_nowait(self) -> T | None:
        """Return the next batch without waiting; None if there is none."""
        if self.is_stopped:
            return None
        self.demand = Demand(self.demand.is_last)
        return self._queue.pull_nowait(self)

    async def pull(self, close_at_us: int = 0) -> T | None:
        """Return the next batch; None when the queue is closed and empty, or after `release`.

        Args:
            close_at_us: see `Demand`.
        """
        if self.is_stopped:
            return None
        self.demand = Demand(self.demand.is_last, close_at_us)
        batch = self._queue.pull_nowait(self)
        if batch is not None or self.demand.is_last:
            return batch
        return await self._queue.wait(self)

    async def wait(self, run_now: Callable[[T], bool] | None = None) -> T | None:
        """Wait for the next batch, directly after `pull_nowait` has found none; see `pull`.

        Args:
            run_now: called with a batch by the task that supplies it, while this waits. If it
                returns True, it has worked on the batch, and this goes on waiting; if False, the
                batch is returned here.
        """
        if self.demand.is_last or self.is_stopped:
            return None
        return await self._queue.wait(self, run_now)

    def now_idle(self) -> None:
        """Withdraw `close_at_us`: the consumer is idle now, so a pending `pull` returns at once if
        anything is queued.
        """
        if self.demand.close_at_us:
            self.demand = Demand(self.demand.is_last)
            self._queue.notify()

    def release(self) -> None:
        """Stop waiting: from now on return only what is already there."""
        self.demand = Demand(is_last=True)
        self._queue.notify()

    def stop(self) -> None:
        """Take nothing more, not even what is already there: it waits for another consumer."""
        self.is_stopped = True
        self._queue.notify()
