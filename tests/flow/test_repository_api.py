"""Triton's clients load and unload models through a gateway, and through a process's own port."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
from aiohttp import ClientSession
from msgspec.structs import replace

from headrace.config import TelemetrySettings
from headrace.control.topic import ControlTopic
from headrace.log.memory import MemoryLog
from headrace.models.wanted import Author, fold, load, set_label
from headrace.protocol.control import WantedModel
from headrace.runtime.process import Pipeline
from headrace.telemetry.http import HttpServer
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.gateways import HOST, Served, gateway_of
from tests.support.models import add_version, digits
from tests.support.pipelines import serving

KEY = "an operator's secret"
LOGIN = {"authorization": f"Bearer {KEY}"}
ANYONE: dict[str, Any] = {"model_changes": "anyone"}
SHORT = {"mode": "explicit", "trial_load": False, "memory_bytes": 1}
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "pixels" data_type: TYPE_FP32 dims: [64] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [10] } ]
version_policy: { latest { num_versions: 2 } }
"""
FIRST_ALONE = {"backend": "onnxruntime", "version_policy": {"specific": {"versions": [1]}}}


PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three versions of a model in Triton's layout, of which the two latest are selected."""
    models = tmp_path / "models"
    for number in (1, 2, 3):
        add_version(models, "digits", number, digits(number))
    (models / "digits" / "config.pbtxt").write_text(CONFIG)
    return models


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with one operator, one who may only infer, and one whose key names no groups."""
    file = tmp_path / "keys.toml"
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, "other", "all")]
    file.write_text(
        'public = ["health", "metadata", "inference", "repository"]\n'
        f'[callers.ada]\nsha256 = "{hashes[0]}"\ngroups = ["inference", "repository"]\n'
        f'[callers.bob]\nsha256 = "{hashes[1]}"\ngroups = ["inference"]\n'
        f'[callers.eve]\nsha256 = "{hashes[2]}"\n'
    )
    return str(file)


def tensor(name: str, datatype: str, columns: int) -> dict[str, Any]:
    """An input or output of a configuration of Triton's."""
    return {"name": name, "data_type": datatype, "dims": [columns]}


def topic_of(served: Served) -> ControlTopic:
    """The control topic behind a gateway."""
    return ControlTopic(served.log, served.settings)


async def wanted_of(served: Served) -> Mapping[str, WantedModel]:
    """The wanted models."""
    return fold(await topic_of(served).read()).models


async def has_generation(served: Served, generation: int) -> bool:
    """Whether so many changes have been made."""
    return len(await topic_of(served).read()) >= generation


async def post(
    http: ClientSession, action: str, parameters: Mapping[str, object], **options: Any
) -> tuple[int, dict[str, Any]]:
    """Load or unload the model; the status and the body of the answer."""
    path = f"/v2/repository/models/digits/{action}"
    async with http.post(path, json={"parameters": parameters}, **options) as response:
        return response.status, await response.json()


def factor_of(client: Any, tensor: Any, version: str = "") -> float:
    """Return the factor by which the version that answers multiplies its input."""
    tensor.set_data_from_numpy(np.ones((1, 64), np.float32))
    scores = client.infer("digits", [tensor], model_version=version).as_numpy("scores")
    return float(scores[0][1]) / 64


