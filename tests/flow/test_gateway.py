"""The gateway's door for HTTP, in front of the four stages on the embedded log."""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import brotli
import cramjam
import grpc
import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs

from headrace.config import make_settings
from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.protocol.tensors import DATATYPES, from_array
from headrace.telemetry.logs import Event
from headrace.topics import Stage, Topic
from tests.support.conditions import eventually
from tests.support.gateways import Served, gateway_of
from tests.support.grpc_callers import caller_of, pixels
from tests.support.logs import read
from tests.support.models import add_version, digits, identity
from tests.support.python_models import BEGUN, GATE
from tests.support.tree import ROOT

MIB = 1024 * 1024
PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}
BODY = msgspec.json.encode({"inputs": [PIXELS]})


def compress_zstd(body: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(body))


def decompress(body: bytes, coding: str | None) -> bytes:
    match coding:
        case "zstd":
            return bytes(cramjam.zstd.decompress(body))
        case "gzip":
            return gzip.decompress(body)
        case "br":
            return bytes(brotli.decompress(body))
    return body


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with `digits`, whose scores for 64 ones are 64 times 0 to 9."""
    add_version(tmp_path, "digits", 1, digits())
    return tmp_path


async def test_json_request_is_answered_in_json(repository: Path) -> None:
    """The answer has the protocol's fields, and the caller's id."""
    async with gateway_of(repository) as served:
        response = await served.infer("digits", {"id": "seven", "inputs": [PIXELS]})

    assert response.status == 200
    answer = response.json
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("digits", "1", "seven")
    (scores,) = answer["outputs"]
    assert (scores["name"], scores["datatype"], scores["shape"]) == ("scores", "FP32", [1, 10])
    np.testing.assert_allclose(scores["data"], 64.0 * np.arange(10))


async def test_binary_request_is_answered_in_binary(repository: Path) -> None:
    """The bytes of both follow the JSON, whose size is in the header."""
    pixels = np.ones((2, 64), "<f4").tobytes()
    tensor = {
        "name": "pixels",
        "datatype": "FP32",
        "shape": [2, 64],
        "parameters": {"binary_data_size": len(pixels)},
    }
    head = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    async with gateway_of(repository) as served:
        response = await served.post("/v2/models/digits/infer", head + pixels, headers=headers)

    (output,) = response.json["outputs"]
    scores = np.frombuffer(response.tensors, "<f4").reshape(output["shape"])
    assert output["parameters"] == {"binary_data_size": 80}
    np.testing.assert_allclose(scores, np.tile(64.0 * np.arange(10), (2, 1)))


async def test_bare_tensor_body_becomes_single_input_of_model(repository: Path) -> None:
    """With a JSON of 0 bytes the body is the tensor, and shape and name are the model's."""
    async with gateway_of(repository) as served:
        response = await served.post(
            "/v2/models/digits/versions/1/infer",
            np.ones(64, "<f4").tobytes(),
            headers={"Inference-Header-Content-Length": "0"},
        )

    np.testing.assert_allclose(np.frombuffer(response.tensors, "<f4"), 64.0 * np.arange(10))


async def test_bare_tensor_body_is_answered_in_json_where_that_is_accepted(
    repository: Path,
) -> None:
    """It has no flags that could ask for JSON."""
    async with gateway_of(repository) as served:
        response = await served.post(
            "/v2/models/digits/infer",
            np.ones(64, "<f4").tobytes(),
            headers={"Inference-Header-Content-Length": "0", "Accept": "application/json"},
        )

    assert response.json["outputs"][0]["data"] == [64.0 * each for each in range(10)]


@pytest.mark.parametrize("accept", ["*/*", "application/*", "application/json;q=0.5, */*"])
async def test_bare_tensor_body_is_answered_in_binary_where_all_is_accepted(
    repository: Path, accept: str
) -> None:
    """As clients do by default."""
    async with gateway_of(repository) as served:
        response = await served.post(
            "/v2/models/digits/infer",
            np.ones(64, "<f4").tobytes(),
            headers={"Inference-Header-Content-Length": "0", "Accept": accept},
        )

    np.testing.assert_allclose(np.frombuffer(response.tensors, "<f4"), 64.0 * np.arange(10))


