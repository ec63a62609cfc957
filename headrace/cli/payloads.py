"""Payloads in files: their content types, and the inputs that a version makes of them."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from headrace.config import Settings
from headrace.models.inputs.avro import CONTAINER
from headrace.models.inputs.binding import Bound
from headrace.models.inputs.records import AVRO_BINARY, AVRO_CONTAINER
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Tensor

_CONTENT_TYPES = {
    ".avro": AVRO_BINARY,
    ".binpb": "application/x-protobuf",
    ".flac": "audio/flac",
    ".jsonl": "application/x-ndjson",
    ".ndjson": "application/x-ndjson",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".pb": "application/x-protobuf",
}
"""Content types by suffix that Python does not know."""


def guess_content_type(name: str, content: bytes = b"") -> str:
    """Return the content type of a file by its name; for `.avro` by its first bytes as well."""
    known = _CONTENT_TYPES.get(Path(name).suffix.lower())
    if known == AVRO_BINARY and content.startswith(CONTAINER):
        return AVRO_CONTAINER
    return known or mimetypes.guess_type(name)[0] or "application/octet-stream"


async def make_inputs(
    settings: Settings, model: str, version: str | None, payload: bytes, content_type: str
) -> tuple[ModelVersion, tuple[Tensor, ...]]:
    """Return a version of the repository and the checked inputs that it makes of a payload.

    Raises:
        ConfigurationError: there is no repository.
        Rejected: there is no such version, or it refuses the payload.
        Retriable: the schema registry is unavailable.
    """
    models = Models(settings)
    models.open()
    found = models.catalog.lookup(model, version)
    return found, (await bind_payload(found, payload, content_type)).tensors


async def bind_payload(version: ModelVersion, payload: bytes, content_type: str) -> Bound:
    """Return the checked inputs that a version makes of a payload.

    Raises:
        Rejected: the version refuses the payload.
        Retriable: the schema registry is unavailable.
    """
    if version.records is not None and version.records.framed is not None:
        await version.records.framed.fetch_alone(payload)
    return version.bind(version.transform(payload, content_type))
