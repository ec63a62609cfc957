"""Triton's own clients against the gateway's door for HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

from headrace.protocol.tensors import DATATYPES
from tests.support.gateways import add_identities, gateway_of, values_of
from tests.support.tree import ROOT

ONLY_BINARY = frozenset({"FP16", "BF16"})
"""Datatypes that Triton's clients do not write in JSON."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model for each datatype, which changes nothing."""
    add_identities(tmp_path)
    return tmp_path


def cases() -> Iterator[tuple[str, bool, str | None]]:
    """Datatype, binary or JSON, and compression of each call."""
    for datatype in DATATYPES:
        for binary in (True, False):
            if binary or datatype not in ONLY_BINARY:
                yield datatype, binary, None
        yield datatype, True, "gzip"
        yield datatype, True, "deflate"


def call_of(module: Any, datatype: str, binary: bool, coding: str | None) -> dict[str, Any]:
    """The arguments of `infer`, which are the same for both clients."""
    values = values_of(datatype)
    tensor = module.InferInput("x", list(values.shape), datatype)
    tensor.set_data_from_numpy(values, binary_data=binary)
    return {
        "model_name": datatype,
        "inputs": [tensor],
        "outputs": [module.InferRequestedOutput("y", binary_data=binary)],
        "request_compression_algorithm": coding,
        "response_compression_algorithm": coding,
    }


def expected_of(datatype: str, binary: bool, coding: str | None) -> np.ndarray[Any, Any]:
    """Return the array that both clients return; BYTES in JSON become texts."""
    values = values_of(datatype)
    if datatype == "BYTES" and not binary:
        return np.array([[each.decode() for each in row] for row in values], dtype=object)
    return values


def ask_for_all(url: str) -> None:
    """Make each call with the blocking client, and what its users ask beside."""
    with triton.InferenceServerClient(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("FP32", "1")
        assert client.get_server_metadata()["name"] == "headrace"
        assert client.get_model_metadata("FP32")["inputs"][0]["shape"] == [-1, 2]
        assert client.get_model_config("FP32")["input"][0]["dims"] == [2]
        for case in cases():
            found = client.infer(**call_of(triton, *case)).as_numpy("y")
            np.testing.assert_array_equal(found, expected_of(*case), err_msg=str(case))
        with pytest.raises(triton.InferenceServerException, match="letters"):
            client.infer(**call_of(triton, *case) | {"model_name": "letters"})


async def test_tritonclient_blocking_gets_every_datatype_back(repository: Path) -> None:
    """Binary and JSON, compressed and not, give every datatype back; errors carry their message."""
    async with gateway_of(repository) as served:
        await asyncio.to_thread(ask_for_all, served.url)


async def test_tritonclient_asyncio_gets_every_datatype_back(repository: Path) -> None:
    """The same through `tritonclient.http.aio`, which MLServer's and others' clients use."""
    async with (
        gateway_of(repository) as served,
        triton_aio.InferenceServerClient(served.url) as client,
    ):
        for case in cases():
            response = await client.infer(**call_of(triton_aio, *case))
            np.testing.assert_array_equal(
                response.as_numpy("y"), expected_of(*case), err_msg=str(case)
            )


async def test_triton_example_of_page_prints_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's code prints the label of its image, and its best classes."""
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    async with gateway_of(models, shared_memory="/headrace_") as served:
        await asyncio.to_thread(exec, code.replace("127.0.0.1:8000", served.url), {})

    printed = capsys.readouterr().out
    assert re.search(r"^\[\d\]$", printed, flags=re.MULTILINE)
    assert re.search(r"^\[\[b'0\.\d+:\d'( b'0\.\d+:\d'){2}\]\]$", printed, flags=re.MULTILINE)