def states_of(index: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    """Version, state and reason of each entry."""
    return [(each["version"], each["state"], each.get("reason", "")) for each in index]


def change_models(client: Any, module: Any, index: Callable[[], list[dict[str, str]]]) -> None:
    """Load, load with a configuration, and unload, as one who comes from Triton does."""
    tensor = module.InferInput("pixels", [1, 64], "FP32")
    unloaded = [(each, "UNAVAILABLE", "unloaded") for each in "123"]
    assert states_of(index()) == unloaded
    assert not client.is_model_ready("digits")

    client.load_model("digits", headers=LOGIN)
    assert client.is_model_ready("digits")
    assert states_of(index()) == [unloaded[0], ("2", "READY", ""), ("3", "READY", "")]
    assert (factor_of(client, tensor), factor_of(client, tensor, "2")) == (3, 2)

    config = {**FIRST_ALONE, "max_batch_size": 2}
    client.load_model("digits", headers=LOGIN, config=json.dumps(config))
    assert factor_of(client, tensor) == 1
    found = client.get_model_config("digits")
    shown = found["max_batch_size"] if isinstance(found, dict) else found.config.max_batch_size
    assert shown == 2

    with pytest.raises(module.InferenceServerException, match="sequence_batching: has no counter"):
        client.load_model("digits", headers=LOGIN, config='{"sequence_batching": {}}')
    with pytest.raises(module.InferenceServerException, match=r"file:1/model\.onnx: expected the"):
        client.load_model(
            "digits", headers=LOGIN, config=json.dumps(config), files={"file:1/model.onnx": b"x"}
        )
    with pytest.raises(module.InferenceServerException, match="expected one of the repository, di"):
        client.load_model("letters", headers=LOGIN)
    with pytest.raises(module.InferenceServerException, match="expected an API key"):
        client.unload_model("digits")

    client.unload_model("digits", headers=LOGIN, unload_dependents=True)
    assert not client.is_model_ready("digits")
    assert "READY" not in {each["state"] for each in index()}
    with pytest.raises(module.InferenceServerException, match="expected one that is loaded"):
        client.unload_model("digits", headers=LOGIN)


def change_over_http(address: str) -> None:
    """Do it with the client for HTTP."""
    with triton_http.InferenceServerClient(address) as client:
        change_models(client, triton_http, client.get_model_repository_index)


def change_over_grpc(address: str) -> None:
    """Do it with the client for gRPC, whose entries leave out what is empty."""
    with triton_grpc.InferenceServerClient(address) as client:
        change_models(
            client,
            triton_grpc,
            lambda: client.get_model_repository_index(as_json=True)["models"],
        )


async def test_tritonclient_changes_models_over_http(repository: Path, keys: str) -> None:
    """Index, load, load with a configuration, unload; each is in the history with its author."""
    async with gateway_of(repository, mode="explicit", keys_file=keys) as served:
        await asyncio.to_thread(change_over_http, served.url)
        history = await topic_of(served).read()

    assert [each.action for each in history] == ["load", "load", "default", "unload"]
    assert {each.who for each in history} == {"ada"}


async def test_tritonclient_changes_models_over_grpc(repository: Path, keys: str) -> None:
    """The same as over HTTP."""
    async with gateway_of(repository, mode="explicit", keys_file=keys, grpc_port=0) as served:
        await asyncio.to_thread(change_over_grpc, served.grpc)
        assert await wanted_of(served) == {}


async def test_version_kept_for_bound_requests_is_not_listed_as_ready(repository: Path) -> None:
    """A new request for it is refused, though it stays in memory for a while."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        await post(served.http, "load", {})
        await post(served.http, "load", {"config": json.dumps(FIRST_ALONE)})
        metadata = await served.get("/v2/models/digits")
        await post(served.http, "unload", {})
        shown = [(await served.get(path)).json for path in ("/v2/models", "/v1/models")]

    assert metadata.json["versions"] == ["1"]
    assert shown == [{"models": []}] * 2


async def test_change_without_login_is_refused_though_index_is_open(
    repository: Path, keys: str
) -> None:
    """A public group opens the index, never a change; nothing is written."""
    async with gateway_of(repository, mode="explicit", keys_file=keys, stages=()) as served:
        path = "/v2/repository/models/digits/load"
        replies = [
            await served.post(path, b"{}", headers=headers)
            for headers in ({}, {"X-API-Key": "other"}, {"X-API-Key": "all"})
        ]
        index = await served.post("/v2/repository/index", b"")
        assert await topic_of(served).read() == []

    assert [reply.status for reply in replies] == [401, 403, 403]
    assert "a login whose groups name it (gateway.keys_file)" in replies[2].json["error"]
    assert index.status == 200


async def test_configuration_with_several_faults_is_refused_in_one_line(repository: Path) -> None:
    """It is the caller's fault, and a sentence with line breaks is hard to find in logs."""
    config = {"version_policy": {"specific": {"versions": [-1]}}}
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        status, body = await post(served.http, "load", {"config": json.dumps(config)})

    assert (status, body["error_details"]["code"]) == (400, "INVALID_REQUEST")
    assert "versions.0: expected at least 1, got -1; " in body["error"]
    assert "\n" not in body["error"]


async def test_version_that_cannot_be_loaded_leaves_everything_as_before(repository: Path) -> None:
    """The call fails with the reason, which the history has as well; the old ones serve."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        assert await post(served.http, "load", {}) == (200, {})
        before = await wanted_of(served)
        (repository / "digits" / "4").mkdir()
        (repository / "digits" / "4" / "model.onnx").write_bytes(b"garbage")
        status, body = await post(served.http, "load", {})
        after, last = await wanted_of(served), (await topic_of(served).read())[-1]
        ready = await served.post("/v2/repository/index", b'{"ready": true}')

    assert (status, body["error_details"]["code"]) == (400, "INVALID_REQUEST")
    assert "digits/4: " in body["error"]
    reads = after["digits"].reads
    assert after == {"digits": replace(before["digits"], reads=reads)}
    assert (last.action, last.why[:13]) == ("rollback", "load failed: ")
    assert [each["version"] for each in ready.json] == ["2", "3"]


ROWS = {"max_batch_size": 8}
UNFIT = {
    "name": ({**ROWS, "input": [tensor("pixel", "TYPE_FP32", 64)]}, "missing pixels"),
    "datatype": ({**ROWS, "input": [tensor("pixels", "TYPE_FP64", 64)]}, "got FP64 [-1, 64]"),
    "shape": ({**ROWS, "output": [tensor("scores", "TYPE_FP32", 11)]}, "got FP32 [-1, 11]"),
    "rows": (
        {"max_batch_size": 0, "input": [tensor("pixels", "TYPE_FP32", 64)]},
        "pixels: expected FP32 [-1, 64], as the model has, got FP32 [64]",
    ),
}
"""Configurations that do not fit the model, and what the error says of them."""


@pytest.mark.parametrize(("config", "sentence"), UNFIT.values(), ids=UNFIT)
async def test_load_whose_configuration_does_not_fit_is_its_callers_fault(
    repository: Path, config: dict[str, Any], sentence: str
) -> None:
    """400 as in Triton, with the reason; 500 would tell monitoring that the server is at fault."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        status, body = await post(served.http, "load", {"config": json.dumps(config)})

    assert (status, body["error_details"]) == (
        400,
        {"code": "INVALID_REQUEST", "retriable": False},
    )
    assert "digits/3: " in body["error"]
    assert sentence in body["error"]


async def test_load_over_grpc_whose_configuration_does_not_fit_is_invalid_argument(
    repository: Path,
) -> None:
    """The fault is found by the stages, which are another process than the gateway."""
    config, sentence = UNFIT["name"]
    async with (
        gateway_of(repository, mode="explicit", stages=(), grpc_port=0, **ANYONE) as served,
        triton_grpc_aio.InferenceServerClient(served.grpc) as client,
    ):
        assert isinstance(served.log, MemoryLog)
        async with serving(served.settings, served.log, [STAGES]):
            load_ = client.load_model("digits", config=json.dumps(config))
            status, message = await outcome_of(load_)
        assert await wanted_of(served) == {}

    assert status == "StatusCode.INVALID_ARGUMENT"
    assert sentence in message


async def test_load_without_memory_for_model_is_fault_of_server(repository: Path) -> None:
    """Nothing is wrong with the model: the status is that of a server's fault."""
    short = {"models": {**SHORT, "repository": str(repository)}}
    async with gateway_of(repository, mode="explicit", sections=short, **ANYONE) as served:
        status, body = await post(served.http, "load", {})

    assert (status, body["error_details"]["code"]) == (500, "MODEL_FAILED")
    assert "models.memory_bytes: the version needs" in body["error"]


async def test_load_of_loaded_model_reads_its_files_again(repository: Path) -> None:
    """A version that was changed in place is answered with its new content."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        await post(served.http, "load", {})
        shutil.rmtree(repository / "digits" / "3")
        add_version(repository, "digits", 3, digits(7))
        assert await post(served.http, "load", {}) == (200, {})
        answer = await served.kafka.infer("digits", {"pixels": np.ones((1, 64), np.float32)})

    assert answer.outputs["scores"][0][1] == 7 * 64


async def test_labelled_version_stays_loaded(repository: Path) -> None:
    """Requests to the label are answered, whatever the configuration selects."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        for generation, change in enumerate(
            (load("digits", "1"), set_label("digits", "stable", "1"))
        ):
            await topic_of(served).write(change, generation, Author("ada"), 0)
        await post(served.http, "load", {})
        (wanted,) = (await wanted_of(served)).values()

    assert (wanted.versions, wanted.default) == (["1", "2", "3"], "3")


