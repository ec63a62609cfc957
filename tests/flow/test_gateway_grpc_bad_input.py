"""Bad requests at the door for gRPC: each kind gets its status and a sentence."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from headrace.gateway import open_inference_pb2 as messages
from headrace.protocol.tensors import DATATYPES
from tests.support.conditions import eventually
from tests.support.gateways import add_identities
from tests.support.grpc_callers import Caller, caller_of, pixels
from tests.support.models import add_version, digits

Case: TypeAlias = tuple[str, Message | bytes, str, str]
"""Name, request, status, and what the sentence has to name."""
BAD = "INVALID_ARGUMENT"
PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64]}
CONTENTS = {
    "bool_contents": [True] * 64,
    "int_contents": [1] * 64,
    "int64_contents": [1] * 64,
    "uint_contents": [1] * 64,
    "uint64_contents": [1] * 64,
    "fp64_contents": [1.0] * 64,
    "bytes_contents": [b"1"] * 64,
}
"""Contents of other datatypes than FP32."""
SAME_SIZE = ("INT32", "UINT32")
"""Datatypes that only the model tells from FP32."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, END_HEADERS, CANCEL = 1, 3, 4, 4, struct.pack(">I", 8)
"""Types and flags of frames, and the code of an error (RFC 9113, sections 6 and 7)."""
LENGTHS = {
    "nothing": b"",
    "part of a length": b"\1\0\0",
    "one of two": b"\1\0\0\0a",
    "three of two": b"\1\0\0\0a" * 3,
    "length beyond the end": b"\1\0\0\0a\5\0\0\0bb",
    "length of 4 GiB": b"\1\0\0\0a\xff\xff\xff\xffb",
    "no UTF-8": b"\1\0\0\0\xff\1\0\0\0b",
    "a byte more": b"\1\0\0\0a\1\0\0\0b\0",
}
"""Bytes of two texts, which is what the model expects."""


def one(model: str, tensor: dict[str, Any], **fields: Any) -> messages.ModelInferRequest:
    """A request with one input."""
    return messages.ModelInferRequest(model_name=model, inputs=[tensor], **fields)


def shapes() -> Iterator[Case]:
    """Shapes that do not fit the model, the bytes, or anything."""
    told: dict[tuple[int, ...], str] = {
        (): "inputs[0].data: expected",
        (64,): "pixels",
        (1, 63): "inputs[0].data: expected",
        (1, 64, 1): "pixels",
        (1, 1, 64): "pixels",
        (0, 64): "inputs[0].data: expected",
        (1, 0): "inputs[0].data: expected",
        (2, 64): "bytes",
        (-1, 64): "no negative dimension",
        (1, -64): "no negative dimension",
        (-(2**63), 1): "no negative dimension",
        (2**63 - 1, 64): "2^63",
        (2**31, 2**31): "2^63",
        (2**63 - 1, 0): "2^63",
        (1,) * 33: "dimensions",
        (1,) * 1000: "dimensions",
    }
    for shape, text in told.items():
        name = f"shape {list(shape)[:4]} of {len(shape)}"
        yield name, pixels(inputs=[{**PIXELS, "shape": shape}]), BAD, text


def datatypes() -> Iterator[Case]:
    """Datatypes that the model does not have, and names of none."""
    for name in DATATYPES:
        if name != "FP32":
            request = pixels(inputs=[{**PIXELS, "datatype": name}])
            yield f"datatype {name}", request, BAD, "FP32" if name in SAME_SIZE else name
    for name in ("", "fp32", "FP32 ", "TYPE_FP32", "float32", "FP8", "X" * 10_000):
        request = pixels(inputs=[{**PIXELS, "datatype": name}])
        yield f"datatype {name[:12]!r}", request, BAD, "datatype"


