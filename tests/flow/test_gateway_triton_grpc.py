"""Triton's own clients against the gateway's door for gRPC."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from headrace.protocol.tensors import DATATYPES
from tests.support.conditions import DEADLINE_S
from tests.support.gateways import add_identities, gateway_of, values_of
from tests.support.python_models import ECHO, add_whole_model
from tests.support.tree import ROOT

CODINGS = (None, "gzip", "deflate")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model for each datatype, which changes nothing."""
    add_identities(tmp_path)
    return tmp_path


def call_of(module: Any, datatype: str) -> dict[str, Any]:
    """The arguments of `infer`, which are the same for both clients."""
    values = values_of(datatype)
    tensor = module.InferInput("x", list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    outputs = [module.InferRequestedOutput("y")]
    return {"model_name": datatype, "inputs": [tensor], "outputs": outputs}


def ask_for_all(address: str) -> None:
    """Make each call with the blocking client, and what its users ask beside."""
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("FP32", "1")
        assert not client.is_model_ready("letters")
        assert client.get_server_metadata().name == "headrace"
        assert list(client.get_model_metadata("FP32").inputs[0].shape) == [-1, 2]
        assert list(client.get_model_config("FP32").config.input[0].dims) == [2]
        index = client.get_model_repository_index(as_json=True)["models"]
        assert {each["name"] for each in index} == set(DATATYPES)
        for datatype in DATATYPES:
            for coding in CODINGS:
                call = call_of(triton, datatype) | {"compression_algorithm": coding}
                found = client.infer(**call).as_numpy("y")
                np.testing.assert_array_equal(found, values_of(datatype), err_msg=datatype)
        with pytest.raises(triton.InferenceServerException, match="letters"):
            client.infer(**call_of(triton, "FP32") | {"model_name": "letters"})
        with pytest.raises(triton.InferenceServerException, match="sequence_id"):
            client.infer(**call_of(triton, "FP32"), sequence_id=7)
        with pytest.raises(triton.InferenceServerException, match="not supported"):
            client.load_model("FP32")


def stream_all(address: str) -> None:
    """Send a request for each datatype in a stream, and one that is refused."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(**call_of(triton, "FP32") | {"model_name": "letters"})
        for datatype in DATATYPES:
            client.async_stream_infer(
                **call_of(triton, datatype),
                request_id=datatype,
                enable_empty_final_response=True,
            )
        _, error = answers.get(timeout=DEADLINE_S)
        assert "letters" in error.message()
        for datatype in DATATYPES:
            result, error = answers.get(timeout=DEADLINE_S)
            assert (error, result.get_response().id) == (None, datatype)
            assert result.get_response().parameters["triton_final_response"].bool_param
            np.testing.assert_array_equal(result.as_numpy("y"), values_of(datatype))


async def test_blocking_client_gets_every_datatype_back(repository: Path) -> None:
    """Compressed and not; errors come with their sentence."""
    async with gateway_of(repository, grpc_port=0) as served:
        await asyncio.to_thread(ask_for_all, served.grpc)


async def test_stream_of_blocking_client_gets_every_datatype_back(repository: Path) -> None:
    """An error in between leaves the stream open."""
    async with gateway_of(repository, grpc_port=0) as served:
        await asyncio.to_thread(stream_all, served.grpc)


async def test_asyncio_client_gets_every_datatype_back(repository: Path) -> None:
    """The same through `tritonclient.grpc.aio`, by single calls and by a stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for datatype in DATATYPES:
            yield call_of(triton_aio, datatype)

    async with (
        gateway_of(repository, grpc_port=0) as served,
        triton_aio.InferenceServerClient(served.grpc) as client,
    ):
        for datatype in DATATYPES:
            response = await client.infer(**call_of(triton_aio, datatype))
            np.testing.assert_array_equal(response.as_numpy("y"), values_of(datatype))
        found = [each async for each in client.stream_infer(requests())]

    for datatype, (result, error) in zip(DATATYPES, found, strict=True):
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), values_of(datatype))


async def test_bytes_that_are_no_text_come_back(tmp_path: Path) -> None:
    """A model in Python takes any bytes; ONNX Runtime takes UTF-8 alone."""
    add_whole_model(tmp_path, "echo", ECHO)
    values = np.array([[b"\xff\x00", b""], [b"\0", bytes(range(256))]], dtype=object)
    tensor = triton_aio.InferInput("x", [2, 2], "BYTES")
    tensor.set_data_from_numpy(values)
    async with (
        gateway_of(tmp_path, grpc_port=0) as served,
        triton_aio.InferenceServerClient(served.grpc) as client,
    ):
        answer = await client.infer("echo", [tensor])

    np.testing.assert_array_equal(answer.as_numpy("y"), values)


async def test_example_of_page_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's code prints the label of its image twice, and its best classes."""
    page = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    async with gateway_of(models, grpc_port=0, shared_memory="/headrace_") as served:
        await asyncio.to_thread(exec, code.replace("127.0.0.1:8001", served.grpc), {})

    printed = capsys.readouterr().out
    first, second = re.findall(r"^\[\d\]$", printed, flags=re.MULTILINE)
    assert first == second
    assert re.search(r"^\[\[b'0\.\d+:\d'( b'0\.\d+:\d'){2}\]\]$", printed, flags=re.MULTILINE)