@asynccontextmanager
async def labelled(repository: Path) -> AsyncIterator[Served]:
    """A gateway with versions 2 and 3, of which the label `canary` names 2."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        await post(served.http, "load", {})
        generation = len(await topic_of(served).read())
        await topic_of(served).write(set_label("digits", "canary", "2"), generation, Author("a"), 0)
        model = served.pipeline.models.catalog.models["digits"]
        await eventually(lambda: model.names.get("canary") == "2")
        yield served


async def test_statistics_of_label_are_those_of_its_version(repository: Path) -> None:
    """A label stands wherever a model's name does."""
    async with labelled(repository) as served:
        found = (await served.get("/v2/models/digits@canary/stats")).json["model_stats"]

    assert [(each["name"], each["version"]) for each in found] == [("digits", "2")]


async def test_version_beside_label_is_refused_for_good(repository: Path) -> None:
    """It is a contradiction or says nothing, and trying again does not help."""
    async with labelled(repository) as served:
        reply = await served.infer("digits@canary/versions/2", {"inputs": [PIXELS]})

    assert reply.status == 400
    assert reply.json["error"] == (
        'model_version: expected none beside the label canary, which names one, got "2"'
    )


async def test_load_that_is_overtaken_is_told_generation_it_lost_to(repository: Path) -> None:
    """Two operators at once: one wins, and the other one gets 409 with who won."""
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        assert isinstance(served.log, MemoryLog)
        transactions = served.log.faults.transactions
        transactions.hold()
        async with asyncio.TaskGroup() as tasks:
            losing = tasks.create_task(post(served.http, "load", {}))
            await eventually(transactions.open)
            winning = tasks.create_task(
                topic_of(served).write(load("digits", "1"), 0, Author("bob"), 0)
            )
            name = f"{served.settings.namespace}.control"
            await eventually(lambda: transactions.entered_producers(name) == 2)
            transactions.release()

    assert winning.result() is not None
    status, body = losing.result()
    assert (status, body["error_details"]["code"]) == (409, "CONFLICT")
    assert body["error_details"]["retriable"] is False
    assert "expected generation 0, got generation 1, load by bob" in body["error"]