@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress)],
)
async def test_compressed_request_and_response_bodies_are_decoded(
    repository: Path, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    """A compressed request is read; a large answer is compressed for callers that accept it."""
    rows = {**PIXELS, "shape": [100, 64], "data": [1.0] * 6400}
    body = compress(msgspec.json.encode({"inputs": [rows]}))
    async with gateway_of(repository) as served:
        response = await served.post(
            "/v2/models/digits/infer",
            body,
            headers={"Content-Encoding": coding, "Accept-Encoding": coding},
        )

    assert response.headers["Content-Encoding"] == coding
    assert response.json["outputs"][0]["shape"] == [100, 10]


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("zstd", "zstd"),
        ("gzip;q=0.5, zstd;q=0.9", "zstd"),
        ("gzip, zstd;q=0", "gzip"),
        ("gzip;q=0.9, zstd;q=0.5", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("*", "zstd"),
        ("zstd;q=0, *;q=0.5", "gzip"),
        ("identity, gzip;q=0.5", None),
        ("gzip;q=much", None),
        ("br", "br"),
    ],
)
async def test_answer_has_coding_that_caller_accepts(
    repository: Path, accepted: str, coding: str | None
) -> None:
    """The highest quality is taken, of equal ones zstd; the request is in zstd each time."""
    rows = {**PIXELS, "shape": [100, 64], "data": [1.0] * 6400}
    body = compress_zstd(msgspec.json.encode({"inputs": [rows]}))
    headers = {"Content-Encoding": "zstd", "Accept-Encoding": accepted}
    async with (
        gateway_of(repository) as served,
        ClientSession(auto_decompress=False) as http,
        http.post(
            f"http://{served.url}/v2/models/digits/infer", data=body, headers=headers
        ) as response,
    ):
        answer = await response.read()

    assert response.headers.get("Content-Encoding") == coding
    plain = decompress(answer, coding)
    assert msgspec.json.decode(plain)["outputs"][0]["shape"] == [100, 10]


async def test_base_path_is_before_all_paths(repository: Path) -> None:
    """Without it nothing is found."""
    async with gateway_of(repository, base_path="/a/b") as served:
        found = await served.post("/a/b/v2/models/digits/infer", BODY)
        missing = await served.post("/v2/models/digits/infer", BODY)

    assert (found.status, missing.status) == (200, 404)


@pytest.mark.parametrize("path", ["a", "/a/", "/", "/a b", "/{model}"])
def test_base_path_of_other_form_is_refused(path: str) -> None:
    """It begins with a slash and does not end with one."""
    with pytest.raises(ConfigurationError, match=r"gateway\.base_path"):
        make_settings({"gateway": {"base_path": path}})


