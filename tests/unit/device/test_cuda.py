"""The CUDA adapter's calls to CuPy, which stands in for itself here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.device.cuda import CudaDevice, make_kernel_source
from headrace.device.port import Memory
from headrace.device.widening import Widening
from headrace.errors import ConfigurationError, Fatal
from headrace.services.executor.device.ring import Ring, RingPlan, TensorPlan
from tests.support.fake_cupy import (
    CompileException,
    CUDARuntimeError,
    DeviceArray,
    FakeCupy,
    OutOfMemoryError,
)
from tests.support.host_kernel import HostKernel
from tests.support.widenings import CASES, expected, given

CASE = CASES["NHWC to NCHW by channel"]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCupy:
    """With a kernel that is compiled for the host."""
    kernel: list[HostKernel] = []

    def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        assert (len(grid), len(block)) == (1, 1)
        *arrays, count, channels, pixels, source_last, target_last, per_channel = arguments
        assert all(isinstance(each, DeviceArray) for each in arrays)
        assert {type(each) for each in (count, channels, pixels)} == {np.int64}
        assert {type(each) for each in (source_last, target_last, per_channel)} == {np.int32}
        if not kernel:
            code = make_kernel_source(CASE.widening)
            kernel.append(HostKernel(tmp_path, code, "unsigned char", "float"))
        kernel[0].launch(
            [each.hidden.ctypes.data for each in arrays],
            [int(each) for each in (count, channels, pixels)],
            [int(each) for each in (source_last, target_last, per_channel)],
        )

    return FakeCupy(monkeypatch, launch)


def test_rows_survive_ring_copy(cupy: FakeCupy) -> None:
    """In, widened, through a model that passes them on, and out."""
    source = given(CASE)
    wanted = expected(CASE, source)
    device = CudaDevice(0)
    row, model_row = (int(array[0].nbytes) for array in (source, wanted))
    widened = TensorPlan("x", row, model_row, CASE.widening, CASE.shape[1:])
    plan = RingPlan((widened,), (TensorPlan("y", model_row, model_row),), len(source))
    ring = Ring(device, plan)

    def enqueue() -> None:
        output, taken = ring.outputs["y"], ring.inputs["x"]
        output.memory.hidden[:] = taken.memory.hidden

    for _ in range(4):
        slot = ring.take()
        assert slot is not None
        host, answer = slot.host[0].array, slot.answers[0].array
        assert host is not None
        assert answer is not None
        host[:] = np.frombuffer(source.tobytes(), np.uint8)
        ring.submit(slot, len(source), enqueue)
        ring.collect(slot)
        assert slot.error is None
        assert answer.tobytes() == wanted.tobytes()
        ring.release(slot)


def test_device_becomes_current_in_thread(cupy: FakeCupy) -> None:
    """CUDA keeps it for each thread."""
    cupy.devices = 3
    assert CudaDevice(2).name == "cuda:2"
    assert cupy.used == [2]


@pytest.mark.parametrize("devices", [0, 1])
def test_missing_cuda_device_is_refused(cupy: FakeCupy, devices: int) -> None:
    """CuPy can be imported without one."""
    cupy.devices = devices
    with pytest.raises(
        ConfigurationError, match=f"cuda:1: expected a GPU of this number, got {devices}"
    ):
        CudaDevice(1)


def test_missing_cuda_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With where it comes from."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigurationError, match=r"expected CuPy, from the extra headrace\[gpu\]"):
        CudaDevice(0)


def test_device_memory_counts_device_and_pool(cupy: FakeCupy) -> None:
    """Bytes that CuPy's pool keeps are a part of the memory that is not free."""
    assert CudaDevice(0).memory() == Memory(3, 10, {"cupy": 7})


def test_cuda_error_is_fatal(cupy: FakeCupy) -> None:
    """It stays with the context."""
    device = CudaDevice(0)
    cupy.fault = CUDARuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(Fatal, match="cuda:0: cudaErrorIllegalAddress"):
        device.device_block("block", 10)


@pytest.mark.parametrize("fault", [OutOfMemoryError("no room"), CompileException("no such thing")])
def test_failed_device_setup_is_model_fault(cupy: FakeCupy, fault: Exception) -> None:
    """The context is none the worse for it."""
    device = CudaDevice(0)
    cupy.fault = fault
    with pytest.raises(ConfigurationError, match=f"cuda:0: {fault}"):
        device.widening(Widening("UINT8", "FP32"), (3,))