def contents() -> Iterator[Case]:
    """Contents of the wrong field, number and range, and raw contents of the wrong length."""
    for field, values in CONTENTS.items():
        tensor = {**PIXELS, "contents": {field: values}}
        yield field, one("digits", tensor), BAD, field
        both = {**PIXELS, "contents": {field: values, "fp32_contents": [1.0] * 64}}
        yield f"{field} and fp32", one("digits", both), BAD, "contents"
    for count in (0, 1, 63, 65, 128):
        tensor = {**PIXELS, "contents": {"fp32_contents": [1.0] * count}}
        yield f"{count} elements", one("digits", tensor), BAD, "64 elements"
    for size in (0, 1, 255, 257, 512):
        yield f"{size} raw bytes", pixels(raw_input_contents=[bytes(size)]), BAD, "256 bytes"
    for count in (2, 3, 100):
        yield f"{count} raw contents", pixels(raw_input_contents=[bytes(256)] * count), BAD, "each"
    for datatype, field, value in (
        ("INT8", "int_contents", 128),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 2**15),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 2**16),
    ):
        tensor = {
            "name": "x",
            "datatype": datatype,
            "shape": [1, 2],
            "contents": {field: [value, 0]},
        }
        yield f"{datatype} of {value}", one(datatype, tensor), BAD, datatype
    for datatype in ("FP16", "BF16"):
        tensor = {
            "name": "x",
            "datatype": datatype,
            "shape": [1, 2],
            "contents": {"fp32_contents": [1.0, 2.0]},
        }
        yield f"typed {datatype}", one(datatype, tensor), BAD, "raw"
    texts = {"name": "x", "datatype": "BYTES", "shape": [1, 2]}
    for name, content in LENGTHS.items():
        yield f"texts: {name}", one("BYTES", texts, raw_input_contents=[content]), BAD, "x"
    truth = {"name": "x", "datatype": "BOOL", "shape": [1, 2]}
    yield "neither true nor false", one("BOOL", truth, raw_input_contents=[b"\1\2"]), BAD, "BOOL"


def names() -> Iterator[Case]:
    """Names of nothing that is there."""
    for model in ("..", "digits/1", "digits\n", "Digits", "digits\0", "%64igits"):
        yield f"model {model!r}", pixels(model_name=model), "NOT_FOUND", "model"
    for version in ("0", "01", "-1", " 1", "1.0", "latest", "9" * 30, "1/.."):
        yield f"version {version!r}", pixels(model_version=version), "NOT_FOUND", "version"
    yield "no model", pixels(model_name=""), BAD, "model_name"
    yield "long model", pixels(model_name="x" * 300), BAD, "model_name: expected at most 256"
    yield "long version", pixels(model_version="x" * 300), BAD, "model_version: expected at most"
    for name in ("", "pixel", "PIXELS", "pixels ", "x" * 2000):
        yield f"input {name[:8]!r}", pixels(inputs=[{**PIXELS, "name": name}]), BAD, "input"
    for name in ("", "score", "pixels", "x" * 2000):
        yield f"output {name[:8]!r}", pixels(outputs=[{"name": name}]), BAD, "output"
    yield "output twice", pixels(outputs=[{"name": "scores"}] * 2), BAD, "scores"
    yield "1,000 inputs", pixels(inputs=[PIXELS] * 1000), BAD, "at most"
    yield "1,000 outputs", pixels(outputs=[{"name": "scores"}] * 1000), BAD, "at most"


def parameters() -> Iterator[Case]:
    """Parameters of another type, out of range, of sequences, and without a value."""
    for name, value in (
        ("timeout", {"int64_param": -1}),
        ("timeout", {"bool_param": True}),
        ("timeout", {"string_param": "5"}),
        ("timeout", {"double_param": 0.5}),
        ("priority", {"string_param": "high"}),
        ("priority", {"int64_param": -1}),
        ("priority", {"double_param": 1.0}),
        ("sequence_id", {"int64_param": 1}),
        ("sequence_id", {"string_param": "one"}),
        ("sequence_start", {"bool_param": True}),
        ("sequence_end", {"bool_param": True}),
        ("mine", {}),
    ):
        request = pixels(parameters={name: value})
        yield f"{name} {value}", request, BAD, name
    for value in (
        {"int64_param": -1},
        {"int64_param": 1001},
        {"string_param": "3"},
        {"double_param": 2.0},
        {"bool_param": True},
        {},
    ):
        outputs = [{"name": "scores", "parameters": {"classification": value}}]
        yield f"classification {value}", pixels(outputs=outputs), BAD, "classification"


def regions() -> Iterator[Case]:
    """Shared memory, which this gateway does not allow."""
    region = {"shared_memory_region": {"string_param": "r"}}
    size = {"shared_memory_byte_size": {"int64_param": 256}}
    for name, given in (
        ("region without size", region),
        ("region with size", {**region, **size}),
        ("region of a number", {"shared_memory_region": {"int64_param": 1}, **size}),
        ("negative size", {**region, "shared_memory_byte_size": {"int64_param": -1}}),
        ("negative offset", {**region, **size, "shared_memory_offset": {"int64_param": -1}}),
        ("size alone", size),
    ):
        request = one("digits", {**PIXELS, "parameters": given})
        yield f"input: {name}", request, BAD, "shared_memory"
    outputs = [{"name": "scores", "parameters": {**region, **size}}]
    yield "output: region", pixels(outputs=outputs), BAD, "shared_memory"