def number(value: float) -> dict[str, object]:
    """A request for the gated model."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}


async def test_callers_over_http_and_kafka_share_batches(gated: Path) -> None:
    """Requests of both kinds that wait for a model run together, and each gets its own answer."""
    async with gateway_of(gated) as served, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.infer("gated", number(0)))
        await eventually(BEGUN.is_set)
        over_http = [tasks.create_task(served.infer("gated", number(n))) for n in range(4)]
        over_kafka = [
            tasks.create_task(served.kafka.infer("gated", {"x": np.full((1, 1), n, np.float32)}))
            for n in range(4, 8)
        ]
        await eventually(lambda: served.waiting() >= 8)
        GATE.set()
        answers = [(await task).json for task in over_http]
        responses = [await task for task in over_kafka]
        await first

    assert [answer["outputs"][0]["data"] for answer in answers] == [[0.0], [2.0], [4.0], [6.0]]
    assert [float(each.outputs["y"][0, 0]) for each in responses] == [8.0, 10.0, 12.0, 14.0]
    sizes = {answer["parameters"]["batch_size"] for answer in answers}
    assert sizes == {each.parameters["batch_size"] for each in responses} == {8}


async def test_expired_http_request_is_answered_in_time_and_not_run(gated: Path) -> None:
    """A request whose time passes while its model is busy is a 504, and never runs."""
    async with gateway_of(gated) as served, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.infer("gated", number(0)))
        await eventually(BEGUN.is_set)
        by_header = await served.infer("gated", number(1), headers={"X-Timeout-Ms": "50"})
        by_parameter = await served.infer("gated", {**number(2), "parameters": {"timeout": 50_000}})
        GATE.set()
        assert (await first).status == 200
        await eventually(lambda: served.ended("DEADLINE_EXCEEDED") == 2)

    assert (by_header.status, by_parameter.status) == (504, 504)
    assert by_header.json["error_details"]["code"] == "DEADLINE_EXCEEDED"
    assert served.ended("ok") == 1


async def test_time_that_passes_while_request_is_decoded_counts(repository: Path) -> None:
    """At both doors: a request whose time is over by then is not written to the log."""
    raw = np.ones(64, "<f4").tobytes()
    message = pixels(raw_input_contents=[raw], parameters={"timeout": {"int64_param": 1}})
    body = msgspec.json.encode({"inputs": [PIXELS], "parameters": {"timeout": 1}})
    async with caller_of(repository) as (served, caller):
        answer = await served.post("/v2/models/digits/infer", body)
        call = caller.infer(message)
        status, details = await call.code(), await call.details()
        tenants = await served.tenants()  # those of all requests on the log

    assert (answer.status, status) == (504, grpc.StatusCode.DEADLINE_EXCEEDED)
    for text in (answer.json["error"], details):
        assert text.startswith("no answer within 1e-06 s: it was not sent, since reading it took")
    assert not tenants


async def test_request_of_disconnected_caller_is_cancelled(gated: Path) -> None:
    """The stages answer it with CANCELLED, and the door counts a caller that had gone."""
    async with gateway_of(gated) as served, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.infer("gated", number(0)))
        await eventually(BEGUN.is_set)
        second = tasks.create_task(served.infer("gated", number(1)))
        await eventually(lambda: served.waiting() == 1)
        second.cancel()
        await eventually(lambda: served.ended("CANCELLED") == 1)
        GATE.set()
        assert (await first).status == 200

    assert served.counted(499) == 1
    assert served.doors.snapshot().late_answers == 1


async def test_draining_gateway_answers_all_sent_requests(repository: Path) -> None:
    """Each connection's last answer says that it is the last; no request is lost or reset."""
    answered: list[int] = []

    async def ask(served: Served, http: ClientSession) -> None:
        closing = False
        while not closing:
            async with http.post(
                f"http://{served.url}/v2/models/digits/infer", json={"inputs": [PIXELS]}
            ) as response:
                closing = response.headers.get("Connection") == "close"
                answered.append(response.status)

    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(ClientSession()) for _ in range(8)]
        async with gateway_of(repository) as served:
            callers = [tasks.create_task(ask(served, http)) for http in sessions]
            await eventually(lambda: len(answered) >= 50)
        await asyncio.gather(*callers)

    assert set(answered) == {200}
    assert len(answered) == served.counted(200)


async def test_draining_gateway_is_not_ready_while_it_still_listens(gated: Path) -> None:
    """Readiness ends first: while a request is answered, a balancer can see that."""
    async with asyncio.TaskGroup() as tasks, ClientSession() as http:
        async with gateway_of(gated, drain_notice_s=0.5) as served:
            url = f"http://{served.url}/v2"
            last = tasks.create_task(ask_once(http, f"{url}/models/gated/infer", number(1)))
            await eventually(lambda: served.doors.snapshot().requests == 1)
            async with http.get(f"{url}/health/ready") as before:
                assert (before.status, await before.json()) == (200, {"ready": True})
            during = tasks.create_task(first_refusal(http, f"{url}/health/ready"))
        assert await during == (503, {"ready": False}, "close")
        assert await last == 200


async def test_caller_that_waits_at_end_of_drain_is_told_why(repository: Path) -> None:
    """Its connection is not just closed: the answer says that the gateway stops."""
    async with asyncio.TaskGroup() as tasks, ClientSession() as http:
        async with gateway_of(
            repository, stages=(), sections={"limits": {"drain_timeout_s": 0.1}}
        ) as served:
            url = f"http://{served.url}/v2/models/digits/infer"
            waiting = tasks.create_task(http.post(url, json={"inputs": [PIXELS]}))
            await eventually(lambda: served.doors.snapshot().requests == 1)
        answer = await waiting
        body = await answer.json()

    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert body["error"] == "gateway: it stops, and waits for no more answers"
    assert served.counted(503) == 1


