"""An instance with a ring, on the CPU: what a GPU would do, without its speed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from headrace.device.cpu import CpuDevice
from headrace.device.port import Block, Device, Memory, Stream
from headrace.errors import ConfigurationError, Fatal
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.config import make_model_config
from headrace.models.repository import FoundVersion, read_signature
from headrace.protocol.messages import Request
from headrace.services.executor.device.instance import DeviceInstance, DevicePlacement, RingBatch
from headrace.telemetry.snapshots import DeviceSnapshot
from tests.support import models
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.work import make_request

MAX_ROWS = 6


class Gpu(CpuDevice):
    """A device of its own, with little memory, that fails when the test says so."""

    name = "cuda:0"
    shares_memory = False

    def __init__(self, free_bytes: int = 2**40) -> None:
        self.free_bytes = free_bytes
        self.copies = 0
        self.fails_at = 0
        self.fault: Exception = Fatal("cuda:0: an illegal memory access was encountered")

    def memory(self) -> Memory:
        return Memory(self.free_bytes, 2**34, {"cupy": 2**20})

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        self.copies += 1
        if self.copies == self.fails_at:
            raise self.fault
        super().copy(source, target, size_bytes, stream)


class Watched(CpuDevice):
    """Its blocks can be looked at, by name."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}

    def device_block(self, name: str, size_bytes: int) -> Block:
        block = self.blocks[name] = super().device_block(name, size_bytes)
        return block


def make(
    tmp_path: Path,
    model: onnx.ModelProto,
    *,
    device: Device | None = None,
    open_device: Callable[[], Device] | None = None,
    backend_type: type[OnnxBackend] = OnnxBackend,
    needs: Mapping[str, int] | None = None,
    **config: Any,
) -> DeviceInstance:
    """An instance with a ring; keywords are lines of `model.toml`."""
    directory = models.add_version(tmp_path, "model", 1, model)
    made = make_model_config({"max_batch_size": MAX_ROWS, **config}, models.settings_for(tmp_path))
    signature = read_signature(FoundVersion("1", directory, ""), made)
    backend = backend_type(directory, made, signature)
    where = DevicePlacement(
        open_device=open_device or (lambda: device or CpuDevice()),
        max_rows=MAX_ROWS,
        ring=True,
        graphs=False,
        needs=dict(needs or {}),
    )
    return DeviceInstance(backend, "instance", where, max_execution_s=10, max_load_s=60)


def thread_names() -> list[str]:
    return [each.name for each in threading.enumerate()]


def asking(*rows: NDArray[Any], name: str = "pixels") -> list[Request]:
    """A request for each array, which may have several rows."""
    return [make_request(rows=len(each), inputs={name: each}) for each in rows]


def digits(*values: float) -> list[Request]:
    """Rows of equal pixels; the sum of class 1 is 64 times the value."""
    return asking(*(np.full((1, 64), value, np.float32) for value in values))


async def answer(instance: DeviceInstance, requests: Sequence[Request]) -> list[float]:
    """The scores of class 1."""
    outputs = await instance.run(instance.gather(requests))
    return [float(value) for value in outputs["scores"][:, 1]]


@pytest.mark.parametrize("count", range(1, MAX_ROWS + 1))
async def test_device_outputs_belong_to_their_rows(tmp_path: Path, count: int) -> None:
    """For every number of rows, those that are padded to a bucket included."""
    async with make(tmp_path, models.digits()) as instance:
        for first in (0, 10):
            values = [float(first + number) for number in range(count)]
            assert await answer(instance, digits(*values)) == [64 * value for value in values]


async def test_padding_repeats_row_of_its_own_batch(tmp_path: Path) -> None:
    """Rows that are discarded are not computed from another batch's rows either."""
    device = Watched()
    async with make(tmp_path, models.digits(), device=device) as instance:
        await answer(instance, digits(9, 9, 9, 9, 9, 9))
        await answer(instance, digits(1, 2, 3, 4, 5))
    seen = device.blocks["input pixels"].array
    assert seen is not None
    rows = seen.view(np.float32).reshape(MAX_ROWS, 64)
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 5]


