"""Requests of a load: from arrays, a file, a capture, or a model's signature."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.errors import ConfigurationError
from headrace.models.backends.warmup import make_sample_batch
from headrace.models.version import ModelVersion
from headrace.protocol.codec import encode_request
from headrace.protocol.headers import JSON, MSGPACK, HeaderName
from headrace.tools.bench.load import LoadRequest
from headrace.tools.replay.jobs import open_recording
from headrace.tools.replay.recording import Selection, record_bytes

MAX_CAPTURED = 10_000
MAX_CAPTURED_BYTES = 256 * 1024 * 1024
"""Most captured requests that are sent in rotation, in number and in bytes."""

_LEFT_OUT = frozenset(
    {
        HeaderName.CORRELATION_ID,
        HeaderName.REPLY_PARTITION,
        HeaderName.REPLY_TOPIC,
        HeaderName.TRACEPARENT,
        HeaderName.TRACESTATE,
        HeaderName.DEADLINE_MS,
    }
)
"""Headers of a captured request that apply only to its own time and caller."""


def from_arrays(
    model: str, version: str | None, inputs: Mapping[str, NDArray[Any]], *, as_json: bool
) -> LoadRequest:
    """Return a request with these inputs. Raises `Rejected`, see `encode_request`."""
    content_type = JSON if as_json else MSGPACK
    value = encode_request(content_type, model, inputs, version=version)
    return LoadRequest(value, ((HeaderName.CONTENT_TYPE, content_type.encode()),))


def from_file(model: str, version: str | None, content: bytes, content_type: str) -> LoadRequest:
    """Return a payload for the model's transform."""
    named = f"{model}/{version}" if version else model
    return LoadRequest(
        content,
        ((HeaderName.CONTENT_TYPE, content_type.encode()), (HeaderName.MODEL, named.encode())),
    )


def made_up(known: ModelVersion, version: str | None, *, as_json: bool = False) -> LoadRequest:
    """Return one row of the model's warm-up sample, or a generated one.

    The request names a `version` only if one is given: `known` is this machine's version, and the
    answering processes may serve another one by now.

    Raises:
        ConfigurationError: the sample does not fit the signature.
    """
    inputs = make_sample_batch(known.signature, known.config, known.directory, 1)
    return from_arrays(known.name, version, inputs, as_json=as_json)


async def from_capture(path: Path, most_bytes: int = MAX_CAPTURED_BYTES) -> list[LoadRequest]:
    """Return the first requests of a capture file, without headers that apply only to their time.

    They are held in memory: the last one is that which reaches `most_bytes`.

    Raises:
        ConfigurationError: the file is missing, is not a capture, or contains no requests.
        CaptureError: it is damaged.
    """
    found: list[LoadRequest] = []
    size = 0
    async with (
        open_recording(None, path, Selection(limit=MAX_CAPTURED)) as recording,
        aclosing(recording.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                if record.value is None or size >= most_bytes:
                    continue
                headers = tuple(
                    (name, value)
                    for name, value in record.headers
                    if value is not None and name not in _LEFT_OUT
                )
                found.append(LoadRequest(record.value, headers, record.key))
                size += record_bytes(record)
            if size >= most_bytes:
                break
    if not found:
        raise ConfigurationError(f"{path}: expected requests, got none")
    return found
