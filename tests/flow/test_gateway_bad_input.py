"""Bad input at both doors of a gateway: each kind gets its status and a sentence, never a 500.

After a table's last case the gateway answers a good request and holds nothing of the bad ones.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import brotli
import cramjam
import msgspec
import pytest

from tests.support.conditions import DEADLINE_S, eventually
from tests.support.gateways import HOST, Served, gateway_of
from tests.support.models import add_version, digits, identity

LIMIT = 65536
JSON_BYTES = "Inference-Header-Content-Length"
INFER = "/v2/models/digits/infer"
PIXELS: dict[str, Any] = {
    "name": "pixels",
    "datatype": "FP32",
    "shape": [1, 64],
    "data": [1.0] * 64,
}
GOOD = {"inputs": [PIXELS]}


@asynccontextmanager
async def digits_and_texts(tmp_path: Path, **options: Any) -> AsyncIterator[Served]:
    """Serve a model for FP32, and one for BYTES; afterwards nothing may be under way."""
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "texts", 1, identity("BYTES"), "probe = false")
    async with gateway_of(tmp_path, max_body_bytes=LIMIT, grpc_port=0, **options) as served:
        yield served
        assert (await served.infer("digits", GOOD)).status == 200
        await eventually(lambda: _under_way(served) == (0, 0))


def _under_way(served: Served) -> tuple[int, int]:
    found = served.doors.snapshot()
    return found.requests, found.size_bytes


def pixels(**changes: Any) -> dict[str, Any]:
    """A request whose one input differs in some fields; a field of `...` is left out."""
    changed = {**PIXELS, **changes}
    return {"inputs": [{name: each for name, each in changed.items() if each is not ...}]}


def texts(data: Any, **changes: Any) -> dict[str, Any]:
    """A request of two elements of BYTES."""
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": data, **changes}
    return {"inputs": [tensor]}


NESTED = b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
TOO_LONG = "x" * 300

JSON_REQUESTS: dict[str, tuple[Any, str]] = {
    # the document
    "null": (None, "value: expected object"),
    "number": (7, "value: expected object"),
    "string": ("inputs", "value: expected object"),
    "array": ([], "value: expected object"),
    "no field": ({}, "inputs: expected this field"),
    "half": (b'{"inputs": [', "value: expected a whole JSON map"),
    "two documents": (b"{}{}", "inputs: expected this field"),
    "byte order mark": (
        b"\xef\xbb\xbf" + msgspec.json.encode(GOOD),
        "value: expected one JSON map",
    ),
    "UTF-16": (msgspec.json.encode(GOOD).decode().encode("utf-16"), "value: expected one JSON map"),
    "no UTF-8": (b'{"inputs": [{"name": "\xff"}]}', "value: expected UTF-8 in every string"),
    "null byte": (b"\0", "value: expected one JSON map"),
    "NaN": (b'{"inputs": NaN}', "value: expected one JSON map"),
    "single quotes": (b"{'inputs': []}", "value: expected one JSON map"),
    "comment": (b"{/**/}", "value: expected one JSON map"),
    "trailing comma": (b'{"inputs": [],}', "value: expected one JSON map"),
    "deep nesting": (NESTED, "inputs[0]: expected object"),
    "huge number": (b'{"inputs": ' + b"9" * 5000 + b"}", "inputs: expected a value in range"),
    "lone surrogate": (
        b'{"inputs": [{"name": "\\ud800"}]}',
        "value: expected one JSON map, got malformed JSON: half of a surrogate pair",
    ),
    # fields of the request
    "inputs null": ({"inputs": None}, "inputs: expected array"),
    "inputs object": ({"inputs": {}}, "inputs: expected array"),
    "inputs empty": ({"inputs": []}, "inputs: expected at least one input"),
    "inputs of null": ({"inputs": [None]}, "inputs[0]: expected object"),
    "inputs of numbers": ({"inputs": [1]}, "inputs[0]: expected object"),
    "65 inputs": ({"inputs": [PIXELS] * 65}, "inputs: expected at most 64 elements"),
    "10^4 inputs": ({"inputs": [{}] * 10_000}, "inputs[0].name: expected this field"),
    "input twice": ({"inputs": [PIXELS, PIXELS]}, "inputs[1].name: expected each name once"),
    "other input beside": (
        {"inputs": [PIXELS, {**PIXELS, "name": "other"}]},
        "inputs[1].name: expected one of pixels",
    ),
    "id number": ({**GOOD, "id": 7}, "id: expected string or null"),
    "id array": ({**GOOD, "id": []}, "id: expected string or null"),
    "id too long": ({**GOOD, "id": TOO_LONG}, "id: expected at most 256 characters"),
    "parameters array": ({**GOOD, "parameters": []}, "parameters: expected object or null"),
    "parameters string": ({**GOOD, "parameters": "no"}, "parameters: expected object or null"),
    "parameter object": (
        {**GOOD, "parameters": {"mine": {}}},
        "parameters[...]: expected boolean or integer or number or string",
    ),
    "parameter null": (
        {**GOOD, "parameters": {"mine": None}},
        "parameters[...]: expected boolean or integer or number or string",
    ),
    "parameter array": (
        {**GOOD, "parameters": {"mine": [1]}},
        "parameters[...]: expected boolean or integer or number or string",
    ),
    "65 parameters": (
        {**GOOD, "parameters": {f"p{n}": n for n in range(65)}},
        "parameters: expected at most 64 entries",
    ),
    "parameter name too long": (
        {**GOOD, "parameters": {TOO_LONG: 1}},
        "parameters (a key): expected at most 256 characters",
    ),
    "parameter integer too large": (
        {**GOOD, "parameters": {"mine": 2**64}},
        "parameters.mine: expected an integer of 64 bits",
    ),
    "parameter infinite": (
        b'{"inputs": [], "parameters": {"mine": 1e999}}',
        "parameters[...]: expected a value in range",
    ),
    "timeout string": (
        {**GOOD, "parameters": {"timeout": "1"}},
        "parameters.timeout: expected microseconds, 0 or more",
    ),
    "timeout float": (
        {**GOOD, "parameters": {"timeout": 1.5}},
        "parameters.timeout: expected microseconds, 0 or more",
    ),
    "timeout true": (
        {**GOOD, "parameters": {"timeout": True}},
        "parameters.timeout: expected microseconds, 0 or more",
    ),
    "timeout negative": (
        {**GOOD, "parameters": {"timeout": -1}},
        "parameters.timeout: expected microseconds, 0 or more",
    ),
    "binary_data_output number": (
        {**GOOD, "parameters": {"binary_data_output": 1}},
        "parameters.binary_data_output: expected true or false",
    ),
    "binary_data_output string": (
        {**GOOD, "parameters": {"binary_data_output": "no"}},
        "parameters.binary_data_output: expected true or false",
    ),
    "priority": (
        {**GOOD, "parameters": {"priority": 1}},
        "parameters.priority: expected none; the header x-priority says it,",
    ),
    "sequence_id": (
        {**GOOD, "parameters": {"sequence_id": 1}},
        "parameters.sequence_id: expected none: no state is kept between re",
    ),
    "sequence_id text": (
        {**GOOD, "parameters": {"sequence_id": "a"}},
        "parameters.sequence_id: expected none: no state is kept between re",
    ),
    "sequence_start": (
        {**GOOD, "parameters": {"sequence_start": True}},
        "parameters.sequence_start: expected none: no state is kept between",
    ),
    "sequence_end": (
        {**GOOD, "parameters": {"sequence_end": True}},
        "parameters.sequence_end: expected none: no state is kept between r",
    ),
    # fields of an input
    "no name": (pixels(name=...), "inputs[0].name: expected this field"),
    "name null": (pixels(name=None), "inputs[0].name: expected string"),
    "name number": (pixels(name=1), "inputs[0].name: expected string"),
    "name empty": (pixels(name=""), "inputs[0].name: expected at least 1 characters"),
    "name too long": (pixels(name=TOO_LONG), "inputs[0].name: expected at most 256 characters"),
    "name unknown": (pixels(name="pixel"), "inputs[0].name: expected one of pixels"),
    "name with null": (pixels(name="pixels\0"), "inputs[0].name: expected one of pixels"),
    "name of a path": (pixels(name="../pixels"), "inputs[0].name: expected one of pixels"),
    "no datatype": (pixels(datatype=...), "inputs[0].datatype: expected this field"),
    "datatype null": (pixels(datatype=None), "inputs[0].datatype: expected string"),
    "datatype number": (pixels(datatype=32), "inputs[0].datatype: expected string"),
    "datatype empty": (pixels(datatype=""), "datatype: expected one of BOOL"),
    "datatype lower": (pixels(datatype="fp32"), "datatype: expected one of BOOL"),
    "datatype of NumPy": (pixels(datatype="float32"), "datatype: expected one of BOOL"),
    "datatype of Triton": (pixels(datatype="TYPE_FP32"), "datatype: expected one of BOOL"),
    "datatype unknown": (pixels(datatype="INT4"), "datatype: expected one of BOOL"),
    "datatype too long": (
        pixels(datatype=TOO_LONG),
        "inputs[0].datatype: expected at most 256 characters",
    ),
    "datatype other": (pixels(datatype="FP64"), "inputs[0].datatype (pixels): expected FP32"),
    "datatype BYTES": (pixels(datatype="BYTES"), "inputs[0].data[0]: expected a string for BYTES"),
    "datatype BOOL": (
        pixels(datatype="BOOL"),
        "inputs[0].data[0]: expected true or false for BOOL",
    ),
    "datatype integer": (
        pixels(datatype="INT64"),
        "inputs[0].data[0]: expected an integer for INT64",
    ),
    "no shape": (pixels(shape=...), "inputs[0].shape: expected this field"),
    "shape null": (pixels(shape=None), "inputs[0].shape: expected array"),
    "shape number": (pixels(shape=64), "inputs[0].shape: expected array"),
    "shape text": (pixels(shape="[1, 64]"), "inputs[0].shape: expected array"),
    "shape object": (pixels(shape={"0": 1}), "inputs[0].shape: expected array"),
    "shape of texts": (pixels(shape=["1", "64"]), "inputs[0].shape[0]: expected integer"),
    "shape of fractions": (pixels(shape=[1.5, 64]), "inputs[0].shape[0]: expected integer"),
    "shape of null": (pixels(shape=[None, 64]), "inputs[0].shape[0]: expected integer"),
    "shape of true": (pixels(shape=[True, 64]), "inputs[0].shape[0]: expected integer"),
    "shape of arrays": (pixels(shape=[[1], [64]]), "inputs[0].shape[0]: expected integer"),
    "shape empty": (pixels(shape=[]), "inputs[0].data: expected 1 elements for shape []"),
    "shape negative": (pixels(shape=[-1, 64]), "inputs[0].shape: expected no negative dimension"),
    "shape both negative": (
        pixels(shape=[-1, -64]),
        "inputs[0].shape: expected no negative dimension",
    ),
    "shape least integer": (
        pixels(shape=[-(2**63), 64]),
        "inputs[0].shape: expected no negative dimension",
    ),
    "shape zero rows": (
        pixels(shape=[0, 64]),
        "inputs[0].data: expected 0 elements for shape [0, 64]",
    ),
    "shape no rows": (
        pixels(shape=[0, 64], data=[]),
        "inputs[0].shape (pixels): expected at least one row",
    ),
    "shape rank 1": (pixels(shape=[64]), "inputs[0].shape (pixels): expected [-1, 64]"),
    "shape rank 3": (pixels(shape=[1, 8, 8]), "inputs[0].shape (pixels): expected [-1, 64]"),
    "shape rank 100": (
        pixels(shape=[1] * 98 + [1, 64]),
        "inputs[0].shape: expected at most 16 elements",
    ),
    "shape too few": (
        pixels(shape=[1, 63]),
        "inputs[0].data: expected 63 elements for shape [1, 63]",
    ),
    "shape too many": (
        pixels(shape=[2, 64]),
        "inputs[0].data: expected 128 elements for shape [2, 64]",
    ),
    "shape other width": (pixels(shape=[2, 32]), "inputs[0].shape (pixels): expected [-1, 64]"),
    "shape over int64": (
        pixels(shape=[2**64, 64]),
        "inputs[0].shape: expected less than 2^63 bytes",
    ),
    "shape product over int64": (
        pixels(shape=[2**62, 8]),
        "inputs[0].shape: expected less than 2^63 bytes",
    ),
    "shape product wraps to 64": (
        pixels(shape=[2**58, 64]),
        "inputs[0].shape: expected less than 2^63 bytes",
    ),
    "shape too large": (
        pixels(shape=[10**9, 64]),
        "inputs[0].data: expected 64000000000 elements for shape [100000000",
    ),
    "no data": (pixels(data=...), "inputs[0]: expected one of data"),
    "data null": (pixels(data=None), "inputs[0].data: expected an array"),
    "data number": (pixels(data=1.0), "inputs[0].data: expected an array"),
    "data text": (pixels(data="1.0"), "inputs[0].data: expected an array"),
    "data object": (pixels(data={}), "inputs[0].data: expected an array"),
    "data empty": (pixels(data=[]), "inputs[0].data: expected 64 elements for shape [1, 64]"),
    "data of texts": (pixels(data=["1.0"] * 64), "inputs[0].data[0]: expected a number for FP32"),
    "data of nulls": (pixels(data=[None] * 64), "inputs[0].data[0]: expected a number for FP32"),
    "data of trues": (pixels(data=[True] * 64), "inputs[0].data[0]: expected a number for FP32"),
    "data of objects": (pixels(data=[{}] * 64), "inputs[0].data[0]: expected a number for FP32"),
    "data one too few": (
        pixels(data=[1.0] * 63),
        "inputs[0].data: expected 64 elements for shape [1, 64]",
    ),
    "data one too many": (
        pixels(data=[1.0] * 65),
        "inputs[0].data: expected 64 elements for shape [1, 64]",
    ),
    "data one text": (
        pixels(data=[1.0] * 63 + ["one"]),
        "inputs[0].data[63]: expected a number for FP32",
    ),
    "data over FP32": (
        pixels(data=[1e300] * 64),
        "inputs[0].data[0]: expected a number that FP32 can hold",
    ),
    "data ragged": (
        pixels(shape=[2, 64], data=[[1.0] * 64, [1.0] * 63]),
        "inputs[0].data[1]: expected 64 elements",
    ),
    "data nested too deep": (
        pixels(data=[[[1.0] * 64]]),
        "inputs[0].data[0]: expected 64 elements",
    ),
    "data mixed nesting": (
        pixels(data=[1.0] * 63 + [[1.0]]),
        "inputs[0].data[63]: expected a number for FP32",
    ),
    "input parameters array": (
        pixels(parameters=[]),
        "inputs[0].parameters: expected object or null",
    ),
    "input parameter object": (
        pixels(parameters={"mine": {}}),
        "inputs[0].parameters[...]: expected boolean or integer or number o",
    ),
    "both forms": (
        pixels(parameters={"binary_data_size": 256}),
        "inputs[0]: expected one of data",
    ),
    "binary_data_size beyond": (
        pixels(data=..., parameters={"binary_data_size": 256}),
        "inputs[0].parameters.binary_data_size: expected an integer, at mos",
    ),
    "binary_data_size text": (
        pixels(data=..., parameters={"binary_data_size": "0"}),
        "inputs[0].parameters.binary_data_size: expected an integer, at mos",
    ),
    "binary_data_size true": (
        pixels(data=..., parameters={"binary_data_size": True}),
        "inputs[0].parameters.binary_data_size: expected an integer, at mos",
    ),
    "binary_data_size negative": (
        pixels(data=..., parameters={"binary_data_size": -1}),
        "inputs[0].parameters.binary_data_size: expected an integer, at mos",
    ),
    "binary_data_size zero": (
        pixels(data=..., parameters={"binary_data_size": 0}),
        "inputs[0].data: expected 256 bytes for FP32 [1, 64]",
    ),
    "region": (
        pixels(data=..., parameters={"shared_memory_region": "r"}),
        "shared_memory_byte_size: expected",
    ),
    "region offset": (
        pixels(parameters={"shared_memory_offset": 8}),
        "shared_memory_region: expected",
    ),
    "region size": (
        pixels(data=..., parameters={"shared_memory_byte_size": 256}),
        "shared_memory_region: expected",
    ),
    # BYTES
    "text number": (texts([1, 2]), "inputs[0].data[0]: expected a string for BYTES"),
    "text null": (texts([None, "a"]), "inputs[0].data[0]: expected a string for BYTES"),
    "text too few": (texts(["a"]), "inputs[0].data: expected 2 elements for shape [1, 2]"),
    "text too many": (
        texts(["a", "b", "c"]),
        "inputs[0].data: expected 2 elements for shape [1, 2]",
    ),
    "text nested": (texts([["a", ["b"]]]), "inputs[0].data[0][1]: expected a string for BYTES"),
    "text no base64": (
        texts(["a", "%%"], parameters={"encoding": "base64"}),
        "inputs[0].data[0]: expected base64",
    ),
    "text cut base64": (
        texts(["YQ", "YQ=="], parameters={"encoding": "base64"}),
        "inputs[0].data[0]: expected base64",
    ),
    "text no ASCII in base64": (
        texts(["é", "YQ=="], parameters={"encoding": "base64"}),
        "inputs[0].data[0]: expected base64",
    ),
    "text encoding": (
        texts(["a", "b"], parameters={"encoding": "latin-1"}),
        "inputs[0].parameters.encoding: expected",
    ),
    "text encoding number": (
        texts(["a", "b"], parameters={"encoding": 64}),
        "inputs[0].parameters.encoding: expected",
    ),
    # outputs
    "outputs object": ({**GOOD, "outputs": {}}, "outputs: expected array or null"),
    "outputs of texts": ({**GOOD, "outputs": ["scores"]}, "outputs[0]: expected object"),
    "outputs of null": ({**GOOD, "outputs": [None]}, "outputs[0]: expected object"),
    "output without name": ({**GOOD, "outputs": [{}]}, "outputs[0].name: expected this field"),
    "output empty": (
        {**GOOD, "outputs": [{"name": ""}]},
        "outputs[0].name: expected at least 1 characters",
    ),
    "output number": ({**GOOD, "outputs": [{"name": 1}]}, "outputs[0].name: expected string"),
    "output unknown": (
        {**GOOD, "outputs": [{"name": "z"}]},
        "outputs[0].name: expected one of scores",
    ),
    "output of an input": (
        {**GOOD, "outputs": [{"name": "pixels"}]},
        "outputs[0].name: expected one of scores",
    ),
    "output twice": (
        {**GOOD, "outputs": [{"name": "scores"}] * 2},
        "outputs[1].name: expected each name once",
    ),
    "257 outputs": (
        {**GOOD, "outputs": [{"name": "scores"}] * 257},
        "outputs: expected at most 256 elements",
    ),
    "output region": (
        {
            **GOOD,
            "outputs": [{"name": "scores", "parameters": {"shared_memory_region": "r"}}],
        },
        "shared_memory_byte_size: expected",
    ),
    "output binary_data": (
        {**GOOD, "outputs": [{"name": "scores", "parameters": {"binary_data": "yes"}}]},
        "outputs[0].parameters.binary_data: expected true or false",
    ),
    "output parameters": (
        {**GOOD, "outputs": [{"name": "scores", "parameters": 1}]},
        "outputs[0].parameters: expected object or null",
    ),
}


async def test_bad_json_is_refused_with_place_and_reason(tmp_path: Path) -> None:
    """Each document is a 400 whose sentence names the place and what was expected there."""
    async with digits_and_texts(tmp_path) as served:
        wrong: dict[str, object] = {}
        for case, (body, told) in JSON_REQUESTS.items():
            model = "texts" if case.startswith("text ") else "digits"
            content = body if isinstance(body, bytes) else msgspec.json.encode(body)
            response = await served.post(f"/v2/models/{model}/infer", content)
            if response.status != 400 or told not in response.json["error"]:
                wrong[case] = response.status, response.json
        assert not wrong


def binary(size: int, **parameters: Any) -> bytes:
    """The JSON of a request whose tensor of so many bytes follows it."""
    return msgspec.json.encode(
        pixels(data=..., parameters={"binary_data_size": size, **parameters})
    )


def text_body(content: bytes) -> bytes:
    """A request for `texts` whose two elements follow it in these bytes."""
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2]}
    parameters = {"binary_data_size": len(content)}
    return msgspec.json.encode({"inputs": [{**tensor, "parameters": parameters}]})


def elements(*lengths: int) -> bytes:
    """Elements of BYTES that say they have these lengths, and have one byte each."""
    return b"".join(struct.pack("<I", length) + b"a" for length in lengths)


HEAD = binary(256)
ROW = bytes(256)
DEFLATE_BOMB = zlib.compress(bytes(10**7))
GZIP, DEFLATE, ZSTD, BR = ({"Content-Encoding": each} for each in ("gzip", "deflate", "zstd", "br"))
BOMB_IN_BOMB = gzip.compress(gzip.compress(bytes(10**7)))

HEADER_REQUESTS: dict[str, tuple[dict[str, str], bytes, int, str]] = {
    **{
        f"JSON size {size!r}": ({JSON_BYTES: size}, HEAD + ROW, 400, JSON_BYTES)
        for size in ("", " ", "-0x1", "1e2", "1.0", "+5x", "٣", "9" * 15, "9" * 5000, "1,2", "-1")
    },
    "JSON size cuts": ({JSON_BYTES: "5"}, HEAD + ROW, 400, "whole JSON"),
    "JSON size reaches into tensor": (
        {JSON_BYTES: str(len(HEAD) + 1)},
        HEAD + ROW,
        400,
        "value",
    ),
    "tensor cut": ({JSON_BYTES: str(len(HEAD))}, HEAD + ROW[:-1], 400, "at most the 255 bytes"),
    "tensor and more": ({JSON_BYTES: str(len(HEAD))}, HEAD + ROW + b"x", 400, "1 more"),
    "tensor for other shape": (
        {JSON_BYTES: str(len(binary(4)))},
        binary(4) + b"1234",
        400,
        "256 bytes",
    ),
    "size over int64": (
        {JSON_BYTES: str(len(binary(2**64)))},
        binary(2**64) + ROW,
        400,
        "binary_data_size",
    ),
    "bare tensor empty": ({JSON_BYTES: "0"}, b"", 400, "256 bytes"),
    "bare tensor of two rows": ({JSON_BYTES: "0"}, ROW * 2, 400, "256 bytes"),
    **{
        f"timeout {value!r}": (
            {"X-Timeout-Ms": value},
            msgspec.json.encode(GOOD),
            400,
            "X-Timeout-Ms",
        )
        for value in (
            "",
            "0",
            "-1",
            "1.5",
            "1e3",
            "inf",
            "NaN",
            "soon",
            "9" * 30,
            "86400001",
            "0x10",
            "１",
        )
    },
    **{
        f"priority {value!r}": ({"X-Priority": value}, msgspec.json.encode(GOOD), 400, "X-Priority")
        for value in ("", "101", "-101", "1.5", "high", "--1", "- 1", "9" * 30)
    },
    **{
        f"coding {value!r}": ({"Content-Encoding": value}, b"{}", 415, "Content-Encoding")
        for value in ("x-gzip", "gzip, gzip", "gzip;q=1", "zip", "compress", "*", "a" * 200)
    },
    **{
        f"{coding} of {kind}": ({"Content-Encoding": coding}, content, 400, "body")
        for coding, whole in (
            ("gzip", gzip.compress(b"{}" * 50)),
            ("deflate", zlib.compress(b"{}" * 50)),
            ("zstd", bytes(cramjam.zstd.compress(b"{}" * 50))),
        )
        for kind, content in (
            ("nothing", b""),
            ("JSON", b"{}"),
            ("zeros", bytes(100)),
            ("a head", whole[:4]),
            ("half", whole[: len(whole) // 2]),
            ("all but a byte", whole[:-1]),
            ("more bytes", whole + b"\0{}"),
        )
    },
    "gzip with other sum": (GZIP, gzip.compress(b"{}")[:-8] + bytes(8), 400, "gzip"),
    "gzip of gzip": (GZIP, gzip.compress(gzip.compress(b"{}")), 400, "JSON"),
    "deflate without zlib": (DEFLATE, zlib.compress(b"{}")[2:-4], 400, "deflate"),
    "gzip bomb": (GZIP, gzip.compress(bytes(10**7)), 413, "65536"),
    "gzip bomb in bomb": (GZIP, BOMB_IN_BOMB, 400, "JSON"),
    "deflate bomb": (DEFLATE, DEFLATE_BOMB, 413, "65536"),
    "br bomb": (BR, brotli.compress(bytes(10**8), quality=1), 413, "65536"),
    "br cut short": (BR, brotli.compress(b"{}")[:-1], 400, "whole br stream"),
    "zstd bomb": (ZSTD, bytes(cramjam.zstd.compress(bytes(10**8))), 413, "65536"),
    "zstd bomb of frames": (ZSTD, bytes(cramjam.zstd.compress(bytes(10**4))) * 100, 413, "65536"),
    "one byte too large": ({}, b" " * (LIMIT + 1), 413, "65536"),
    "type of other charset": (
        {"Content-Type": "application/json; charset=utf-16"},
        b"x",
        400,
        "JSON",
    ),
    "payload without transform": ({"Content-Type": "image/png"}, b"x", 400, "image/png"),
    "type without subtype": ({"Content-Type": "text"}, b"x", 400, "content-type"),
    "multipart": ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x", 400, "multipart"),
    "other host": ({"Host": "example.com"}, b"{}", 421, "Host"),
    "host of a number": ({"Host": "2130706433"}, b"{}", 421, "Host"),
    "host in brackets": ({"Host": "[::1"}, b"{}", 421, "Host"),
    "host of local name": ({"Host": "localhost.example.com"}, b"{}", 421, "Host"),
}


async def test_bad_header_or_body_behind_it_is_refused(tmp_path: Path) -> None:
    """Sizes, times, codings and hosts each get their status, and a sentence with their name."""
    async with digits_and_texts(tmp_path) as served:
        wrong: dict[str, object] = {}
        for case, (headers, body, status, told) in HEADER_REQUESTS.items():
            given = {"Content-Type": "application/json", **headers}
            response = await served.post(INFER, body, headers=given)
            if response.status != status or told not in response.json["error"]:
                wrong[case] = response.status, response.json
        assert not wrong


@pytest.mark.parametrize(("second", "status"), [(len(HEAD) + 1, 400), (len(HEAD), 200)])
async def test_size_of_json_twice_is_refused_unless_it_is_the_same(
    tmp_path: Path, second: int, status: int
) -> None:
    """A proxy in front might go by another one than the gateway."""
    given = [("Content-Type", "application/json")]
    given += [(JSON_BYTES, str(size)) for size in (len(HEAD), second)]
    async with digits_and_texts(tmp_path) as served:
        response = await served.post(INFER, HEAD + ROW, headers=given)

    assert response.status == status
    if status == 400:
        expected = f"an integer from 0 to {len(HEAD + ROW)}, got '{len(HEAD)}, {second}'"
        assert response.json["error"] == f"header {JSON_BYTES}: expected {expected}"


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("X-Timeout-Ms", ("60000", "60000"), 200),
        ("X-Timeout-Ms", ("60000", "1"), 400),
        ("X-Priority", ("7", "7"), 200),
        ("X-Priority", ("7", "9"), 400),
    ],
)
async def test_header_of_one_value_twice_is_refused_unless_it_is_the_same(
    tmp_path: Path, name: str, values: tuple[str, str], status: int
) -> None:
    """A proxy in front might go by another one than the gateway."""
    async with digits_and_texts(tmp_path) as served:
        body = msgspec.json.encode({"inputs": [PIXELS]})
        response = await served.post(INFER, body, headers=[(name, each) for each in values])

    assert response.status == status
    if status == 400:
        assert response.json["error"].endswith(f"got '{', '.join(values)}'")


@pytest.mark.parametrize("second", ["gzip", "br", "identity"])
async def test_codings_in_two_headers_are_two_codings(tmp_path: Path, second: str) -> None:
    """They are one list (RFC 9110, section 5.3), and a body has one coding at most."""
    given = [("Content-Encoding", "gzip"), ("Content-Encoding", second)]
    async with digits_and_texts(tmp_path) as served:
        response = await served.post(INFER, gzip.compress(HEAD), headers=given)

    assert (response.status, response.json["error"]) == (
        415,
        "header Content-Encoding: expected one of zstd, gzip, deflate, br, or none, "
        f"got 'gzip, {second}'",
    )


LYING_TEXTS = {
    "nothing": (b"", "at least 8 bytes"),
    "half a length": (b"\1\0", "at least 8 bytes"),
    "length beyond": (elements(1, 2), "expected 11 bytes"),
    "length of 2^32": (elements(2**32 - 1), "at least 8 bytes"),
    "one element": (elements(1), "at least 8 bytes"),
    "three elements": (elements(1, 1, 1), "expected 10 bytes"),
    "bytes behind": (elements(1, 1) + b"a", "expected 10 bytes"),
    "no UTF-8": (elements(1, 1)[:-1] + b"\xff", "UTF-8 in each element"),
}


async def test_lying_lengths_of_texts_are_refused(tmp_path: Path) -> None:
    """Each element of BYTES has its length before it, and those lengths add up to the tensor."""
    async with digits_and_texts(tmp_path) as served:
        wrong: dict[str, object] = {}
        for case, (content, told) in LYING_TEXTS.items():
            body = text_body(content)
            headers = {JSON_BYTES: str(len(body))}
            response = await served.post("/v2/models/texts/infer", body + content, headers=headers)
            if response.status != 400 or told not in response.json["error"]:
                wrong[case] = response.status, response.json
        assert not wrong


def head(*lines: str, target: str = f"POST {INFER}", version: str = "HTTP/1.1") -> bytes:
    """The head of a request, with its Host."""
    return "\r\n".join([f"{target} {version}", "Host: localhost", *lines, "", ""]).encode("latin-1")


def on_path(target: str) -> bytes:
    """A good request but for its method and path."""
    body = msgspec.json.encode(GOOD)
    return head(f"Content-Length: {len(body)}", "Connection: close", target=target) + body


PATHS = {
    f"{method} {path[:60]}": (on_path(f"{method} {path}"), status)
    for method, path, status in (
        ("POST", "/v2/models/letters/infer", 404),
        ("POST", "/v2/models/digits/versions/7/infer", 404),
        ("POST", "/v2/models/digits/versions/x/infer", 404),
        ("POST", "/v2/models/digits/versions/-1/infer", 404),
        ("POST", "/v2/models/digits/versions/01/infer", 404),
        ("POST", "/v2/models/digits/versions/1e0/infer", 404),
        ("POST", "/v2/models/digits/versions/%31%00/infer", 404),
        ("POST", "/v2/models/digits/versions//infer", 404),
        ("POST", "/v2/models//infer", 404),
        ("POST", "/v2/models/../models/digits/infer", 404),
        ("POST", "/v2/models/./digits/infer", 404),
        ("POST", "/v2/models/%2e%2e/infer", 404),
        ("POST", "/v2/models/..%2f..%2fetc%2fpasswd/infer", 404),
        ("POST", "/v2/models/..%5c..%5cdigits/infer", 404),
        ("POST", "/v2/models/digits%00/infer", 404),
        ("POST", "/v2/models/digits%0d%0aX:1/infer", 404),
        ("POST", "/v2/models/digits%20/infer", 404),
        ("POST", "/v2/models/digits%ff/infer", 404),
        ("POST", "/v2/models/%ED%A0%80/infer", 404),
        ("POST", "/v2/models/digits%252f/infer", 404),
        ("POST", "/v2/models/DIGITS/infer", 404),
        ("POST", f"/v2/models/{'x' * 4000}/infer", 400),
        ("POST", "/v2/models/digits/infer/", 404),
        ("POST", "//v2/models/digits/infer", 404),
        ("POST", "/v2//models/digits/infer", 404),
        ("POST", "/v2/models/digits/infer;x", 404),
        ("POST", "/v2/models/digits/train", 404),
        ("POST", "/v3/models/digits/infer", 404),
        ("POST", "/v1/models/digits:train", 405),
        ("POST", "/v1/models/letters:predict", 404),
        ("POST", "/v1/models/digits:predict", 400),
        ("POST", "/v1/models/:predict", 405),
        ("GET", "/v2/models/digits/infer", 405),
        ("PUT", "/v2/models/digits/infer", 405),
        ("DELETE", "/v2/models/digits", 405),
        ("PATCH", "/v2/models/digits/infer", 405),
        ("OPTIONS", "/v2/models/digits/infer", 405),
        ("OPTIONS", "*", 404),
        ("TRACE", "/v2", 405),
        ("BREW", "/v2/models/digits/infer", 400),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/models/letters", 404),
        ("GET", "/v2/models/letters/ready", 404),
        ("GET", "/v2/models/letters/config", 404),
        ("GET", "/v2/models/letters/stats", 404),
        ("GET", "/v2/models/digits/versions/7/stats", 404),
        ("GET", "/v2/models/digits/versions/7", 404),
        ("GET", "/v2/repository/index", 405),
        ("POST", "/v2/repository/models/digits/load", 501),
        ("POST", "/v2/repository/models/digits/steal", 404),
        ("GET", "/metrics", 404),
        ("GET", "/", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v2/../v2/../../etc/passwd", 404),
    )
}


CHUNKED = head("Transfer-Encoding: chunked")
WIRE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "half a head": (b"POST /v2", 0),
    "empty lines": (b"\r\n\r\n\r\n", 0),
    "zeros": (bytes(100), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", 400),
    "no version": (b"GET /v2/nothing\r\n\r\n", 404),
    "version 0.9": (head(version="HTTP/0.9"), 400),
    "version 3": (head(version="HTTP/3.0"), 400),
    "version in words": (head(version="HTTP/one"), 400),
    "version lower": (head(version="http/1.1"), 400),
    "method with brace": (head(target=f"PO{{ST {INFER}"), 400),
    "target with space": (head(target="GET /v2 /x"), 400),
    "target in UTF-8": ("GET /v2/é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 400),
    "target without slash": (head(target="GET v2"), 400),
    "CONNECT": (head(target="CONNECT example.com:80"), 404),
    "line feed only": (b"GET /v2/nothing HTTP/1.1\nHost: localhost\n\n", 400),
    "header without colon": (head("Nothing"), 400),
    "header without name": (head(": 1"), 400),
    "name with space": (head("X Y: 1"), 400),
    "space before colon": (head("Content-Length : 2") + b"{}", 400),
    "folded header": (head("X: 1", " 2"), 400),
    "null in header": (head("X: \0"), 400),
    "carriage return in header": (head("X: a\rb"), 400),
    "header of 100 kB": (head("X: " + "x" * 100_000), 400),
    "name of 100 kB": (head("x" * 100_000 + ": 1"), 400),
    "target of 100 kB": (head(target="GET /" + "x" * 100_000), 400),
    "10^4 headers": (head(*[f"X{n}: 1" for n in range(10_000)]), 400),
    "length twice": (head("Content-Length: 2", "Content-Length: 3") + b"{}", 400),
    "length twice the same": (head("Content-Length: 2", "Content-Length: 2") + b"{}", 400),
    "length list": (head("Content-Length: 2, 2") + b"{}", 400),
    "length negative": (head("Content-Length: -2") + b"{}", 400),
    "length with plus": (head("Content-Length: +2") + b"{}", 400),
    "length hexadecimal": (head("Content-Length: 0x2") + b"{}", 400),
    "length with underscore": (head("Content-Length: 1_0") + b"{}", 400),
    "length empty": (head("Content-Length:") + b"{}", 400),
    "length of 30 digits": (head("Content-Length: " + "9" * 30), 400),
    "length over limit": (head(f"Content-Length: {LIMIT + 1}"), 413),
    "length and chunks": (
        head("Content-Length: 2", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        400,
    ),
    "length too large": (head("Content-Length: 100") + b"{}", 408),
    "coding of transfer": (head("Transfer-Encoding: gzip") + b"{}", 400),
    "chunked twice": (head("Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n", 400),
    "chunked in two headers": (
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        400,
    ),
    "chunked then identity": (head("Transfer-Encoding: chunked, identity") + b"0\r\n\r\n", 400),
    "chunked misspelt": (head("Transfer-Encoding: xchunked") + b"0\r\n\r\n", 400),
    "chunk size in words": (CHUNKED + b"two\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size negative": (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size with prefix": (CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size empty": (CHUNKED + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size over int64": (CHUNKED + b"F" * 17 + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size of 100 kB": (CHUNKED + b"0" * 100_000, 408),
    "chunk shorter": (CHUNKED + b"4\r\n{}\r\n0\r\n\r\n", 400),
    "chunk longer": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", 400),
    "chunk of 2^62": (CHUNKED + b"4000000000000000\r\n{}", 408),
    "chunk extension of 100 kB": (CHUNKED + b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunks without end": (CHUNKED + b"2\r\n{}\r\n", 408),
    "trailer without colon": (CHUNKED + b"2\r\n{}\r\n0\r\nX\r\n\r\n", 400),
    "chunk never": (CHUNKED, 408),
    "other expectation": (head("Expect: gold", "Content-Length: 2") + b"{}", 417),
    "upgrade": (
        head("Upgrade: websocket", "Connection: Upgrade", "Content-Length: 2") + b"{}",
        400,
    ),
    "bytes behind": (head("Content-Length: 2") + b"{}garbage\r\n\r\n", 400),
}


async def answer_on_wire(served: Served, sent: bytes) -> bytes:
    """Send bytes over a connection of their own; return what comes until the server closes it."""
    reader, writer = await asyncio.open_connection(HOST, served.doors.ports["http"])
    try:
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


SHORT = {"header_timeout_s": 0.2, "idle_timeout_s": 0.2, "body_timeout_s": 0.2}


@pytest.mark.parametrize("table", [PATHS, WIRE], ids=["paths", "wire"])
async def test_bytes_on_wire_get_status_and_end(
    tmp_path: Path, table: dict[str, tuple[bytes, int]]
) -> None:
    """Malformed heads, chunks that lie and odd paths are answered, and no connection hangs.

    Status 0 means that the connection ends without an answer: there was no whole head.
    """
    async with digits_and_texts(tmp_path, **SHORT) as served:
        wrong: dict[str, bytes] = {}
        for case, (sent, status) in table.items():
            answer = await answer_on_wire(served, sent)
            line, _, rest = answer.partition(b"\r\n")
            found = int(line.split()[1]) if line else 0
            sentence = rest.partition(b"\r\n\r\n")[2]
            if found != status or bool(sentence) != bool(status):
                wrong[case] = answer
        assert not wrong
