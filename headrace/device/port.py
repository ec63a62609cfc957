"""The port between the ring and a device: memory, streams and events.

The words are CUDA's. Operations on one stream run in the order in which they were enqueued;
nothing orders operations on different streams but an event that one records and another waits
for. An operation is enqueued by a thread of the host and begins after everything that this thread
did before.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening


class Block:
    """Memory of a fixed size, on the host or on the device. It does not move.

    Attributes:
        name: for people.
        size_bytes: its size.
        address: of its first byte; a device's own where it is there.
        array: UINT8 [size_bytes] over a host block; None for memory that the host cannot see.
        memory: the library's object, which is kept alive by being here.
    """

    __slots__ = ("address", "array", "memory", "name", "size_bytes")

    def __init__(
        self, name: str, size_bytes: int, address: int, memory: Any, array: NDArray[np.uint8] | None
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.address = address
        self.memory = memory
        self.array = array

    def __repr__(self) -> str:
        return f"<Block {self.name}, {self.size_bytes} bytes>"


class Stream(NamedTuple):
    """A queue of operations; `handle` is the adapter's, `address` what a library is told."""

    name: str
    handle: Any = None
    address: int = 0


class Event(NamedTuple):
    """A mark in a stream, set by `record`; before the first one, waiting for it is no wait."""

    name: str
    handle: Any = None


class Memory(NamedTuple):
    """What a device's memory is at, in bytes; `used` is ours, by pool."""

    free_bytes: int
    total_bytes: int
    used_bytes: Mapping[str, int]


Widen: TypeAlias = Callable[[Block, Block, int], None]
"""Source, target and rows; see `Device.widening`."""


class Device(Protocol):
    """One device. Which threads may call it is for the adapter to say.

    Every method may raise `Fatal`: an error of a CUDA context stays with it.
    """

    @property
    def name(self) -> str:
        """Such as `cpu` or `cuda:0`."""
        ...

    @property
    def shares_memory(self) -> bool:
        """The host's memory is the device's."""
        ...

    def stream(self, name: str) -> Stream:
        """A new stream, which no other stream waits for."""
        ...

    def event(self, name: str) -> Event:
        """A new event."""
        ...

    def host_block(self, name: str, size_bytes: int) -> Block:
        """Memory of the host that the device can copy from and to by itself; zeros."""
        ...

    def device_block(self, name: str, size_bytes: int) -> Block:
        """Memory of the device; zeros."""
        ...

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy of the first bytes of a block."""
        ...

    def launch(
        self,
        work: Callable[[], None],
        stream: Stream,
        *,
        reads: Sequence[Block],
        writes: Sequence[Block],
    ) -> None:
        """Let `work` enqueue what it has to do on this stream, and on no other.

        Args:
            work: launches kernels or runs a model; what it raises is raised here.
            stream: on which.
            reads: all blocks that it reads.
            writes: all blocks that it writes.
        """
        ...

    def widening(self, widening: Widening, row_shape: tuple[int, ...], stream: Stream) -> Widen:
        """What widens so many rows of one block into another, enqueued on this stream.

        Args:
            widening: how.
            row_shape: of the model's input, the batch left out.
            stream: on which, from within `launch`.
        """
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event happens when all that was enqueued on the stream has."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on the stream from now on waits for the last record of the event."""
        ...

    def synchronize(self, event: Event) -> None:
        """Let the calling thread wait for the event, without holding the interpreter lock."""
        ...

    def memory(self) -> Memory:
        """How much of it is free and used."""
        ...