async def ask_once(http: ClientSession, url: str, body: object) -> int:
    """Send a request, and return the status of its answer."""
    async with http.post(url, json=body) as response:
        return response.status


async def first_refusal(http: ClientSession, url: str) -> tuple[int, object, str | None]:
    """Ask until the answer is not 200; return it, and let the gated model go on."""
    while True:
        async with http.get(url) as response:
            if response.status != 200:
                GATE.set()
                return response.status, await response.json(), response.headers.get("Connection")


async def test_full_gateway_refuses_with_retry_after(gated: Path) -> None:
    """Over its limit of requests a gateway answers 503 at once, with Retry-After."""
    async with gateway_of(gated, max_in_flight=1) as served, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.infer("gated", number(0)))
        await eventually(lambda: served.doors.snapshot().requests == 1)
        refused = await served.infer("gated", number(1))
        GATE.set()
        assert (await first).status == 200

    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json["error_details"] == {"code": "UNAVAILABLE", "retriable": True}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_in_flight": 1}, "requests"), ({"max_in_flight_bytes": MIB}, "bytes")],
)
async def test_full_gateway_shows_limit_that_refused(
    gated: Path, limits: dict[str, Any], reason: str
) -> None:
    """The metrics have the limits beside what is in use, and say which one was reached."""
    async with gateway_of(gated, **limits) as served, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.infer("gated", number(0)))
        await eventually(lambda: served.doors.snapshot().requests == 1)
        refused = await served.post("/v2/models/gated/infer", b" " * MIB)
        shown = served.pipeline.metrics.registry.get_sample_value
        GATE.set()
        await first

    assert refused.status == 503
    assert shown("headrace_gateway_full_requests_total", {"reason": reason}) == 1
    assert shown("headrace_gateway_in_flight_limit_requests") == limits.get("max_in_flight", 1024)


@pytest.mark.parametrize("fault", ["forbid", "delete"])
async def test_topic_that_takes_no_requests_is_no_fault_of_their_callers(
    repository: Path, fault: str
) -> None:
    """Rights that were revoked and a deleted topic are for the operator: 500, and in the log."""
    async with gateway_of(repository, stages=(Stage.RESPONDER,)) as served:
        assert isinstance(served.log, MemoryLog)
        getattr(served.log.faults.topics, fault)(served.settings.topic(Topic.REQUESTS))
        with capture_logs() as logged:
            refused = await served.post("/v2/models/digits/infer", BODY)

    assert (refused.status, refused.json["error_details"]["code"]) == (500, "INTERNAL")
    assert [each["event"] for each in logged] == [Event.GATEWAY_FAILED]


async def test_gateway_describes_models_by_open_inference_protocol(repository: Path) -> None:
    """Metadata and configuration have the protocol's and Triton's names."""
    async with gateway_of(repository) as served:
        assert (await served.get("/v2/health/live")).json == {"live": True}
        assert (await served.get("/v2/models")).json == {"models": ["digits"]}
        ready = await served.get("/v2/models/digits/ready")
        metadata = (await served.get("/v2/models/digits/versions/1")).json
        config = (await served.get("/v2/models/digits/config")).json

    assert ready.json == {"name": "digits", "ready": True}
    assert metadata["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata["versions"] == ["1"]
    assert config["input"] == [{"name": "pixels", "data_type": "TYPE_FP32", "dims": [64]}]
    assert config["max_batch_size"] == 32


async def test_gateway_beside_responder_alone_describes_models(repository: Path) -> None:
    """The responder needs none, but the gateway does."""
    async with gateway_of(repository, stages=(Stage.RESPONDER,)) as served:
        assert (await served.get("/v2/models")).json == {"models": ["digits"]}


async def test_index_shows_ready_versions_and_faults(repository: Path) -> None:
    """A version that cannot be loaded is listed with its fault, unless only ready ones are."""
    version = repository / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"no model")
    async with gateway_of(repository) as served:
        everything = (await served.post("/v2/repository/index", b"")).json
        ready = (await served.post("/v2/repository/index", b'{"ready": true}')).json
        refused = await served.post("/v2/repository/index", b'{"ready": 1}')

    (broken, digits_) = everything
    assert (broken["name"], broken["version"], broken["state"]) == ("broken", "1", "UNAVAILABLE")
    assert broken["reason"]
    assert ready == [digits_]
    assert digits_ == {"name": "digits", "version": "1", "state": "READY", "reason": ""}
    assert (refused.status, refused.json["error_details"]["code"]) == (400, "INVALID_REQUEST")