async def test_load_survives_change_of_another_model_between_its_two_changes(
    repository: Path,
) -> None:
    """A load that has begun is finished: one that stops half-way leaves the default behind."""
    add_version(repository, "letters", 1, digits())
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        assert isinstance(served.log, MemoryLog)
        transactions = served.log.faults.transactions
        name = f"{served.settings.namespace}.control"
        await topic_of(served).write(load("digits", "1"), 0, Author("ada"), 0)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(post(served.http, "load", {}))
            await eventually(lambda: has_generation(served, 2), what="its first change")
            transactions.hold()
            await eventually(transactions.open)  # its second change
            other = tasks.create_task(
                topic_of(served).write(load("letters", "1"), 2, Author("bob"), 0)
            )
            await eventually(lambda: transactions.entered_producers(name) == 4)
            transactions.release()
        wanted = await wanted_of(served)

    assert other.result() is not None
    assert loading.result() == (200, {})
    assert (wanted["digits"].versions, wanted["digits"].default) == (["2", "3"], "3")
    assert wanted["letters"].versions == ["1"]


async def test_failed_load_is_undone_although_another_model_changes_meanwhile(
    repository: Path,
) -> None:
    """The caller gets the reason, and the model is wanted as before."""
    add_version(repository, "letters", 1, digits())
    (repository / "digits" / "4").mkdir()
    (repository / "digits" / "4" / "model.onnx").write_bytes(b"garbage")
    async with gateway_of(repository, mode="explicit", **ANYONE) as served:
        assert isinstance(served.log, MemoryLog)
        transactions = served.log.faults.transactions
        name = f"{served.settings.namespace}.control"
        await topic_of(served).write(load("digits", "1"), 0, Author("ada"), 0)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(post(served.http, "load", {}))
            await eventually(lambda: has_generation(served, 2), what="its first change")
            transactions.hold()
            await eventually(transactions.open)  # the change that undoes it
            tasks.create_task(topic_of(served).write(load("letters", "1"), 2, Author("bob"), 0))
            await eventually(lambda: transactions.entered_producers(name) == 4)
            transactions.release()
        wanted = await wanted_of(served)

    status, body = loading.result()
    assert (status, body["error_details"]["code"]) == (400, "INVALID_REQUEST")
    assert "still wanted" not in body["error"]
    assert (wanted["digits"].versions, wanted["digits"].default) == (["1"], "1")