async def test_batch_starts_behind_one_that_computes(tmp_path: Path) -> None:
    """Each gets its own answers, for more rounds than there are slots."""
    async with make(tmp_path, models.digits()) as instance:
        current = instance.gather(digits(0))
        for value in range(1, 12):
            ahead = instance.gather(digits(value))
            first = instance.submit(current)
            assert instance.submit_next(ahead, lambda: True)
            outputs = await instance.wait(first)
            assert outputs["scores"][0, 1] == 64 * (value - 1)
            current = ahead
        assert (await instance.run(current))["scores"][0, 1] == 64 * 11


async def test_outputs_stay_valid_when_slot_is_refilled(tmp_path: Path) -> None:
    """They are written to the log after later batches have run."""
    async with make(tmp_path, models.digits()) as instance:
        earlier = await instance.run(instance.gather(digits(1)))
        for value in range(6):
            await answer(instance, digits(value))
        assert earlier["scores"][0, 1] == 64


async def test_request_beyond_largest_bucket_runs_without_ring(tmp_path: Path) -> None:
    """A request's rows are never parted."""
    rows = np.ones((MAX_ROWS + 1, 64), np.float32)
    async with make(tmp_path, models.digits()) as instance:
        inputs = instance.gather(asking(rows))
        assert not isinstance(inputs, RingBatch)
        assert len((await instance.run(inputs))["scores"]) == MAX_ROWS + 1


async def test_half_of_failed_batch_runs_without_ring(tmp_path: Path) -> None:
    """The slots are for what runs once."""
    async with make(tmp_path, models.digits()) as instance:
        assert not isinstance(instance.gather(digits(1), fresh=False), RingBatch)


async def test_model_of_free_shapes_has_no_ring(tmp_path: Path) -> None:
    """It runs all the same."""
    ids = np.ones((1, 3), np.int64)
    request = make_request(inputs={"input_ids": ids, "attention_mask": ids})
    async with make(tmp_path, models.tokens()) as instance:
        outputs = await instance.run(instance.gather([request]))
        assert outputs["masked"].tolist() == [[1, 1, 1]]


async def test_model_without_ring_is_logged(tmp_path: Path) -> None:
    """It was asked for, and runs are slower without."""
    with capture_logs() as lines:
        async with make(tmp_path, models.tokens()):
            pass
        async with make(tmp_path / "other", models.digits()):
            pass
    (line,) = lines
    assert (line["event"], line["instance"]) == ("model.without_ring", "instance")
    assert "fixed" in line["reason"]


async def test_rows_are_widened_and_outputs_labelled(tmp_path: Path) -> None:
    """The same as without a ring."""
    directory = tmp_path / "model"
    directory.mkdir()
    labels = "\n".join(f"class {number}" for number in range(10))
    (directory / "labels.txt").write_text(labels, encoding="utf-8")
    config: dict[str, Any] = {
        "preprocess": {"pixels": {"datatype": "UINT8", "scale": 0.5, "offset": 1}},
        "postprocess": "argmax",
        "labels": "labels.txt",
    }
    photo = np.arange(64, dtype=np.uint8).reshape(1, 64)
    async with make(tmp_path, models.digits(), **config) as instance:
        outputs = await instance.run(instance.gather(asking(photo)))
        plain = await instance.run(instance.gather(asking(photo), fresh=False))
    assert outputs["scores_labels"].tolist() == [b"class 9"]
    assert outputs["scores_argmax"].tolist() == plain["scores_argmax"].tolist()


async def test_batch_that_cannot_be_gathered_frees_its_slot(tmp_path: Path) -> None:
    """As that of a request which was checked against another file of the same version."""
    async with make(tmp_path, models.digits()) as instance:
        for _ in range(4):
            with pytest.raises(ValueError, match="structures"):
                instance.gather(asking(np.ones((1, 32), np.float32)))
        assert await answer(instance, digits(1)) == [64]


async def test_failed_run_raises_and_next_one_works(tmp_path: Path) -> None:
    """Its slot comes back: there are no more than three."""
    indices = [np.array([[value]], np.int64) for value in (99, 99, 99, 99, 2)]
    async with make(tmp_path, models.embedding()) as instance:
        for index in indices[:-1]:
            with pytest.raises(Exception, match="out of data bounds"):
                await instance.run(instance.gather(asking(index, name="index")))
        outputs = await instance.run(instance.gather(asking(indices[-1], name="index")))
    assert outputs["vector"].tolist() == [[[8, 9, 10, 11]]]


