"""Answers at both doors against bare ONNX Runtime: several inputs, batched and not, by each client
of Triton's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from onnx import helper

from headrace.protocol.tensors import DATATYPES
from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, make_model

CALCULATED = ("FP32", "FP64", "INT32", "INT64")
"""Datatypes that ONNX Runtime adds and subtracts on a CPU."""
NOT_IN_NUMPY = "BF16"
"""ONNX Runtime takes no arrays of it; its results are known without a run."""
ROWS = 3


class Case(NamedTuple):
    """A model, its inputs by name with their datatypes, and what ONNX Runtime answers."""

    model: str
    inputs: dict[str, tuple[str, np.ndarray[Any, Any]]]
    outputs: dict[str, np.ndarray[Any, Any]]


def identity(datatypes: dict[str, str], shape: list[Any]) -> onnx.ModelProto:
    """A model whose output `out_NAME` is its input NAME."""
    kinds = {name: DATATYPES[datatype].onnx for name, datatype in datatypes.items()}
    return make_model(
        [helper.make_node("Identity", [name], [f"out_{name}"]) for name in kinds],
        [(name, kind, shape) for name, kind in kinds.items()],
        [(f"out_{name}", kind, shape) for name, kind in kinds.items()],
    )


def add_sub(datatype: str, shape: list[Any]) -> onnx.ModelProto:
    """Sum and difference of `a` and `b`."""
    kind = DATATYPES[datatype].onnx
    return make_model(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", "ab", ["rest"])],
        [(name, kind, shape) for name in "ab"],
        [(name, kind, shape) for name in ("sum", "rest")],
    )


def values_of(datatype: str, start: int) -> np.ndarray[Any, Any]:
    """Values of [ROWS, 2]; texts are of any length, from none."""
    if datatype == "BYTES":
        texts = [("é" * (start + number)).encode() for number in range(ROWS * 2)]
        return np.array(texts, dtype=object).reshape(ROWS, 2)
    numbers = np.arange(start, start + ROWS * 2).reshape(ROWS, 2)
    return (numbers % 2 if datatype == "BOOL" else numbers).astype(DATATYPES[datatype].dtype)


def add_case(repository: Path, name: str, model: onnx.ModelProto, datatypes: list[str]) -> Case:
    """Add a model, and run it without Headrace."""
    add_version(repository, name, 1, model, "probe = false")
    inputs = {
        each.name: (datatype, values_of(datatype, start))
        for start, (each, datatype) in enumerate(zip(model.graph.input, datatypes, strict=True))
    }
    if NOT_IN_NUMPY in datatypes:
        return Case(name, inputs, {f"out_{key}": values for key, (_, values) in inputs.items()})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    given = {
        key: np.array([text.decode() for text in values.flat], object).reshape(values.shape)
        if datatype == "BYTES"
        else values
        for key, (datatype, values) in inputs.items()
    }
    names = [each.name for each in model.graph.output]
    return Case(name, inputs, dict(zip(names, session.run(names, given), strict=True)))


def cases_in(repository: Path) -> Iterator[Case]:
    """Each datatype alone and beside two others, with a batch dimension and without; sums."""
    known = list(DATATYPES)
    for form, shape in (("batched", ["batch", 2]), ("whole", [ROWS, 2])):
        for number, datatype in enumerate(known):
            three = [datatype, known[number - 1], known[number - 2]]
            for datatypes in (three[:1], three[:2], three):
                model = identity(dict(zip("xyz", datatypes, strict=False)), shape)
                name = f"{form}_{'_'.join(datatypes)}"
                yield add_case(repository, name, model, datatypes)
        for datatype in CALCULATED:
            model = add_sub(datatype, shape)
            yield add_case(repository, f"{form}_sum_{datatype}", model, [datatype] * 2)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    """The repository, and its cases."""
    repository = tmp_path_factory.mktemp("models")
    return repository, list(cases_in(repository))


@asynccontextmanager
async def served_cases(cases: tuple[Path, list[Case]]) -> AsyncIterator[tuple[Served, list[Case]]]:
    async with gateway_of(cases[0], grpc_port=0) as served:
        yield served, cases[1]


def call_of(module: Any, case: Case, **options: Any) -> dict[str, Any]:
    """The arguments of `infer`, with the options of inputs and outputs over HTTP."""
    inputs = []
    for name, (datatype, values) in case.inputs.items():
        tensor = module.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, **options)
        inputs.append(tensor)
    outputs = [module.InferRequestedOutput(name, **options) for name in case.outputs]
    return {"model_name": case.model, "inputs": inputs, "outputs": outputs}


def check(case: Case, result: Any) -> None:
    """Compare an answer with what ONNX Runtime gave."""
    for name, expected in case.outputs.items():
        found, wanted = as_texts(result.as_numpy(name)), as_texts(expected)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{case.model}: {name}")


def as_texts(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array whose texts are no bytes, which they are in binary form; others as given."""
    if values.dtype != object:
        return values
    texts = [each.decode() if isinstance(each, bytes) else each for each in values.flat]
    return np.array(texts).reshape(values.shape)


def http_options(case: Case) -> list[dict[str, Any]]:
    """Binary and, where Triton's clients can write it, JSON."""
    has_json = all(kind not in ("FP16", "BF16") for kind, _ in case.inputs.values())
    return [{"binary_data": True}, *([{"binary_data": False}] if has_json else [])]


def ask_over_http(url: str, cases: list[Case]) -> None:
    with triton_http.InferenceServerClient(url) as client:
        for case in cases:
            for options in http_options(case):
                check(case, client.infer(**call_of(triton_http, case, **options)))


def ask_over_grpc(address: str, cases: list[Case]) -> None:
    with triton_grpc.InferenceServerClient(address) as client:
        for case in cases:
            call = call_of(triton_grpc, case)
            check(case, client.infer(**call, compression_algorithm="gzip"))


async def test_blocking_client_over_http_gets_what_runtime_gives(
    cases: tuple[Path, list[Case]],
) -> None:
    """In binary form and in JSON."""
    async with served_cases(cases) as (served, asked):
        await asyncio.to_thread(ask_over_http, served.url, asked)


async def test_asyncio_client_over_http_gets_what_runtime_gives(
    cases: tuple[Path, list[Case]],
) -> None:
    """Compressed in both directions."""
    codings = {
        "request_compression_algorithm": "gzip",
        "response_compression_algorithm": "deflate",
    }
    async with (
        served_cases(cases) as (served, asked),
        triton_http_aio.InferenceServerClient(served.url) as client,
    ):
        for case in asked:
            for options in http_options(case):
                call = call_of(triton_http_aio, case, **options)
                check(case, await client.infer(**call, **codings))


async def test_blocking_client_over_grpc_gets_what_runtime_gives(
    cases: tuple[Path, list[Case]],
) -> None:
    """With compressed requests."""
    async with served_cases(cases) as (served, asked):
        await asyncio.to_thread(ask_over_grpc, served.grpc, asked)


async def test_asyncio_client_over_grpc_gets_what_runtime_gives(
    cases: tuple[Path, list[Case]],
) -> None:
    """Without compression."""
    async with (
        served_cases(cases) as (served, asked),
        triton_grpc_aio.InferenceServerClient(served.grpc) as client,
    ):
        for case in asked:
            check(case, await client.infer(**call_of(triton_grpc_aio, case)))