async def test_index_lists_version_once_whose_new_files_cannot_be_loaded(repository: Path) -> None:
    """It serves as before, and the reason says what is wrong with its files."""
    async with gateway_of(repository) as served:
        (repository / "digits" / "1" / "model.onnx").write_bytes(b"no model")
        await served.pipeline.models.reload()
        index = (await served.post("/v2/repository/index", b"")).json

    (entry,) = index
    assert (entry["version"], entry["state"]) == ("1", "READY")
    assert "model.onnx: expected an ONNX model" in entry["reason"]


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_loading_is_refused_by_name(repository: Path, action: str) -> None:
    """The caller reads that the repository decides which models there are."""
    async with gateway_of(repository) as served:
        refused = await served.post(f"/v2/repository/models/digits/{action}", b"{}")

    assert refused.status == 501
    assert refused.json["error"].startswith(f"{action} is not supported: expected models.mode = ")
    assert refused.json["error_details"]["code"] == "UNSUPPORTED"


async def test_gateway_alone_answers_about_models_and_waits_for_stages(
    repository: Path,
) -> None:
    """Without stages it is ready, and a request that nothing answers is a 504."""
    async with gateway_of(repository, stages=()) as served:
        assert (await served.get("/v2/models/digits/ready")).status == 200
        answer = await served.infer("digits", {"inputs": [PIXELS]}, headers={"X-Timeout-Ms": "20"})

    assert answer.status == 504


JSON_BYTES = "Inference-Header-Content-Length"
BAD_REQUESTS = {
    "no JSON": ({}, b"{", 400, "value: expected"),
    "empty": ({}, b"", 400, "value: expected"),
    "unknown model": ({}, ("letters", {"inputs": [PIXELS]}), 404, "letters"),
    "unknown version": ({}, ("digits/versions/7", {"inputs": [PIXELS]}), 404, "7"),
    "wrong shape": ({}, {"inputs": [{**PIXELS, "shape": [1, 63]}]}, 400, "63 elements"),
    "unknown input": ({}, {"inputs": [{**PIXELS, "name": "pixel"}]}, 400, "pixel"),
    "unknown output": ({}, {"inputs": [PIXELS], "outputs": [{"name": "z"}]}, 400, "z"),
    "sequence": ({}, {"inputs": [PIXELS], "parameters": {"sequence_id": 1}}, 400, "sequence_id"),
    "JSON size too large": ({JSON_BYTES: "999"}, b"{}", 400, JSON_BYTES),
    "JSON size no number": ({JSON_BYTES: "x"}, b"{}", 400, JSON_BYTES),
    "JSON size negative": ({JSON_BYTES: "-1"}, b"{}", 400, JSON_BYTES),
    "bare tensor too short": ({JSON_BYTES: "0"}, b"123", 400, "256 bytes"),
    "timeout no number": ({"X-Timeout-Ms": "soon"}, {"inputs": [PIXELS]}, 400, "X-Timeout-Ms"),
    "timeout zero": ({"X-Timeout-Ms": "0"}, {"inputs": [PIXELS]}, 400, "X-Timeout-Ms"),
    "priority": ({"X-Priority": "101"}, {"inputs": [PIXELS]}, 400, "X-Priority"),
    "unknown coding": ({"Content-Encoding": "lz4"}, b"{}", 415, "gzip"),
    "no gzip": ({"Content-Encoding": "gzip"}, b"{}", 400, "gzip"),
    "cut gzip": ({"Content-Encoding": "gzip"}, gzip.compress(b"{}")[:-4], 400, "end early"),
    "two gzips": ({"Content-Encoding": "gzip"}, gzip.compress(b"{}") * 2, 400, "other bytes"),
    "no zstd": ({"Content-Encoding": "zstd"}, b"{}", 400, "zstd"),
    "cut zstd": ({"Content-Encoding": "zstd"}, compress_zstd(b"{}")[:-1], 400, "zstd"),
    "bytes after zstd": ({"Content-Encoding": "zstd"}, compress_zstd(b"{}") + b"{}", 400, "zstd"),
    "zstd bomb": ({"Content-Encoding": "zstd"}, compress_zstd(bytes(10**8)), 413, "65536"),
    "too large": ({}, b" " * 70_000, 413, "65536"),
    "bomb": ({"Content-Encoding": "gzip"}, gzip.compress(bytes(10**7)), 413, "65536"),
    "no transform": ({"Content-Type": "image/jpeg"}, b"x", 400, "image/jpeg"),
    "odd content type": ({"Content-Type": "image/\xff"}, b"x", 400, "Content-Type"),
    "other host": ({"Host": "example.com"}, {"inputs": [PIXELS]}, 421, "Host"),
}


