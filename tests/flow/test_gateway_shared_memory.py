"""Tensors in shared memory, by Triton's clients over both doors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, digits

PREFIX = f"/headrace_flow_{os.getpid()}_"
KEY = f"{PREFIX}object"
PIXEL_BYTES, SCORE_BYTES = 2 * 64 * 4, 2 * 10 * 4
SIZE = PIXEL_BYTES + SCORE_BYTES
DOORS = pytest.mark.parametrize("module", [triton_http, triton_grpc], ids=["http", "grpc"])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`digits`, whose scores for 64 ones are 64 times 0 to 9."""
    add_version(tmp_path, "digits", 1, digits())
    return tmp_path


@pytest.fixture
def handle() -> Iterator[Any]:
    """An object with two rows of ones, and room for their scores."""
    handle = shm.create_shared_memory_region("mine", KEY, SIZE)
    shm.set_shared_memory_region(handle, [np.ones((2, 64), np.float32)])
    yield handle
    shm.destroy_shared_memory_region(handle)


async def use(module: Any, served: Served, ask: Callable[[Any], Any]) -> Any:
    """Call a function with a blocking client of a door, in a thread."""
    url = served.url if module is triton_http else served.grpc

    def call() -> Any:
        with module.InferenceServerClient(url) as client:
            return ask(client)

    return await asyncio.to_thread(call)


def infer(module: Any, client: Any, size: int = SCORE_BYTES, region: str = "mine") -> Any:
    """Ask about the object's pixels, and for the scores behind them."""
    pixels = module.InferInput("pixels", [2, 64], "FP32")
    pixels.set_shared_memory(region, PIXEL_BYTES)
    scores = module.InferRequestedOutput("scores")
    scores.set_shared_memory(region, size, offset=PIXEL_BYTES)
    return client.infer("digits", [pixels], outputs=[scores])


@DOORS
async def test_tensors_travel_through_shared_memory(
    repository: Path, handle: Any, module: Any
) -> None:
    """The answer has no data, and the object has the scores."""

    def ask(client: Any) -> tuple[Any, Any, Any]:
        client.register_system_shared_memory("mine", KEY, SIZE)
        status = client.get_system_shared_memory_status()
        answer = infer(module, client)
        client.unregister_system_shared_memory("mine")
        with pytest.raises(InferenceServerException, match="registered region"):
            infer(module, client)
        return status, answer, client.get_system_shared_memory_status()

    async with gateway_of(repository, grpc_port=0, shared_memory=PREFIX) as served:
        status, answer, status_after = await use(module, served, ask)

    scores = shm.get_contents_as_numpy(handle, np.float32, [2, 10], offset=PIXEL_BYTES)
    np.testing.assert_allclose(scores, np.tile(64.0 * np.arange(10), (2, 1)))
    output = answer.get_output("scores")
    if module is triton_http:
        assert status == [{"name": "mine", "key": KEY, "offset": 0, "byte_size": SIZE}]
        assert status_after == []
        assert "data" not in output
        assert output["parameters"]["shared_memory_byte_size"] == SCORE_BYTES
    else:
        region = status.regions["mine"]
        assert (region.key, region.byte_size, len(status_after.regions)) == (KEY, SIZE, 0)
        assert output.parameters["shared_memory_byte_size"].int64_param == SCORE_BYTES
        assert list(answer.get_response().raw_output_contents) == [b""]


@DOORS
async def test_region_is_registered_at_all_doors(
    repository: Path, handle: Any, module: Any
) -> None:
    """Doors share the regions, and a name is taken once."""
    other = triton_grpc if module is triton_http else triton_http

    def register(client: Any) -> None:
        client.register_system_shared_memory("mine", KEY, SIZE)

    async with gateway_of(repository, grpc_port=0, shared_memory=PREFIX) as served:
        await use(module, served, register)
        await use(other, served, lambda client: infer(other, client))
        with pytest.raises(InferenceServerException, match="not registered"):
            await use(other, served, register)

        assert served.doors.snapshot().regions == 1
    scores = shm.get_contents_as_numpy(handle, np.float32, [2, 10], offset=PIXEL_BYTES)
    assert scores[1, 9] == 576


