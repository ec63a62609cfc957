"""The port between the ring and a device: memory, streams and events.

The terms are CUDA's. Operations on one stream run in the order in which they were enqueued;
operations on different streams are ordered only by an event that one records and another waits for.
An operation is enqueued by a thread of the host and begins after everything that this thread did
before.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening
from headrace.errors import NotLoadableHere
from headrace.tuning import TUNING


class Block:
    """Memory of a fixed size, on the host or on the device. It does not move.

    Attributes:
        name: for display.
        size_bytes: its size.
        address: the address of its first byte; a device address if the block is on a device.
        array: UINT8 [size_bytes] over a host block; None for memory that the host cannot access.
        memory: the library's object, which this reference keeps alive.
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
    """A queue of operations; `handle` is the adapter's object, `address` is passed to libraries."""

    name: str
    handle: Any = None
    address: int = 0


class StreamEvent(NamedTuple):
    """A mark in a stream, set by `record`; waiting for it before that returns at once."""

    name: str
    handle: Any = None


class Memory(NamedTuple):
    """State of a device's memory, in bytes; `used_bytes` is what this process uses, by pool."""

    free_bytes: int
    total_bytes: int
    used_bytes: Mapping[str, int]


Widen: TypeAlias = Callable[[Block, Block, int], None]
"""Source, target and rows; see `Device.widening`."""


class Device(Protocol):
    """One device. The adapter defines which threads may call it.

    Every method may raise `Fatal`: an error of a CUDA context stays with it.
    """

    @property
    def name(self) -> str:
        """The name, such as `cpu` or `cuda:0`."""
        ...

    @property
    def shares_memory(self) -> bool:
        """True if the host's memory is the device's."""
        ...

    def stream(self, name: str) -> Stream:
        """Return a new stream, which no other stream waits for."""
        ...

    def event(self, name: str) -> StreamEvent:
        """Return a new event."""
        ...

    def host_block(self, name: str, size_bytes: int) -> Block:
        """Allocate host memory that the device can copy from and to by itself; zeros."""
        ...

    def device_block(self, name: str, size_bytes: int) -> Block:
        """Allocate device memory; zeros."""
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
        """Let `work` enqueue its operations on this stream, and on no other.

        Args:
            work: launches kernels or runs a model; its errors are raised here.
            stream: the stream.
            reads: all blocks that it reads.
            writes: all blocks that it writes.
        """
        ...

    def widening(self, widening: Widening, row_shape: tuple[int, ...]) -> Widen:
        """Return a function that widens rows of one block into another, if called within `launch`.

        Args:
            widening: the conversion.
            row_shape: the shape of the model's input, without the batch axis.
        """
        ...

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Make the event occur when all operations enqueued on the stream so far have finished."""
        ...

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Make later operations on the stream wait for the last record of the event."""
        ...

    def synchronize(self, event: StreamEvent) -> None:
        """Block the calling thread until the event, without holding the interpreter lock."""
        ...

    def memory(self) -> Memory:
        """Return the free and used memory."""
        ...


_MIB = 1024 * 1024


def require_memory(device: str, memory: Memory, needs: Mapping[str, int]) -> None:
    """Raise if a model does not fit, before it is loaded: running out would end other models too.

    Some memory is left over for what is not requested explicitly.

    Args:
        device: its name.
        memory: its memory.
        needs: bytes, by purpose.

    Raises:
        NotLoadableHere: with all figures.
    """
    needed = {**needs, "reserve": TUNING.models.device_reserve_bytes}
    total = sum(needed.values())
    if total <= memory.free_bytes:
        return
    parts = ", ".join(f"{name} {_format_mib(size)}" for name, size in needed.items())
    used = ", ".join(f"{name} {_format_mib(size)}" for name, size in memory.used_bytes.items())
    raise NotLoadableHere(
        f"memory of {device}: expected {_format_mib(total)} free ({parts}), got "
        f"{_format_mib(memory.free_bytes)} of {_format_mib(memory.total_bytes)}"
        + (f", of which this process uses: {used}" if used else "")
    )


def _format_mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // _MIB)} MiB"
