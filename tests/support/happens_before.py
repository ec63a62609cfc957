"""A device that checks happens-before, and runs what is enqueued as late or as early as it can.

Every operation reads and writes blocks, and has a place in time: a vector clock with one part for
each stream and each thread of the host (Fidge 1988, Mattern 1989). An operation comes after
another only where the order of a stream, an event or a hand-over between threads says so. Reading
a block that is not ordered after its last writer, and writing one that is not ordered after its
last writer and all readers since, is a race, whether or not it did harm this time.

What is enqueued is done later, a stream picked by chance at a time, so that a missing order shows
in the bytes as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from headrace.device.cpu import CpuDevice
from headrace.device.port import Block, Memory, Stream, StreamEvent, Widen
from headrace.device.widening import Widening
from headrace.errors import Fatal

Clock = dict[str, int]


class RaceError(Fatal):
    """Two operations on a block that nothing orders, one of them a write."""


class Operation(NamedTuple):
    """A call to the device; `kind` is `copy`, `launch`, `record`, `wait` or `synchronize`.

    Attributes:
        stream: on which; empty for `synchronize`.
        event: of the last three kinds; the name of the written block for the others.
    """

    kind: str
    stream: str
    event: str


class _Access(NamedTuple):
    what: str
    agent: str
    tick: int


class _Pending(NamedTuple):
    """Something a stream has to do: an effect, or to wait until an event was recorded so often."""

    effect: Callable[[], object]
    event: str = ""
    version: int = 0


class CheckedDevice:
    """See `headrace.device.port.Device`.

    Args:
        random: picks what happens first, where nothing says so.
        edit: changes each operation before it is enqueued, or drops it by returning None; that
            is how bugs are planted.

    Attributes:
        thread: the name of the host's thread that acts now.
        operations: everything that was asked for, in order.
    """

    name = "checked"
    shares_memory = False

    def __init__(
        self,
        random: Random,
        edit: Callable[[Operation], Operation | None] = lambda operation: operation,
    ) -> None:
        self._random = random
        self._edit = edit
        self._clocks: dict[str, Clock] = {}
        self._events: dict[str, Clock] = {}
        self._asked: dict[str, int] = {}
        self._happened: dict[str, int] = {}
        self._writers: dict[str, _Access] = {}
        self._readers: dict[str, list[_Access]] = {}
        self._queues: dict[str, deque[_Pending]] = {}
        self._effects: list[Callable[[], object]] = []
        self.thread = "loop"
        self.operations: list[Operation] = []

    # --- the port -----------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        self._queues[name] = deque()
        return Stream(name)

    def event(self, name: str) -> StreamEvent:
        return StreamEvent(name)

    def host_block(self, name: str, size_bytes: int) -> Block:
        array = np.zeros(size_bytes, np.uint8)
        return Block(name, size_bytes, array.ctypes.data, array, array)

    device_block = host_block

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        def effect() -> None:
            assert source.array is not None
            assert target.array is not None
            target.array[:size_bytes] = source.array[:size_bytes]

        operation = Operation("copy", stream.name, target.name)
        self._enqueue(operation, (source,), (target,), effect)

    def launch(
        self,
        work: Callable[[], None],
        stream: Stream,
        *,
        reads: Sequence[Block],
        writes: Sequence[Block],
    ) -> None:
        """`work` is called now, and may raise; what it hands to `later` is done by the stream."""
        self._effects.clear()
        work()
        effects = tuple(self._effects)
        operation = Operation("launch", stream.name, writes[0].name)
        self._enqueue(operation, reads, writes, lambda: [effect() for effect in effects])

    def widening(self, widening: Widening, row_shape: tuple[int, ...]) -> Widen:
        """Widen as on the CPU, but later."""
        widen = CpuDevice().widening(widening, row_shape)
        return lambda source, target, rows: self.later(lambda: widen(source, target, rows))

    def record(self, event: StreamEvent, stream: Stream) -> None:
        operation = self._asked_for(Operation("record", stream.name, event.name))
        if operation is None:
            return
        version = self._asked[operation.event] = self._asked.get(operation.event, 0) + 1
        self._events[operation.event] = self._enqueued(operation.stream)

        def effect() -> None:
            self._happened[operation.event] = version

        self._queues[operation.stream].append(_Pending(effect))

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        operation = self._asked_for(Operation("wait", stream.name, event.name))
        if operation is None:
            return
        self._enqueued(operation.stream)
        _join(self._clocks[operation.stream], self._events.get(operation.event, {}))
        version = self._asked.get(operation.event, 0)
        pending = _Pending(lambda: None, operation.event, version)
        self._queues[operation.stream].append(pending)

    def synchronize(self, event: StreamEvent) -> None:
        operation = self._asked_for(Operation("synchronize", "", event.name))
        if operation is None:
            return
        version = self._asked.get(operation.event, 0)
        while self._happened.get(operation.event, 0) < version:
            self.step()
        _join(self._clock(self.thread), self._events.get(operation.event, {}))

    def memory(self) -> Memory:
        """Return memory without a limit."""
        return Memory(2**40, 2**40, {})

    # --- what the test says of the host ---------------------------------------------------------

    def later(self, effect: Callable[[], object]) -> None:
        """Enqueue the work of a `launch` on its stream."""
        self._effects.append(effect)

    def sent(self) -> Clock:
        """Note what the thread knows as it puts something into a queue."""
        return dict(self._clock(self.thread))

    def received(self, thread: str, sent: Clock) -> None:
        """A thread has taken something out of a queue, and acts from now on."""
        _join(self._clock(thread), sent)
        self.thread = thread

    def touch(self, block: Block, *, write: bool) -> None:
        """The host itself reads or writes a block now."""
        clock = self._clock(self.thread)
        clock[self.thread] = clock.get(self.thread, 0) + 1
        what = f"{'write' if write else 'read'} by the {self.thread}"
        self._check(_Access(what, self.thread, clock[self.thread]), clock, block, write=write)

    def step(self) -> bool:
        """Let one stream, picked by chance, do one thing; False when there is nothing to do."""
        able = [queue for queue in self._queues.values() if queue and self._is_due(queue[0])]
        if not able:
            return False
        self._random.choice(able).popleft().effect()
        return True

    # --- the clocks -----------------------------------------------------------------------------

    def _is_due(self, pending: _Pending) -> bool:
        return self._happened.get(pending.event, 0) >= pending.version

    def _asked_for(self, operation: Operation) -> Operation | None:
        self.operations.append(operation)
        return self._edit(operation)

    def _clock(self, agent: str) -> Clock:
        return self._clocks.setdefault(agent, {})

    def _enqueued(self, stream: str) -> Clock:
        """The stream's clock after one operation more, which the thread has enqueued now."""
        thread = self._clock(self.thread)
        thread[self.thread] = thread.get(self.thread, 0) + 1
        clock = self._clock(stream)
        _join(clock, thread)
        clock[stream] = clock.get(stream, 0) + 1
        return dict(clock)

    def _enqueue(
        self,
        operation: Operation,
        reads: Sequence[Block],
        writes: Sequence[Block],
        effect: Callable[[], object],
    ) -> None:
        edited = self._asked_for(operation)
        if edited is None:
            return
        clock = self._enqueued(edited.stream)
        access = _Access(f"{edited.kind} on {edited.stream}", edited.stream, clock[edited.stream])
        for block in reads:
            self._check(access, clock, block, write=False)
        for block in writes:
            self._check(access, clock, block, write=True)
        self._queues[edited.stream].append(_Pending(effect))

    def _check(self, access: _Access, clock: Clock, block: Block, *, write: bool) -> None:
        last = self._writers.get(block.name)
        readers = self._readers.setdefault(block.name, [])
        for earlier in [*([last] if last else []), *(readers if write else [])]:
            if clock.get(earlier.agent, 0) < earlier.tick:
                raise RaceError(f"{block.name}: {access.what} is not ordered after {earlier.what}")
        if write:
            self._writers[block.name] = access
            readers.clear()
        else:
            readers.append(access)


def _join(clock: Clock, other: Clock) -> None:
    for agent, tick in other.items():
        if clock.get(agent, 0) < tick:
            clock[agent] = tick