@DOORS
async def test_truncated_object_is_callers_fault(
    repository: Path, handle: Any, module: Any
) -> None:
    """The gateway lives on; a place that is too small for its output is refused, too."""

    def ask(client: Any) -> None:
        client.register_system_shared_memory("mine", KEY, SIZE)
        with pytest.raises(InferenceServerException, match=r"output scores.*at least 80"):
            infer(module, client, size=SCORE_BYTES - 1)
        os.truncate(Path("/dev/shm") / KEY[1:], 100)
        with pytest.raises(InferenceServerException, match="expected at least 512 bytes, got 100"):
            infer(module, client)

    async with gateway_of(repository, grpc_port=0, shared_memory=PREFIX) as served:
        await use(module, served, ask)
        ready = await served.get("/v2/health/ready")
        refused = served.counted(400), served.counted("INVALID_ARGUMENT")

    assert ready.status == 200
    assert sum(refused) == 2


@DOORS
async def test_shared_memory_counts_as_body(repository: Path, handle: Any, module: Any) -> None:
    """A region of any size is no way around the limit of bodies."""

    def ask(client: Any) -> None:
        client.register_system_shared_memory("mine", KEY, SIZE)
        pixels = module.InferInput("pixels", [2, 64], "FP32")
        pixels.set_shared_memory("mine", PIXEL_BYTES)
        again = module.InferInput("again", [2, 64], "FP32")
        again.set_shared_memory("mine", PIXEL_BYTES)
        with pytest.raises(InferenceServerException, match="at most 1024 bytes in the body and"):
            client.infer("digits", [pixels, again])

    async with gateway_of(
        repository, grpc_port=0, shared_memory=PREFIX, max_body_bytes=1024
    ) as served:
        await use(module, served, ask)


@DOORS
async def test_shared_memory_is_off_unless_allowed(
    repository: Path, handle: Any, module: Any
) -> None:
    """It is refused by the name of the setting, and that of CUDA with or without the setting."""

    def ask(client: Any) -> None:
        with pytest.raises(InferenceServerException, match=r"gateway\.shared_memory"):
            client.register_system_shared_memory("mine", KEY, SIZE)
        with pytest.raises(InferenceServerException, match=r"gateway\.shared_memory"):
            infer(module, client)

    def ask_for_cuda(client: Any) -> None:
        with pytest.raises(InferenceServerException, match="not supported: only system"):
            client.register_cuda_shared_memory("mine", "aGFuZGxl", 0, SIZE)

    async with gateway_of(repository, grpc_port=0) as served:
        await use(module, served, ask)
    async with gateway_of(repository, grpc_port=0, shared_memory=PREFIX) as served:
        await use(module, served, ask_for_cuda)
        extensions = (await served.get("/v2")).json["extensions"]

    assert "system_shared_memory" in extensions


async def test_registering_other_objects_is_refused(repository: Path) -> None:
    """Names beside the prefix, tricks with paths, and bodies of another form are 400."""
    path = "/v2/systemsharedmemory/region/r/register"
    bodies = [
        b'{"key": "/other", "byte_size": 1}',
        f'{{"key": "{PREFIX}/../../etc/passwd", "byte_size": 1}}'.encode(),
        b'{"key": "/x", "byte_size": 0}',
        b'{"key": "/x"}',
        b"nothing",
    ]
    async with gateway_of(repository, shared_memory=PREFIX) as served:
        replies = [await served.post(path, body) for body in bodies]
        unknown = await served.get("/v2/systemsharedmemory/region/r/status")

    assert [reply.status for reply in replies] == [400] * len(bodies)
    assert (unknown.status, "registered region" in unknown.json["error"]) == (400, True)