def others() -> Iterator[Case]:
    """Bytes that are no message, and one that is too large."""
    whole = pixels().SerializeToString()
    for name, content in (
        ("half a message", whole[: len(whole) // 2]),
        ("a byte less", whole[:-1]),
        ("a byte more", whole + b"\x0a"),
        ("JSON", b'{"inputs": []}'),
        ("zeros", bytes(100)),
        ("a length of 2 GiB", b"\x0a\xff\xff\xff\xff\x07"),
        ("a group that does not end", b"\x0b" * 1000),
    ):
        yield name, content, BAD, "inference.ModelInferRequest"
    yield "nothing", b"", BAD, "input"
    yield "too large", pixels(id="x" * 70_000), "RESOURCE_EXHAUSTED", "65536"


CASES = [
    *shapes(),
    *datatypes(),
    *contents(),
    *names(),
    *parameters(),
    *regions(),
    *others(),
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`digits`, and a model for each datatype."""
    add_version(tmp_path, "digits", 1, digits())
    add_identities(tmp_path)
    return tmp_path


async def refusal_of(caller: Caller, request: Message | bytes) -> tuple[str, str]:
    """Status and sentence of an answer."""
    try:
        await caller.infer(request)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def test_bad_requests_are_told_what_is_wrong(repository: Path) -> None:
    """None is taken for the server's fault, and a good request beside each is answered."""
    wrong: dict[str, object] = {}
    async with caller_of(repository, max_body_bytes=65536) as (_, caller):
        for name, request, status, text in CASES:
            found, told = await refusal_of(caller, request)
            if found != status or text not in told:
                wrong[name] = found, told
            answer = await caller.infer(pixels())
            scores = np.frombuffer(answer.raw_output_contents[0], "<f4")
            np.testing.assert_allclose(scores, 64.0 * np.arange(10))

    assert not wrong


UNREADABLE = {
    "check": ("/grpc.health.v1.Health/Check", "grpc.health.v1.HealthCheckRequest"),
    "watch": ("/grpc.health.v1.Health/Watch", "grpc.health.v1.HealthCheckRequest"),
    "reflection": (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflectionRequest",
    ),
}
"""Methods of the services beside inference, and the messages that they expect."""


@pytest.mark.parametrize("method", UNREADABLE)
async def test_unreadable_message_to_service_beside_inference_is_its_callers_fault(
    repository: Path, method: str
) -> None:
    """The sentence names the message that was expected."""
    path, expected = UNREADABLE[method]
    async with caller_of(repository) as (_, caller):
        begin: Any = caller.channel.stream_stream(path)
        call = begin()
        await call.write(b"\xff\xff")
        await call.done_writing()
        status, told = await call.code(), await call.details()

    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert told == f"message: expected {expected}, got other bytes"


async def test_long_name_outside_of_ascii_keeps_status_of_its_error(repository: Path) -> None:
    """As a header the sentence is three times as long as its bytes, and headers have a limit."""
    async with caller_of(repository) as (_, caller):
        call = caller.call("ModelMetadata", messages.ModelMetadataRequest(name="\U0001f600" * 1000))
        status, told = await call.code(), await call.details()

    assert status is grpc.StatusCode.NOT_FOUND
    assert told.startswith("model_name: expected one of")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block() -> bytes:
    """The head of an inference, as literal fields that are not indexed (RFC 7541, 6.2.2)."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/ModelInfer",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    texts = (b"\0%c%b%c%b" % (len(key), key, len(value), value) for key, value in fields.items())
    return b"".join(texts)


async def test_streams_that_are_reset_at_once_keep_no_caller_waiting(repository: Path) -> None:
    """Rapid reset, CVE-2023-44487: the connection may be closed, and others are answered."""
    block = header_block()
    streams = b"".join(
        frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, CANCEL)
        for stream in range(1, 4001, 2)
    )
    async with caller_of(repository) as (served, caller):
        host, _, port = served.grpc.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + streams)
        with suppress(ConnectionError):
            await writer.drain()
        answer = await caller.infer(pixels())
        writer.close()
        await eventually(lambda: served.doors.snapshot().requests == 0)

    assert len(answer.outputs) == 1


def test_kinds_of_bad_requests_have_names_of_their_own() -> None:
    """A kind that replaced another one would not be sent."""
    assert len({name for name, *_ in CASES}) == len(CASES)
    assert len(CASES) > 100
