"""The CUDA adapter on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headrace.device.cpu import view_block
from headrace.device.cuda import CudaDevice
from headrace.device.port import Block
from headrace.errors import ConfigurationError
from headrace.protocol.tensors import DATATYPES
from tests.support.widenings import CASES, expected, given

pytestmark = pytest.mark.gpu

SIZE_BYTES = 64 * 2**20
SPIN_CYCLES = 200_000_000
"""About a tenth of a second at the clock of a GPU, far longer than a copy of a few bytes."""
SPIN = """
extern "C" __global__ void spin(const long long cycles) {
    const long long began = clock64();
    while (clock64() - began < cycles) {}
}
"""


def fill(block: Block, value: int) -> None:
    """A host block with one value everywhere."""
    assert block.array is not None
    block.array[:] = value


def test_bytes_survive_device_copy(cuda: CudaDevice) -> None:
    """Copies in, across and out are each ordered after the previous one by an event."""
    host, back = (cuda.host_block(name, 1000) for name in ("host", "back"))
    first, second = (cuda.device_block(name, 1000) for name in ("first", "second"))
    streams = [cuda.stream(name) for name in ("in", "across", "out")]
    events = [cuda.event(name) for name in ("landed", "computed", "ready")]
    assert host.array is not None
    host.array[:] = np.arange(1000) % 251
    way = [host, first, second, back]
    for number, stream in enumerate(streams):
        if number:
            cuda.wait(stream, events[number - 1])
        cuda.copy(way[number], way[number + 1], 1000, stream)
        cuda.record(events[number], stream)
    cuda.synchronize(events[2])
    assert back.array is not None
    np.testing.assert_array_equal(back.array, host.array)


def test_cuda_stream_waits_for_event(cuda: CudaDevice) -> None:
    """A large copy is still under way when the one that depends on it is enqueued."""
    host, back = (cuda.host_block(name, SIZE_BYTES) for name in ("host", "back"))
    there = cuda.device_block("there", SIZE_BYTES)
    copy_in, copy_out = cuda.stream("in"), cuda.stream("out")
    landed, ready = cuda.event("landed"), cuda.event("ready")
    for value in (1, 2, 3):
        fill(host, value)
        cuda.copy(host, there, SIZE_BYTES, copy_in)
        cuda.record(landed, copy_in)
        cuda.wait(copy_out, landed)
        cuda.copy(there, back, SIZE_BYTES, copy_out)
        cuda.record(ready, copy_out)
        cuda.synchronize(ready)
        assert back.array is not None
        assert set(back.array[:: 2**12].tolist()) == {value}


@pytest.mark.parametrize(("waits", "seen"), [(False, 1), (True, 2)])
def test_copy_sees_work_of_other_stream_only_after_its_event(
    cuda: CudaDevice, waits: bool, seen: int
) -> None:
    """Nothing but the event orders two streams: without it, the bytes from before are copied."""
    cupy = pytest.importorskip("cupy")
    spin = cupy.RawKernel(SPIN, "spin")
    spin.compile()
    old, new, back = (cuda.host_block(name, 1000) for name in ("old", "new", "back"))
    there = cuda.device_block("there", 1000)
    slow, quick = cuda.stream("slow"), cuda.stream("quick")
    landed, ready = cuda.event("landed"), cuda.event("ready")
    fill(old, 1)
    fill(new, 2)
    cuda.copy(old, there, 1000, slow)
    cuda.record(landed, slow)
    cuda.synchronize(landed)

    cuda.launch(lambda: spin((1,), (1,), (np.int64(SPIN_CYCLES),)), slow, reads=(), writes=())
    cuda.copy(new, there, 1000, slow)
    cuda.record(landed, slow)
    if waits:
        cuda.wait(quick, landed)
    cuda.copy(there, back, 1000, quick)
    cuda.record(ready, quick)
    cuda.synchronize(ready)

    assert back.array is not None
    assert set(back.array.tolist()) == {seen}
    cuda.synchronize(landed)


def test_device_copies_do_not_block_thread(cuda: CudaDevice) -> None:
    """Enqueueing takes a small part of what the copy takes; the host block is pinned."""
    host = cuda.host_block("host", SIZE_BYTES)
    there = cuda.device_block("there", SIZE_BYTES)
    stream, done = cuda.stream("in"), cuda.event("done")
    cuda.copy(host, there, SIZE_BYTES, stream)
    cuda.record(done, stream)
    cuda.synchronize(done)
    began_s = time.perf_counter()
    cuda.copy(host, there, SIZE_BYTES, stream)
    cuda.record(done, stream)
    enqueued_s = time.perf_counter() - began_s
    cuda.synchronize(done)
    assert enqueued_s < (time.perf_counter() - began_s) / 2


@pytest.mark.parametrize("name", CASES)
def test_widening_kernel_gives_expected_bits(cuda: CudaDevice, name: str) -> None:
    """The same cases that NumPy's form is held to."""
    case = CASES[name]
    source = given(case)
    dtype = DATATYPES[case.widening.target].dtype
    size_bytes = int(np.prod(case.shape)) * dtype.itemsize
    host = cuda.host_block("host", source.nbytes)
    back = cuda.host_block("back", size_bytes)
    there = cuda.device_block("there", source.nbytes)
    wide = cuda.device_block("wide", size_bytes)
    assert host.array is not None
    host.array[:] = np.frombuffer(source.tobytes(), np.uint8)
    stream, done = cuda.stream("compute"), cuda.event("done")
    widen = cuda.widening(case.widening, case.shape[1:])

    cuda.copy(host, there, source.nbytes, stream)
    cuda.launch(lambda: widen(there, wide, case.shape[0]), stream, reads=(there,), writes=(wide,))
    cuda.copy(wide, back, size_bytes, stream)
    cuda.record(done, stream)
    cuda.synchronize(done)

    assert view_block(back, dtype, case.shape).tobytes() == expected(case, source).tobytes()


def test_cuda_device_reports_memory(cuda: CudaDevice) -> None:
    """Memory taken here is subtracted from what is free."""
    before = cuda.memory()
    block = cuda.device_block("large", SIZE_BYTES)
    after = cuda.memory()
    assert 0 < after.free_bytes <= before.free_bytes <= before.total_bytes
    assert after.used_bytes["cupy"] >= block.size_bytes


def test_missing_cuda_device_is_refused(cuda: CudaDevice) -> None:
    """The error says how many devices there are."""
    with pytest.raises(ConfigurationError, match="cuda:99: expected a GPU of this number, got"):
        CudaDevice(99)