async def test_call_over_grpc_that_is_overtaken_is_aborted(repository: Path) -> None:
    """The status is ABORTED, which gRPC does not retry by itself."""
    async with (
        gateway_of(repository, mode="explicit", grpc_port=0, **ANYONE) as served,
        triton_grpc_aio.InferenceServerClient(served.grpc) as client,
    ):
        assert isinstance(served.log, MemoryLog)
        transactions = served.log.faults.transactions
        transactions.hold()
        async with asyncio.TaskGroup() as tasks:
            losing = tasks.create_task(outcome_of(client.load_model("digits")))
            await eventually(transactions.open)
            winning = tasks.create_task(
                topic_of(served).write(load("digits", "1"), 0, Author("bob"), 0)
            )
            name = f"{served.settings.namespace}.control"
            await eventually(lambda: transactions.entered_producers(name) == 2)
            transactions.release()

    assert winning.result() is not None
    status, message = losing.result()
    assert status == "StatusCode.ABORTED"
    assert "got generation 1, load by bob" in message


async def outcome_of(call: Awaitable[None]) -> tuple[str, str]:
    """Status and message of a call that fails."""
    with pytest.raises(triton_grpc.InferenceServerException) as refused:
        await call
    return str(refused.value.status()), str(refused.value.message())


async def test_load_over_gateway_alone_is_answered_when_process_has_loaded(
    repository: Path,
) -> None:
    """The gateway's own word proves nothing: a request after the answer is answered."""
    async with gateway_of(repository, mode="explicit", stages=(), **ANYONE) as served:
        status, body = await post(served.http, "load", {})
        assert (status, body["error_details"]["code"]) == (503, "UNAVAILABLE")
        assert "no process was heard" in body["error"]
        assert isinstance(served.log, MemoryLog)
        async with serving(served.settings, served.log, [STAGES]):
            assert await post(served.http, "load", {}) == (200, {})
            answer = await served.kafka.infer("digits", {"pixels": np.ones((1, 64), np.float32)})

    assert answer.model_version == "3"


