"""JSON Schemas of the values of records."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.protocol.codec.requests import JsonInferenceRequest
from headrace.protocol.codec.responses import JsonInferenceResponse
from headrace.protocol.control import ControlRecord
from headrace.protocol.events import ExecutorEvent
from headrace.protocol.messages import (
    BatchRecord,
    ChunkedBatchRecord,
    ErrorResponse,
    InferenceRequest,
    InferenceResponse,
    ItemChunkRecord,
    ItemRecord,
    ResultChunkRecord,
    ResultRecord,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "inference-request": InferenceRequest,
    "inference-request-json": JsonInferenceRequest,
    "inference-response": InferenceResponse,
    "inference-response-json": JsonInferenceResponse,
    "error-response": ErrorResponse,
    "item-record": ItemRecord,
    "item-chunk-record": ItemChunkRecord,
    "batch-record": BatchRecord,
    "chunked-batch-record": ChunkedBatchRecord,
    "result-record": ResultRecord,
    "result-chunk-record": ResultChunkRecord,
    "event-record": ExecutorEvent,
    "control-record": ControlRecord,
}
"""Types by the names of their files, without `.schema.json`."""


def schema(name: str) -> dict[str, Any]:
    """Return the schema of one type. JSON Schema has no bytes: MessagePack's `bin` is described
    as a base64 string (`contentEncoding`).
    """
    generated = msgspec.json.schema(SCHEMAS[name])
    return {"$schema": DIALECT, "$id": f"{name}.schema.json", **_one_line(generated)}


def schema_files() -> dict[str, str]:
    """Return the texts of all schemas by file name."""
    return {
        f"{name}.schema.json": json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n"
        for name in SCHEMAS
    }


def _one_line(node: Any) -> Any:
    """Return the schema with its descriptions (docstrings) each on one line."""
    if isinstance(node, dict):
        return {
            key: " ".join(value.split())
            if key == "description" and isinstance(value, str)
            else _one_line(value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_one_line(value) for value in node]
    return node
