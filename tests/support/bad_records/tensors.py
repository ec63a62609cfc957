"""Requests whose tensor is impossible, or is not what the model takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tests.support.bad_records.building import (
    JSON_HEADERS,
    BadRecord,
    elements,
    json_input,
    other_types,
    packed_input,
    refused,
)

_SHAPE = "inputs[0].shape"
_DATA = "inputs[0].data"
_DATATYPE = "inputs[0].datatype"


def tensors() -> Iterator[BadRecord]:
    """Return tensors in MessagePack, where `data` is raw."""
    for name, changes, fragment in (*_shapes(), *_datatypes(), *_bytes()):
        yield refused(name, packed_input(**changes), fragment)
    for kind, value in other_types():
        yield refused(f"data is {kind}", packed_input(data=value), _DATA)
    for count in (0, 1, 4, 252, 255, 257, 260, 512):
        name = f"{count} bytes for 64 numbers"
        yield refused(name, packed_input(data=bytes(count)), f"{_DATA}: expected 256 bytes")


def _shapes() -> tuple[tuple[str, dict[str, Any], str], ...]:
    return (
        ("63 pixels", {"shape": [1, 63], "data": bytes(252)}, _SHAPE),
        ("65 pixels", {"shape": [1, 65], "data": bytes(260)}, _SHAPE),
        ("no batch dimension", {"shape": [64]}, _SHAPE),
        ("a third dimension", {"shape": [1, 8, 8]}, _SHAPE),
        ("a dimension of one too many", {"shape": [1, 64, 1]}, _SHAPE),
        ("a scalar", {"shape": [], "data": bytes(4)}, _SHAPE),
        ("rows and columns exchanged", {"shape": [64, 1]}, _SHAPE),
        ("no rows", {"shape": [0, 64], "data": b""}, _SHAPE),
        ("no columns", {"shape": [1, 0], "data": b""}, _SHAPE),
        ("all dimensions zero", {"shape": [0, 0], "data": b""}, _SHAPE),
        ("a negative dimension", {"shape": [-1, 64]}, _SHAPE),
        ("two negative dimensions", {"shape": [-1, -64]}, _SHAPE),
        ("a negative number of columns", {"shape": [1, -64]}, _SHAPE),
        ("the smallest dimension", {"shape": [-(2**63), 64]}, _SHAPE),
        ("a dimension of 2^31", {"shape": [2**31, 64]}, _DATA),
        ("a dimension of 2^63", {"shape": [2**63, 1]}, _SHAPE),
        ("a dimension of 2^64 - 1", {"shape": [2**64 - 1, 64]}, _SHAPE),
        ("a product of 2^64", {"shape": [2**32, 2**32]}, _SHAPE),
        ("a product that is 64 modulo 2^64", {"shape": [2**58 + 1, 64]}, _SHAPE),
        ("an overflow behind a zero", {"shape": [0, 2**40, 2**40], "data": b""}, _SHAPE),
        ("17 dimensions", {"shape": [1] * 17}, _SHAPE),
        ("1000 dimensions", {"shape": [1] * 1000}, _SHAPE),
        ("a dimension that is NaN", {"shape": [1, float("nan")]}, f"{_SHAPE}[1]"),
        ("a dimension that is infinite", {"shape": [1, float("inf")]}, f"{_SHAPE}[1]"),
        ("a dimension as a float", {"shape": [1.0, 64]}, f"{_SHAPE}[0]"),
        ("a nested shape", {"shape": [[1, 64]]}, f"{_SHAPE}[0]"),
        ("a shape as text", {"shape": "1,64"}, _SHAPE),
        ("a shape as bytes", {"shape": b"\x01\x40"}, _SHAPE),
        ("two rows in the shape, one in the data", {"shape": [2, 64]}, _DATA),
        ("one row in the shape, two in the data", {"data": bytes(512)}, _DATA),
    )


def _datatypes() -> Iterator[tuple[str, dict[str, Any], str]]:
    sizes = {"FP64": 8, "INT32": 4, "UINT32": 4, "INT64": 8, "FP16": 2, "BF16": 2, "UINT8": 1}
    for datatype, size in (sizes | {"BOOL": 1, "INT8": 1, "INT16": 2}).items():
        data = bytes(64 * size)
        yield f"{datatype} for FP32", {"datatype": datatype, "data": data}, _DATATYPE
    for datatype in ("", "fp32", "FLOAT", "float32", "FP8", "TYPE_FP32", "FP32 ", "STRING"):
        yield f'the datatype "{datatype}"', {"datatype": datatype}, _DATATYPE
    yield "a datatype of 257 characters", {"datatype": "F" * 257}, _DATATYPE
    yield "FP64 with the bytes of FP32", {"datatype": "FP64"}, _DATA
    yield "FP16 with the bytes of FP32", {"datatype": "FP16"}, _DATA


def _bytes() -> Iterator[tuple[str, dict[str, Any], str]]:
    """`BYTES` and `BOOL`, whose content is checked; the model takes neither."""
    first = struct.pack("<I", 4) + b"abcd"
    contents = {
        "no elements for one": b"",
        "half a length": b"\x01\x00",
        "a length beyond the end": struct.pack("<I", 5) + b"abcd",
        "the largest length": b"\xff\xff\xff\xff" + b"abcd",
        "a big-endian length": struct.pack(">I", 4) + b"abcd",
        "bytes behind the last element": first + b"x",
        "an element too many": first + first,
        "bytes without a length": b"abcdefgh",
    }
    for name, data in contents.items():
        yield f"BYTES: {name}", {"datatype": "BYTES", "shape": [1], "data": data}, _DATA
    for shape, data in (([2], first), ([3], elements(b"a", b"")), ([2**40], first)):
        changes = {"datatype": "BYTES", "shape": shape, "data": data}
        yield f"BYTES: too few elements for {shape}", changes, _DATA
    well_formed = {"datatype": "BYTES", "shape": [1], "data": first}
    yield "well-formed BYTES for FP32", well_formed, _DATATYPE
    wrong_bool = {"datatype": "BOOL", "data": b"\x02" * 64}
    yield "BOOL with a byte of 2", wrong_bool, _DATA


# --- JSON -------------------------------------------------------------------------------------


def json_tensors() -> Iterator[BadRecord]:
    """Return tensors in JSON, where `data` is a list, flat or nested."""
    for name, changes, fragment in (*_json_shapes(), *_json_elements()):
        yield refused(f"{name} (JSON)", json_input(**changes), fragment, JSON_HEADERS)
    for kind, value in other_types("a list"):
        yield refused(f"data is {kind} (JSON)", json_input(data=value), _DATA, JSON_HEADERS)
    text = json_input(shape=["DIMENSION", 64])
    for name, number in (("of 1e400", b"1e400"), ("of 5000 digits", b"9" * 5000)):
        value = text.replace(b'"DIMENSION"', number)
        yield refused(f"a dimension {name} (JSON)", value, f"{_SHAPE}[0]", JSON_HEADERS)
        value = json_input(data=["ELEMENT"] + [0.0] * 63).replace(b'"ELEMENT"', number)
        yield refused(f"an element {name} (JSON)", value, _DATA, JSON_HEADERS)


def _json_shapes() -> tuple[tuple[str, dict[str, Any], str], ...]:
    row = [0.0] * 64
    return (
        ("63 pixels", {"shape": [1, 63], "data": [0.0] * 63}, _SHAPE),
        ("a negative dimension", {"shape": [-1, 64]}, _SHAPE),
        ("no rows", {"shape": [0, 64], "data": []}, _SHAPE),
        ("17 dimensions", {"shape": [1] * 17}, _SHAPE),
        ("a dimension of 40 digits", {"shape": [10**40, 64]}, _SHAPE),
        ("a product of 2^64", {"shape": [2**32, 2**32]}, _SHAPE),
        ("a datatype of another name", {"datatype": "float"}, _DATATYPE),
        ("INT32 for FP32", {"datatype": "INT32", "data": [0] * 64}, _DATATYPE),
        ("63 elements", {"data": [0.0] * 63}, f"{_DATA}: expected 64 elements"),
        ("65 elements", {"data": [0.0] * 65}, f"{_DATA}: expected 64 elements"),
        ("no elements", {"data": []}, f"{_DATA}: expected 64 elements"),
        ("a row of 63", {"data": [row[1:]]}, f"{_DATA}[0]: expected 64 elements"),
        ("two rows for one", {"data": [row, row]}, f"{_DATA}: expected 1 elements"),
        ("rows of unequal length", {"shape": [2, 64], "data": [row, row[1:]]}, f"{_DATA}[1]"),
        ("a row and a number", {"shape": [2, 64], "data": [row, 0.0]}, f"{_DATA}[1]"),
        ("nested more deeply than the shape", {"data": [[[0.0]] * 64]}, f"{_DATA}[0][0]"),
        ("an empty nested list", {"data": [[]]}, f"{_DATA}[0]"),
        ("base64 as in MessagePack", {"data": "AAAA"}, _DATA),
    )


def _json_elements() -> Iterator[tuple[str, dict[str, Any], str]]:
    wrong: tuple[tuple[str, Any], ...] = (
        ("text", "abc"),
        ("a number as text", "1.5"),
        ("nan in small letters", "nan"),
        ("the text +Infinity", "+Infinity"),
        ("null", None),
        ("true", True),
        ("an object", {}),
        ("more than FP32 can hold", 1e39),
        ("less than FP32 can hold", -1e39),
        ("an integer that FP32 cannot hold", 10**39),
        ("an integer that FP64 cannot hold", 10**400),
    )
    for name, element in wrong:
        flat = [0.0] * 3 + [element] + [0.0] * 60
        yield f"an element that is {name}", {"data": flat}, f"{_DATA}[3]: expected"
        yield f"a nested element that is {name}", {"data": [flat]}, f"{_DATA}[0][3]: expected"
    for datatype, element in (
        ("INT8", 128), ("INT8", -129), ("UINT8", 256), ("UINT8", -1), ("INT16", 2**15),
        ("UINT16", 2**16), ("INT32", 2**31), ("UINT32", 2**32), ("INT64", 2**63),
        ("UINT64", 2**64), ("INT64", 1.5), ("INT64", 1.0), ("INT64", True), ("INT64", "1"),
        ("BOOL", 1), ("BOOL", "true"), ("FP16", 65520), ("BF16", 3.4e38), ("FP64", 10**309),
        ("BYTES", 1), ("BYTES", None),
    ):  # fmt: skip
        changes = {"datatype": datatype, "shape": [1], "data": [element]}
        yield f"{element!r} as {datatype}", changes, f"{_DATA}[0]: expected"
    encoded: dict[str, Any] = {
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"encoding": "base64"},
    }
    for text in ("%%%", "YQ", "YQ==\n", "ü"):
        changes = {**encoded, "data": [text]}
        yield f"{text!r} as base64", changes, f"{_DATA}[0]: expected base64"
    unknown = {**encoded, "data": ["00"], "parameters": {"encoding": "hex"}}
    yield "an unknown encoding", unknown, "inputs[0].parameters.encoding"
