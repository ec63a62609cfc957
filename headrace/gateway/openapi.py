"""OpenAPI 3.1 of the door for HTTP, from the types of its bodies.

`python -m headrace.gateway.openapi` writes `schemas/openapi.json`; with `--check` it fails if that
file differs. Specification: https://spec.openapis.org/oas/v3.1.1.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from headrace import __version__
from headrace.gateway.bodies import (
    AllStatistics,
    Done,
    ErrorBody,
    Live,
    ModelNames,
    ModelReady,
    ModelStatus,
    Ready,
    RegisterRequest,
    ServerMetadata,
)
from headrace.gateway.codec import InferRequest, InferResponse
from headrace.gateway.predict import PredictRequest, PredictResponse
from headrace.gateway.shared_memory import RegionStatus
from headrace.models.index import ChangeOptions, IndexEntry, IndexOptions
from headrace.models.metadata import ModelConfiguration, ModelMetadata
from headrace.protocol.headers import JSON, MAX_PRIORITY, OCTETS

PATH = Path("schemas/openapi.json")

_INTEGER = {"type": "integer", "minimum": 0}
_JSON_BYTES = {
    "description": "Size of the JSON if tensors follow it; 0 if the body is a bare tensor.",
    "schema": _INTEGER,
}
_HEADERS: dict[str, dict[str, Any]] = {
    "Inference-Header-Content-Length": _JSON_BYTES,
    "X-Timeout-Ms": {
        "description": "Time for the answer.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "X-Priority": {
        "description": "A larger one goes first.",
        "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    },
    "traceparent": {"description": "W3C Trace Context.", "schema": {"type": "string"}},
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until the next try.", "schema": _INTEGER}}
_SECURITY_SCHEMES = {
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "A key of `gateway.keys_file`.",
    },
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of `gateway.keys_file`, or a token of the identity provider.",
    },
    "certificate": {
        "type": "mutualTLS",
        "description": "A client certificate that `gateway.keys_file` names.",
    },
}
_OWN_ANSWER = {
    "description": "What a model with `[answer.classes]` or `[answer.boxes]` answers to a payload, "
    "where `Accept` names JSON: one object for each row",
    "type": "array",
    "items": {"type": "object"},
}
_TAGS = ("inference", "models", "health", "repository", "v1", "shared memory")


class Operation(NamedTuple):
    """Description of one method and path.

    Attributes:
        tag: one of `_TAGS`.
        answer: type of the JSON with the status 200; None if there is always an error.
        request: type of the JSON of the body; None without a body.
        binary: whether both bodies may be the protocol's binary form, and the request's a payload.
    """

    method: str
    path: str
    tag: str
    summary: str
    answer: Any
    request: Any = None
    binary: bool = False

    @property
    def name(self) -> str:
        """The `operationId`."""
        return "_".join([self.method, *re.findall(r"\w+", self.path)])


def _operations() -> list[Operation]:
    operations = [
        Operation("get", "/v2", "health", "The server and its extensions", ServerMetadata),
        Operation("get", "/v2/health/live", "health", "Whether the process is live", Live),
        Operation("get", "/v2/health/ready", "health", "Whether it takes requests", Ready),
        Operation("get", "/v2/models", "models", "Names of the ready models", ModelNames),
        Operation("get", "/v2/models/stats", "models", "Statistics of all models", AllStatistics),
        Operation(
            "post",
            "/v2/repository/index",
            "repository",
            "Versions of all models, with their states and faults",
            list[IndexEntry],
            IndexOptions,
        ),
        Operation("get", "/v1/models", "v1", "Names of the ready models", ModelNames),
    ]
    for action, summary in (
        ("load", "Load a model as the repository and the parameters configure it"),
        ("unload", "Unload a model with all its versions"),
    ):
        path = f"/v2/repository/models/{{model}}/{action}"
        operations.append(Operation("post", path, "repository", summary, Done, ChangeOptions))
    regions = "/v2/systemsharedmemory"
    for path, which in ((regions, "all regions"), (f"{regions}/region/{{region}}", "a region")):
        status, unregister = f"Status of {which}", f"Unregister {which}"
        operations += [
            Operation("get", f"{path}/status", "shared memory", status, list[RegionStatus]),
            Operation("post", f"{path}/unregister", "shared memory", unregister, Done),
        ]
    operations.append(
        Operation(
            "post", f"{path}/register", "shared memory", "Register a region", Done, RegisterRequest
        )
    )
    for each in operations[-5:]:
        path = each.path.replace("system", "cuda")
        operations.append(Operation(each.method, path, each.tag, "Not supported: CUDA", None))
    for model in ("{model}", "{model}/versions/{version}"):
        path, older = f"/v2/models/{model}", f"/v1/models/{model}"
        operations += [
            Operation("get", path, "models", "Metadata of a model", ModelMetadata),
            Operation("get", f"{path}/ready", "models", "Whether a model is ready", ModelReady),
            Operation(
                "get", f"{path}/config", "models", "Triton's configuration", ModelConfiguration
            ),
            Operation("get", f"{path}/stats", "models", "Statistics of a model", AllStatistics),
            Operation(
                "post",
                f"{path}/infer",
                "inference",
                "Inference",
                InferResponse,
                InferRequest,
                binary=True,
            ),
            Operation("get", older, "v1", "Whether a model is ready", ModelStatus),
            Operation(
                "post", f"{older}:predict", "v1", "Inference", PredictResponse, PredictRequest
            ),
        ]
    return operations


def describe() -> dict[str, Any]:
    """Return the OpenAPI document."""
    operations = _operations()
    types = [ErrorBody]
    for operation in operations:
        types += [each for each in (operation.answer, operation.request) if each is not None]
    types = list(dict.fromkeys(types))
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(types, ref_template=template)
    found = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _describe_operation(each, found)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Headrace: inference over HTTP",
            "version": __version__,
            "description": "The Open Inference Protocol v2 with Triton's extensions, and "
            "TensorFlow Serving's :predict. docs/http.md explains it.",
        },
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "tags": [{"name": tag} for tag in _TAGS],
        "paths": paths,
        "components": {
            "schemas": _one_line(components),
            "securitySchemes": _SECURITY_SCHEMES,
        },
        "security": [{}, *({name: []} for name in _SECURITY_SCHEMES)],
    }


def _describe_operation(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    error = {"description": "An error", "content": _json(schemas[ErrorBody])}
    answers: dict[str, Any] = {
        "default": error,
        "401": error | {"description": "The caller is not known"},
        "403": error | {"description": "The caller may not do this"},
    }
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": answers,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    if operation.request is not None:
        body: dict[str, Any] = {"content": _json(schemas[operation.request])}
        described["requestBody"] = body
        if operation.tag != "repository":
            body["required"] = True
    if operation.tag in ("inference", "v1") and operation.request is not None:
        names = [name for name in _HEADERS if operation.binary or name[0] != "I"]
        parameters += [{"name": name, "in": "header", **_HEADERS[name]} for name in names]
        answers["429"] = error | {
            "description": "Too many requests, of this caller or of all",
            "headers": _RETRY_AFTER,
        }
        answers["406"] = error | {"description": "The caller accepts no content type of the answer"}
    if operation.answer is not None:
        answers["200"] = {"description": "OK", "content": _json(schemas[operation.answer])}
    if operation.answer in (Live, Ready):
        answers["503"] = answers["200"] | {"description": "Not now"}
    if operation.binary:
        described["requestBody"]["content"] |= {OCTETS: {}, "*/*": {}}
        either = {"anyOf": [schemas[operation.answer], _OWN_ANSWER]}
        answers["200"]["content"] = {**_json(either), OCTETS: {}, "*/*": {}}
        answers["200"]["headers"] = {"Inference-Header-Content-Length": _JSON_BYTES}
    if parameters:
        described["parameters"] = parameters
    return described


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _one_line(node: Any) -> Any:
    """Return the schemas with their descriptions (docstrings) each on one line."""
    if isinstance(node, dict):
        described = {key: _one_line(value) for key, value in node.items()}
        if isinstance(described.get("description"), str):
            described["description"] = " ".join(described["description"].split())
        return described
    return [_one_line(each) for each in node] if isinstance(node, list) else node


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail if the file differs.")
def main(*, check: bool) -> None:
    """Generate `schemas/openapi.json` from the Python types."""
    text = json.dumps(describe(), indent=2, ensure_ascii=False) + "\n"
    if not check:
        PATH.write_text(text, encoding="utf-8")
    elif not PATH.is_file() or PATH.read_text(encoding="utf-8") != text:
        raise click.ClickException(f"{PATH}: stale; run `make schemas`")


if __name__ == "__main__":
    main()
