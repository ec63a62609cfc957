"""Models on a GPU: the ring, graphs and the plain path give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.device.cuda import CudaDevice
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.backends.onnx_session import find_runtime
from headrace.models.config import make_model_config
from headrace.models.repository import FoundVersion, read_signature
from headrace.protocol.messages import Request
from headrace.services.executor.device.instance import DeviceInstance, DevicePlacement
from tests.support import models
from tests.support.work import make_request

pytestmark = pytest.mark.gpu

MAX_ROWS = 8
WAYS = {
    "plain": {"ring": False, "cuda_graphs": False},
    "ring": {"ring": True, "cuda_graphs": False},
    "graphs": {"ring": True, "cuda_graphs": True},
}


@pytest.fixture(params=WAYS)
def instance(request: pytest.FixtureRequest, tmp_path: Path, cuda: CudaDevice) -> DeviceInstance:
    """Digits on the GPU, in each of the ways, not yet entered."""
    if "CUDAExecutionProvider" not in find_runtime()[1]:
        pytest.skip("the installed onnxruntime has no CUDAExecutionProvider: headrace[gpu] has")
    way = WAYS[request.param]
    directory = models.add_version(tmp_path, "model", 1, models.digits())
    config: dict[str, Any] = {
        "device": cuda.name,
        "experimental_cuda": True,
        "max_batch_size": MAX_ROWS,
        "preprocess": {"pixels": {"datatype": "UINT8"}},
        **way,
    }
    made = make_model_config(config, models.settings_for(tmp_path))
    signature = read_signature(FoundVersion("1", directory, ""), made)
    where = DevicePlacement(lambda: CudaDevice(0), MAX_ROWS, way["ring"], way["cuda_graphs"], {})
    return DeviceInstance(
        OnnxBackend(directory, made, signature),
        "instance",
        where,
        max_execution_s=10,
        max_load_s=600,
    )


def photos(values: Sequence[int]) -> list[Request]:
    """Return one row for each value."""
    return [make_request(inputs={"pixels": np.full((1, 64), value, np.uint8)}) for value in values]


def scores(values: Sequence[int]) -> NDArray[Any]:
    """Return the model's outputs; small whole numbers, which every precision represents."""
    return np.outer(64 * np.array(values), np.arange(10)).astype(np.float32)


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
async def test_cuda_outputs_belong_to_their_rows(instance: DeviceInstance, rows: int) -> None:
    """Every number of rows, padded ones included, gives its own outputs, and again with other
    values.
    """
    async with instance:
        for first in (0, 10, 20):
            values = range(first, first + rows)
            outputs = await instance.run(instance.gather(photos(values)))
            np.testing.assert_array_equal(outputs["scores"], scores(values))


async def test_overlapping_cuda_batches_keep_their_outputs(instance: DeviceInstance) -> None:
    """Each starts behind the one that computes."""
    async with instance:
        ahead = instance.gather(photos([0, 1]))
        for value in range(1, 200):
            call = instance.submit(ahead)
            ahead = instance.gather(photos([value % 100, value % 50]))
            instance.submit_next(ahead, lambda: True)
            outputs = await instance.wait(call)
            before = value - 1
            wanted = [before % 100, before % 50] if before else [0, 1]
            np.testing.assert_array_equal(outputs["scores"], scores(wanted))
        await instance.run(ahead)


async def test_cuda_instance_reports_device_memory(instance: DeviceInstance) -> None:
    """The metrics get the memory of the device."""
    async with instance:
        assert instance.memory is not None
        assert 0 < instance.memory.free_bytes < instance.memory.total_bytes
