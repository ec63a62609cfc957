"""A stand-in for the part of CuPy 14 that `headrace.device.cuda` uses: on the host, synchronous.

It shows that the adapter calls what is there with arguments that it takes; not what a GPU does.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

Kernel = Callable[..., None]


class CUDARuntimeError(RuntimeError):
    """CuPy's error of that name, which has a status as well."""


class CUDADriverError(RuntimeError):
    """CuPy's error of that name, from the driver's API."""


class OutOfMemoryError(MemoryError):
    """The error of CuPy's memory pool."""


class CompileException(Exception):
    """The error of compiling a kernel."""


class MemoryPointer:
    """`cupy.cuda.MemoryPointer` of an array of the host's."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.ptr = array.ctypes.data

    def copy_from_host_async(self, mem: int, size: int, stream: Stream) -> None:
        _move(self.ptr, mem, size, stream)

    def copy_to_host_async(self, mem: int, size: int, stream: Stream) -> None:
        _move(mem, self.ptr, size, stream)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream) -> None:
        _move(self.ptr, src.ptr, size, stream)


class DeviceArray:
    """`cupy.ndarray`: it has memory, and nothing that can be read here by accident."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.hidden = array
        self.data = MemoryPointer(array)


class Event:
    """`cupy.cuda.Event`; `recorded` is the stream that has recorded it last."""

    def __init__(self, *, block: bool, disable_timing: bool) -> None:
        self.recorded: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream

    def synchronize(self) -> None:
        assert self.recorded is not None


class Stream:
    """`cupy.cuda.Stream`; `waited` are the events that it waits for."""

    current: list[Stream] = []  # noqa: RUF012 - the stack of one thread, as CuPy's

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking, "a stream of the other kind waits for the default stream"
        self.ptr = id(self)
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def __enter__(self) -> Self:
        Stream.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current.pop()


class FakeCupy:
    """The modules `cupy` and `cupyx`, in place of the real ones until the test ends.

    Args:
        monkeypatch: puts them there.
        kernel: what a compiled kernel does with its arguments.

    Attributes:
        devices: how many GPUs there are.
        fault: raised by the next call that can fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
        self.devices = 1
        self.used: list[int] = []
        self.fault: Exception | None = None
        self._kernel = kernel
        cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
        for name, value in {
            "cuda": self._cuda(),
            "zeros": self._zeros,
            "asarray": lambda array: DeviceArray(np.array(array)),
            "RawKernel": self._raw_kernel,
            "get_default_memory_pool": lambda: SimpleNamespace(total_bytes=lambda: 7),
        }.items():
            setattr(cupy, name, value)
        setattr(cupyx, "zeros_pinned", np.zeros)  # noqa: B010 - mypy knows no such attribute
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupyx", cupyx)

    def _cuda(self) -> SimpleNamespace:
        return SimpleNamespace(
            is_available=lambda: self.devices > 0,
            runtime=SimpleNamespace(
                getDeviceCount=lambda: self.devices,
                memGetInfo=lambda: (3, 10),
                CUDARuntimeError=CUDARuntimeError,
            ),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=SimpleNamespace(CompileException=CompileException),
            Device=lambda number: SimpleNamespace(use=lambda: self.used.append(number)),
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda: SimpleNamespace(synchronize=self._fail),
        )

    def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def _zeros(self, size: int, dtype: Any) -> DeviceArray:
        self._fail()
        return DeviceArray(np.zeros(size, dtype))

    def _raw_kernel(self, code: str, name: str) -> Any:
        assert name in code

        def launch(
            grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]
        ) -> None:
            assert Stream.current, "a kernel that is launched on the default stream"
            self._kernel(grid, block, arguments)

        launch.compile = self._fail  # type: ignore[attr-defined]  # a function has what it is given
        return launch


def _move(target: int, source: int, size: int, stream: Stream) -> None:
    assert isinstance(stream, Stream)
    ctypes.memmove(target, source, size)
