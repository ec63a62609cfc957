"""The description in OpenAPI against the door: its routes, and what it answers."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import HttpDoor
from headrace.gateway.openapi import describe
from headrace.models.registry import Models
from headrace.runtime.log_factory import open_log
from headrace.telemetry.health import Health
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from tests.support.gateways import Reply, Served, gateway_of
from tests.support.models import add_version, digits

DOCUMENT = describe()
PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}
BODIES: dict[str, dict[str, Any]] = {
    "infer": {"id": "1", "inputs": [PIXELS]},
    ":predict": {"instances": [[1.0] * 64]},
    "index": {"ready": True},
}
"""Bodies by the end of their paths."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with `digits`."""
    add_version(tmp_path, "digits", 1, digits(), '[output_labels]\nscores = "labels.txt"\n')
    (tmp_path / "digits" / "labels.txt").write_text("\n".join("0123456789"), encoding="utf-8")
    return tmp_path


def operations() -> list[tuple[str, str]]:
    """The methods and paths that the document describes."""
    return [(method, path) for path, item in DOCUMENT["paths"].items() for method in item]


def status_of(path: str) -> int:
    """Return the status of an operation when no region is registered."""
    if re.search(r"load$|cudasharedmemory", path):
        return 501
    return 400 if re.search(r"region.*/(status|register)$", path) else 200


def schema_of(method: str, path: str, status: int) -> dict[str, Any]:
    """Return the schema of the JSON of an answer."""
    answers = DOCUMENT["paths"][path][method]["responses"]
    answer = answers.get(str(status), answers["default"])
    schema: dict[str, Any] = answer["content"]["application/json"]["schema"]
    return {**schema, "components": DOCUMENT["components"]}


async def call(served: Served, method: str, path: str) -> Reply:
    """Call an operation about `digits`."""
    filled = path.replace("{model}", "digits").replace("{version}", "1").replace("{region}", "r")
    if method == "get":
        return await served.get(filled)
    (body,) = [body for end, body in BODIES.items() if path.endswith(end)] or [{}]
    async with served.http.post(filled, json=body) as response:
        return Reply(response.status, response.headers, await response.read())


async def test_openapi_describes_every_route_and_no_other(tmp_path: Path) -> None:
    """The document describes each route that the door has, and no route that it does not have."""
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    instruments = Instruments(Metrics(CollectorRegistry()))
    async with open_log(settings) as log:
        gateway = Gateway(settings, log, Models(settings).catalog, Health(), instruments)
        routes = HttpDoor(gateway, 0).routes()

    assert {(route.method.lower(), route.path) for route in routes} == set(operations())


async def test_answers_have_described_schemas(repository: Path) -> None:
    """Each operation is called; some answers are errors, as no shared memory is registered."""
    async with gateway_of(repository, shared_memory="/headrace_") as served:
        for method, path in operations():
            reply = await call(served, method, path)
            schema = schema_of(method, path, reply.status)

            assert reply.status == status_of(path), path
            Draft202012Validator(schema).validate(reply.json)


async def test_errors_have_described_schema(repository: Path) -> None:
    """An error of the stages has its details."""
    async with gateway_of(repository) as served:
        reply = await served.infer("letters", {"inputs": [PIXELS]})

    assert reply.status == 404
    schema = schema_of("post", "/v2/models/{model}/infer", 404)
    Draft202012Validator(schema).validate(reply.json)
    assert reply.json["error_details"]["code"] == "UNKNOWN_MODEL"


async def test_answers_to_unknown_callers_have_described_schemas(
    repository: Path, tmp_path: Path
) -> None:
    """Each operation without a key answers 401, except for the public health of the process."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[callers.known]\nsha256 = "{hashlib.sha256(b"key").hexdigest()}"\n')
    async with gateway_of(repository, keys_file=str(keys)) as served:
        for method, path in operations():
            reply = await call(served, method, path)

            if path.endswith(("/live", "/ready")):
                assert reply.status == 200, path
                continue
            assert reply.status == 401, path
            described = DOCUMENT["paths"][path][method]["responses"]["401"]
            schema = described["content"]["application/json"]["schema"]
            validator = Draft202012Validator({**schema, "components": DOCUMENT["components"]})
            validator.validate(reply.json)


async def test_refusal_of_caller_over_its_limit_is_described(repository: Path) -> None:
    """Its header says when to try again."""
    async with gateway_of(repository, caller_requests_per_second=0.01, caller_burst=1) as served:
        replies = [await served.infer("digits", {"inputs": [PIXELS]}) for _ in range(2)]

    assert [each.status for each in replies] == [200, 429]
    described = DOCUMENT["paths"]["/v2/models/{model}/infer"]["post"]["responses"]["429"]
    assert set(described["headers"]) <= set(replies[1].headers)
    schema = described["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    validator.validate(replies[1].json)