async def test_bad_http_request_gets_status_and_reason(repository: Path) -> None:
    """Each has its status and a sentence that names the fault, and the door goes on."""
    async with gateway_of(repository, max_body_bytes=65536) as served:
        for case, (headers, body, status, text) in BAD_REQUESTS.items():
            model, content = body if isinstance(body, tuple) else ("digits", body)
            response = await served.post(
                f"/v2/models/{model}/infer",
                content if isinstance(content, bytes) else msgspec.json.encode(content),
                headers={"Content-Type": "application/json", **headers},
            )
            told = response.json["error"]
            assert (response.status, text in told) == (status, True), f"{case}: {told}"
        missing = await served.get("/v2/nothing")
        assert (missing.status, list(missing.json)) == (404, ["error"])
        assert (await served.infer("digits", {"inputs": [PIXELS]})).status == 200


async def test_http_payload_goes_to_transform_of_model(tmp_path: Path) -> None:
    """A text with its own content type is the input that `model.toml` makes of it."""
    add_version(tmp_path, "texts", 1, identity("BYTES", ("batch", 1)), 'transform = "text"')
    async with gateway_of(tmp_path) as served:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        response = await served.post("/v2/models/texts/infer", "né".encode(), headers=headers)

    assert response.status == 200, response.body
    assert response.json["outputs"][0]["data"] == ["né"]


async def test_http_bodies_over_common_limit_are_refused(gated: Path) -> None:
    """A body that does not fit beside those that are held is refused, and is then let go."""
    async with gateway_of(gated, max_in_flight_bytes=2**20) as served, asyncio.TaskGroup() as tasks:
        padding = b" " * 600_000
        body = msgspec.json.encode(number(0)) + padding
        first = tasks.create_task(served.post("/v2/models/gated/infer", body))
        await eventually(lambda: served.doors.snapshot().size_bytes == len(body))
        refused = await served.post("/v2/models/gated/infer", body)
        held_bytes = served.doors.snapshot().size_bytes
        GATE.set()
        assert (await first).status == 200

    assert (refused.status, refused.json["error_details"]["code"]) == (503, "UNAVAILABLE")
    assert held_bytes == len(body)
    assert served.doors.snapshot().size_bytes == 0


async def test_idle_http_connections_beyond_limit_are_replaced(repository: Path) -> None:
    """Requests on further connections are answered, and the metrics say what was closed."""
    async with gateway_of(repository, max_connections=2) as served, AsyncExitStack() as stack:
        for _ in range(4):
            _, writer = await asyncio.open_connection(*served.url.split(":"))
            stack.callback(writer.close)
        status = (await served.get("/v2/health/live")).status
        state = served.doors.snapshot()

    assert (status, state.connections, state.connections_closed) == (200, 2, 3)


HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\n"
BROKEN_BODIES = {
    "never whole": b"Content-Length: 100\r\n\r\n{",
    "never a chunk": b"Transfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("sent", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
async def test_incomplete_http_body_ends_connection(repository: Path, sent: bytes) -> None:
    """The caller is told why within the time for a body, and nothing of it is held any more."""
    async with gateway_of(repository, body_timeout_s=0.05) as served:
        reader, writer = await asyncio.open_connection(*served.url.split(":"))
        writer.write(HEAD + sent)
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in answer
    found = served.doors.snapshot()
    assert (found.requests, found.size_bytes) == (0, 0)


async def test_trace_context_of_http_caller_reaches_request(repository: Path) -> None:
    """`traceparent` is written to the request record unchanged, and so is in the answer's."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    async with gateway_of(repository) as served:
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            await served.infer("digits", {"inputs": [PIXELS]}, headers={"traceparent": parent})
            (record,) = await read(reader, 1)

    assert ("traceparent", parent.encode()) in record.headers


async def test_tracestate_in_several_headers_reaches_request_whole(repository: Path) -> None:
    """Each proxy on the way may add one; they are one list (W3C Trace Context, section 3.3.1)."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    given = [("traceparent", parent), ("tracestate", "a=1"), ("tracestate", "b=2")]
    async with gateway_of(repository) as served:
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            await served.infer("digits", {"inputs": [PIXELS]}, headers=given)
            (record,) = await read(reader, 1)

    assert ("tracestate", b"a=1, b=2") in record.headers


async def test_only_named_headers_of_http_caller_reach_request(repository: Path) -> None:
    """The record has those of `gateway.forward_headers`, joined if a name comes twice, alone."""
    given = [("X-Request-Id", "seven"), ("Baggage", "a=1"), ("Baggage", "b=2"), ("X-Other", "0")]
    names = ["x-request-id", "baggage", "x-missing"]
    async with gateway_of(repository, forward_headers=names) as served:
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            await served.infer("digits", {"inputs": [PIXELS]}, headers=given)
            (record,) = await read(reader, 1)
        long = await served.infer("digits", {"inputs": [PIXELS]}, headers={"Baggage": "x" * 513})

    assert ("x-request-id", b"seven") in record.headers
    assert ("baggage", b"a=1, b=2") in record.headers
    assert not {"x-other", "x-missing"} & {name for name, _ in record.headers}
    assert long.status == 400
    assert long.json["error"].endswith("header baggage: expected at most 512 bytes, got 513")


@pytest.mark.parametrize(
    "name",
    [
        "authorization", "x-tenant", "x-claim", "content-type", "X-Upper", "kafka_replyTopic",
        "kafka_replytopic", "traceparent", "accept", "accept-encoding",
    ],
)  # fmt: skip
async def test_header_that_is_not_callers_to_forward_is_refused(
    repository: Path, name: str
) -> None:
    """Neither credentials nor Headrace's own headers; names are in lower case."""
    with pytest.raises(ConfigurationError, match=r"gateway\.forward_headers"):
        async with gateway_of(repository, forward_headers=[name]):
            pass


async def test_every_datatype_survives_http_round_trip(tmp_path: Path) -> None:
    """Binary rows of zeros and ones, or of texts, pass models that change nothing."""
    for datatype in DATATYPES:
        add_version(tmp_path, datatype, 1, identity(datatype), "probe = false")
    async with gateway_of(tmp_path) as served:
        for datatype, known in DATATYPES.items():
            values = [b"", "é".encode(), b"a", b"b"] if datatype == "BYTES" else [0, 1, 1, 0]
            content = from_array("x", np.array(values, known.dtype).reshape(2, 2)).data
            tensor = {
                "name": "x",
                "datatype": datatype,
                "shape": [2, 2],
                "parameters": {"binary_data_size": len(content)},
            }
            parameters = {"binary_data_output": True}
            head = msgspec.json.encode({"inputs": [tensor], "parameters": parameters})
            response = await served.post(
                f"/v2/models/{datatype}/infer",
                head + content,
                headers={JSON_BYTES: str(len(head))},
            )
            assert response.status == 200, response.body
            (output,) = response.json["outputs"]
            assert (output["datatype"], output["shape"]) == (datatype, [2, 2])
            assert response.tensors == content


@pytest.mark.parametrize("page_name", ["README.md", "docs/http.md"])
async def test_curl_example_of_page_prints_answer(page_name: str) -> None:
    """The page's command gets the digit of its image."""
    page = (ROOT / page_name).read_text(encoding="utf-8")
    (curl,) = re.findall(r"^```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    async with gateway_of(ROOT / "headrace" / "tools" / "demo" / "models") as served:
        shell = await asyncio.create_subprocess_exec(
            "bash", "-c", curl.replace("127.0.0.1:8000", served.url), stdout=PIPE
        )
        answer, _ = await shell.communicate()

    outputs = {each["name"]: each["data"] for each in msgspec.json.decode(answer)["outputs"]}
    assert outputs["label"] == [0]