NO_SUCH_VERSION = '{"version_policy": {"specific": {"versions": [9]}}}'
REFUSED = (
    ("load", {"parameters": {"x": "y"}}, "parameters.x: expected config alone"),
    ("load", {"parameters": {"config": 1}}, "parameters.config: expected JSON in a string"),
    ("load", {"parameters": {"config": "[]"}}, "parameters.config: expected an object"),
    ("load", {"parameters": {"config": '{"name": "x"}'}}, "name: expected digits, got x"),
    ("load", {"parameters": {"config": NO_SUCH_VERSION}}, "expected some of [1, 2, 3], got [9]"),
    ("load", {"parameters": 1}, "parameters: expected"),
    ("unload", {"parameters": {"unload_dependents": 1}}, "expected true or false"),
    ("unload", {"parameters": {"config": "{}"}}, "expected unload_dependents alone"),
)
"""Actions, bodies, and what the error says."""


async def test_parameter_without_counterpart_is_refused_by_name(repository: Path) -> None:
    """Nothing is changed."""
    async with gateway_of(repository, mode="explicit", stages=(), **ANYONE) as served:
        for action, body, sentence in REFUSED:
            path = f"/v2/repository/models/digits/{action}"
            reply = await served.post(path, json.dumps(body).encode())
            assert (reply.status, sentence in reply.json["error"]) == (400, True), sentence
        assert await topic_of(served).read() == []


async def test_polling_gateway_serves_new_version_and_refuses_loads(tmp_path: Path) -> None:
    """The repository decides which versions there are, every so often."""
    add_version(tmp_path, "digits", 1, digits())
    async with gateway_of(tmp_path, mode="poll", **ANYONE) as served:
        add_version(tmp_path, "digits", 2, digits(2))

        async def has_come() -> bool:
            answer = await served.kafka.infer("digits", {"pixels": np.ones((1, 64), np.float32)})
            return answer.model_version == "2"

        await eventually(has_come, what="version 2")
        status, body = await post(served.http, "load", {})

    assert status == 501
    assert 'got "poll"' in body["error"]


# --- the port of a process ----------------------------------------------------------------------


@asynccontextmanager
async def port_of(pipeline: Pipeline, **access: Any) -> AsyncIterator[tuple[ClientSession, int]]:
    """The port of a process, as `headrace run` opens it."""
    settings = TelemetrySettings(http_port=0, **access)
    server = HttpServer(
        (HOST, 0),
        pipeline.health,
        pipeline.models.catalog,
        pipeline.metrics.registry,
        access=settings,
        repository=pipeline.repository,
    )
    async with server, ClientSession(f"http://{HOST}:{server.port}") as http:
        yield http, server.port


async def test_tritonclient_changes_models_over_port_of_process(
    repository: Path, keys: str
) -> None:
    """Index, load and unload work as at a gateway; a password of a browser does not do."""

    def change(address: str) -> list[str]:
        with triton_http.InferenceServerClient(address) as client:
            client.load_model("digits", headers=LOGIN)
            states = [each["state"] for each in client.get_model_repository_index(headers=LOGIN)]
            with pytest.raises(triton_http.InferenceServerException, match="has no counterpart"):
                client.load_model("digits", headers=LOGIN, config='{"ensemble_scheduling": {}}')
            with pytest.raises(triton_http.InferenceServerException, match="login"):
                client.load_model("digits", headers={"X-API-Key": "other"})
            client.unload_model("digits", headers=LOGIN)
            return states

    async with (
        gateway_of(repository, mode="explicit") as served,
        port_of(served.pipeline, keys_file=keys) as (http, port),
    ):
        states = await asyncio.to_thread(change, f"{HOST}:{port}")
        async with http.post(
            "/v2/repository/models/digits/unload", headers={"Authorization": "Basic OnNlY3JldA=="}
        ) as refused:
            status = refused.status

    assert states == ["UNAVAILABLE", "READY", "READY"]
    assert status == 401


async def test_port_of_process_that_serves_all_refuses_changes(repository: Path) -> None:
    """The sentence says what to set."""
    async with gateway_of(repository) as served, port_of(served.pipeline) as (http, _):
        status, body = await post(http, "unload", {})

    assert status == 501
    assert 'expected models.mode = "explicit"' in body["error"]