async def test_device_error_is_fatal(tmp_path: Path) -> None:
    """All later calls on the same context would fail as well."""
    gpu = Gpu()
    async with make(tmp_path, models.digits(), device=gpu) as instance:
        gpu.fails_at = gpu.copies + 1
        with pytest.raises(Fatal, match="illegal memory access"):
            await answer(instance, digits(1))


async def test_error_while_enqueueing_is_fatal(tmp_path: Path) -> None:
    """At once: nobody knows what was enqueued, and nobody would ever say that it is done."""
    gpu = Gpu()
    async with make(tmp_path, models.digits(), device=gpu) as instance:
        gpu.fault = ValueError("out of memory")
        gpu.fails_at = gpu.copies + 1
        with pytest.raises(Fatal, match="out of memory"):
            async with asyncio.timeout(DEADLINE_S):
                await answer(instance, digits(1))


async def test_model_larger_than_device_memory_is_refused(tmp_path: Path) -> None:
    """With all figures, before anything is loaded."""
    gpu = Gpu(free_bytes=600 * 2**20)
    instance = make(
        tmp_path, models.digits(), device=gpu, needs={"weights": 100 * 2**20, "arena": 0}
    )
    with pytest.raises(
        ConfigurationError,
        match=r"memory of cuda:0: expected 613 MiB free \(weights 100 MiB, arena 0 MiB, "
        r"ring 1 MiB, reserve 512 MiB\), got 600 MiB of 16384 MiB, of which this process uses: "
        r"cupy 1 MiB",
    ):
        async with instance:
            pass


async def test_device_memory_is_reported(tmp_path: Path) -> None:
    """The reported memory was measured a moment ago."""
    async with make(tmp_path, models.digits(), device=Gpu()) as instance:
        seen = instance.device_memory()
    assert seen == DeviceSnapshot("cuda:0", {"free": 2**40, "total": 2**34, "cupy": 2**20})


async def test_growth_of_device_memory_by_loading_is_reported(tmp_path: Path) -> None:
    """It is the difference of the free memory before and after."""

    class Shrinking(Gpu):
        def memory(self) -> Memory:
            self.free_bytes -= 2**20
            return super().memory()

    async with make(tmp_path, models.digits(), device=Shrinking()) as instance:
        grown = instance.device_growth()
    assert grown == {"cuda:0": 2**20}


async def test_device_memory_is_freed_on_dispatcher_thread(tmp_path: Path) -> None:
    """A device's memory belongs to the thread that asked for it."""
    given_back: list[str] = []

    class Finalizing(Gpu):
        def device_block(self, name: str, size_bytes: int) -> Block:
            block = super().device_block(name, size_bytes)
            if name == "input pixels":
                weakref.finalize(
                    block.array, lambda: given_back.append(threading.current_thread().name)
                )
            return block

    async with make(tmp_path, models.digits(), device=Finalizing()) as instance:
        await answer(instance, digits(1))
    assert given_back == ["instance"]


async def test_instance_on_missing_device_is_refused(tmp_path: Path) -> None:
    """Its threads end."""

    def absent() -> Device:
        raise ConfigurationError("cuda:0: expected a GPU of this number, got 0")

    instance = make(tmp_path, models.digits(), open_device=absent)
    with pytest.raises(ConfigurationError, match="expected a GPU"):
        async with instance:
            pass
    await eventually(lambda: not any(each.startswith("instance") for each in thread_names()))


class UnableToRunBound(OnnxBackend):
    """Fails as soon as it runs on addresses that are bound once."""

    def bind(self, *_: object) -> Callable[[], None]:
        def enqueue() -> None:
            raise ValueError("no")

        return enqueue


async def test_failing_bound_run_prevents_readiness(tmp_path: Path) -> None:
    """A model that cannot run so does not take the place of one that can."""
    with pytest.raises(ConfigurationError, match="a bound run of 6 rows failed: no"):
        async with make(tmp_path, models.digits(), backend_type=UnableToRunBound):
            pass
