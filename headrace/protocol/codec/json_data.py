"""Convert the data of tensors between JSON (numbers, booleans, strings) and raw bytes.

`data` is row-major, either flat or nested like its shape. `NaN`, `Infinity` and `-Infinity` are
strings, since JSON has no such numbers; FP16 and BF16 travel as numbers; `BYTES` are strings, or
base64 with `parameters.encoding = "base64"`. Outputs are flat, as servers of the Open Inference
Protocol v2 send them.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.errors import Code, Rejected
from headrace.protocol.codec import faults
from headrace.protocol.codec.faults import DECODE_ERRORS, shown
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import (
    DATATYPES,
    Datatype,
    check_shape,
    join_elements,
    split_elements,
    to_array,
)
from headrace.tuning import TUNING

JsonTensor = TypeVar("JsonTensor")

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
ENCODING = "encoding"
BASE64 = "base64"

_FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
_SPACES = b" \t\r\n"
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},:"))
_ELEMENT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\[\],\s"]++', re.DOTALL)
_INDEX = re.compile(r"\[(\d+)\]")
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


# --- in ---------------------------------------------------------------------------------------


def data_to_bytes(
    datatype: str, shape: Sequence[int], data: Any, encoding: object, where: str
) -> bytes:
    """Return the raw bytes of a tensor in JSON.

    Args:
        datatype: name in the Open Inference Protocol.
        shape: shape of the tensor.
        data: decoded JSON of the tensor's `data`.
        encoding: the tensor's `parameters.encoding`; None if it has none.
        where: the tensor's path in the message, such as `inputs[0]`.

    Raises:
        Rejected: `INVALID_TENSOR`: the shape, the number or the nesting of the elements, or an
            element is invalid.
    """
    count = check_shape(datatype, shape, where)
    where = f"{where}.data"
    elements = _flat(data, shape, count, where)
    places = _Places(where, shape, nested=elements is not data)
    return _convert(elements, datatype, encoding, places)


def _convert(elements: list[Any], datatype: str, encoding: object, places: _Places) -> bytes:
    """Return the raw bytes of elements. Raises `Rejected` for one that is invalid."""
    known = DATATYPES[datatype]
    if datatype == "BYTES":
        return _strings(elements, encoding, places)
    if datatype in _FLOATS:
        return _floats(elements, known, places)
    _refuse_types(elements, known, places)
    if datatype != "BOOL":
        _refuse_out_of_range(elements, known, places)
    return np.array(elements, dtype=known.dtype).tobytes()


def text_to_bytes(
    datatype: str,
    shape: Sequence[int],
    text: bytes | memoryview,
    encoding: object,
    where: str,
    part_bytes: int = TUNING.protocol.payload_part_bytes,
    located_values: int = TUNING.protocol.located_values,
) -> bytes:
    """Do the same as `data_to_bytes` with the JSON text of `data`, which is valid JSON.

    The text is converted `part_bytes` at a time. So the thread releases the interpreter lock in
    between, and a large tensor never exists as a list of Python objects, which takes more memory
    than the text. A text that is not nested like the shape is decoded as a whole to say where, if
    it has no more than `located_values`.

    Raises:
        Rejected: see `data_to_bytes`; or `msgspec.Raw` accepts the text, but it has no value in
            Python.
    """
    text = bytes(text)
    count = check_shape(datatype, shape, where)
    bare, skeleton = _skeleton(text, part_bytes)
    places = _Places(f"{where}.data", shape, nested=False)
    form = _form_of(bare, skeleton, shape, count)
    if form is None:
        if _values_in(skeleton) <= located_values:
            try:
                data = msgspec.json.decode(text)
            except DECODE_ERRORS as error:
                raise _without_value(error, places) from error
            return data_to_bytes(datatype, shape, data, encoding, where)
        if skeleton.translate(None, b",") != b"[]":
            expected = f"an array of shape {list(shape)}, flat or nested"
            raise _invalid(places.where, expected, "another one")
        got = str(skeleton.count(b",") + 1)
        raise _invalid(places.where, f"{count} elements for shape {list(shape)}", got)
    places = _Places(f"{where}.data", shape, nested=form == "nested")
    if not count:
        return _convert([], datatype, encoding, places)
    if datatype == "BYTES" or b'"' in bare:
        parts = _element_parts(text, part_bytes, nested=form == "nested")
    else:
        parts = _number_parts(text, part_bytes)
    return _convert_parts(parts, datatype, encoding, places)


def count_values(text: bytes, part_bytes: int = TUNING.protocol.payload_part_bytes) -> int:
    """Return about how many values a valid JSON text has: its commas and opening brackets outside
    of strings. No value is made.
    """
    _, skeleton = _skeleton(text, part_bytes)
    return _values_in(skeleton)


def _values_in(skeleton: bytes) -> int:
    return sum(map(skeleton.count, (b",", b"[", b"{")))


def _convert_parts(
    parts: Iterator[list[Any]], datatype: str, encoding: object, places: _Places
) -> bytes:
    """Return the raw bytes of elements in parts. Raises `Rejected` as for all of them together."""
    made: list[bytes] = []
    try:
        for part in parts:
            try:
                made.append(_convert(part, datatype, encoding, places))
            except Rejected as error:
                if error.code is Code.INVALID_TENSOR:  # elements of other types are told of first
                    known = DATATYPES[datatype]
                    for each in chain([part], parts):
                        _refuse_types(each, known, places)
                        places.first += len(each)
                raise
            places.first += len(part)
            # NumPy releases the interpreter so often for a moment that a waiting thread never asks
            # for it: other callers would wait for up to 0.2 s.
            time.sleep(0)
    except DECODE_ERRORS as error:
        raise _without_value(error, places) from error
    return b"".join(made)


def _without_value(error: Exception, places: _Places) -> Rejected:
    """Return the error for a text that has no value in Python, from that of its part."""
    if not isinstance(error, msgspec.ValidationError):  # it has no path in a small body either
        return faults.refusal(error, b"", faults.JSON)
    what, _, path = str(error).partition(" - at ")
    path = path.strip("`").removeprefix("$")
    if element := _INDEX.match(path):
        where = places.of(int(element[1])) + path[element.end() :]
    else:
        where = places.where + path
    return _invalid(where, "a value in range", f"{what[:1].lower()}{what[1:]}")


def _skeleton(text: bytes, part_bytes: int) -> tuple[bytes, bytes]:
    """Return a text without spaces and the content of strings, and with nothing but its structure:
    brackets, braces, and commas and colons outside of strings.
    """
    outside: list[bytes] = []
    start, inside, size = 0, 0, max(part_bytes, 2)
    while start < len(text):
        part, start = _unescaped(text, start, size)
        pieces = part.split(b'"')
        outside.append(b'"'.join(pieces[inside::2]).translate(None, _SPACES))
        if (inside + len(pieces) - 1) % 2:
            outside.append(b'"')
        inside = (inside + len(pieces) - 1) % 2
    bare = b"".join(outside)
    return bare, b"".join(
        bare[at : at + size].translate(None, _NO_STRUCTURE) for at in range(0, len(bare), size)
    )


def _unescaped(text: bytes, start: int, size: int) -> tuple[bytes, int]:
    """Return so many bytes of a text with escapes overwritten, and where they end. No escape is cut
    in two.
    """
    part = text[start : start + size]
    if b"\\" not in part:
        return part, start + len(part)
    part = _ESCAPED.sub(b"..", part)
    if part.endswith(b"\\"):
        part = part[:-1]
    return part, start + len(part)


def _form_of(bare: bytes, skeleton: bytes, shape: Sequence[int], count: int) -> str | None:
    """Return "flat" or "nested" for a text of a shape; None for one that is neither.

    Args:
        bare: see `_skeleton`.
        skeleton: the same.
        shape: of the tensor.
        count: of its elements.
    """
    if not count:
        if bare == b"[]":
            return "flat"
        is_nested = len(shape) > 1 and bare == skeleton == _nesting_of(shape, len(bare))
        return "nested" if is_nested else None
    if b"[]" in bare or not bare.startswith(b"["):
        return None
    if len(skeleton) == count + 1 and skeleton == b"[%b]" % (b"," * (count - 1)):
        return "flat"
    is_nested = len(shape) > 1 and skeleton == _nesting_of(shape, len(skeleton))
    return "nested" if is_nested else None


def _nesting_of(shape: Sequence[int], size: int) -> bytes | None:
    """Return the skeleton of nested arrays of a shape; None if it has not so many bytes."""
    length = 0
    for each in reversed(shape):
        length = each * length + max(each - 1, 0) + 2
    if length != size:
        return None
    nested = b""
    for each in reversed(shape):
        nested = b"[%b]" % ((nested + b",") * each)[:-1] if each else b"[]"
    return nested


def _number_parts(text: bytes, part_bytes: int) -> Iterator[list[Any]]:
    """Yield the elements of a text without strings in parts, without their nesting."""
    start = 0
    while start < len(text):
        stop = text.find(b",", start + part_bytes)
        stop = len(text) if stop < 0 else stop
        yield msgspec.json.decode(b"[%b]" % text[start:stop].translate(None, b"[]"))
        start = stop + 1


def _element_parts(text: bytes, part_bytes: int, *, nested: bool) -> Iterator[list[Any]]:
    """Yield the elements of a text in parts, without their nesting."""
    take = _elements_of if nested else _elements_between
    if not nested:
        text = text[text.index(b"[") + 1 : text.rindex(b"]")]
    begin = at = inside = 0
    while at < len(text):
        start = at
        part, at = _unescaped(text, start, max(part_bytes, 2))
        last = part.rfind(b'"')
        inside = (inside + part.count(b'"')) % 2
        comma = -1 if inside else part.rfind(b",", last + 1)
        if comma < 0:  # look before the last string
            opening = last if inside else part.rfind(b'"', 0, max(last, 0))
            if opening > 0:
                comma = part.rfind(b",", part.rfind(b'"', 0, opening) + 1, opening)
        if comma >= 0:
            yield take(text[begin : start + comma])
            begin = start + comma + 1
    yield take(text[begin:])


def _elements_between(text: bytes) -> list[Any]:
    """Return the elements in a part of a text without nesting."""
    elements: list[Any] = msgspec.json.decode(b"[%b]" % text)
    return elements


def _elements_of(text: bytes) -> list[Any]:
    """Return the elements in a part of a text, without their nesting."""
    elements: list[Any] = msgspec.json.decode(b"[%b]" % b",".join(_ELEMENT.findall(text)))
    return elements


class _Places:
    """Paths of elements, by their index in row-major order, beginning with the `first` one."""

    def __init__(self, where: str, shape: Sequence[int], *, nested: bool) -> None:
        self.where = where
        self.first = 0
        self._shape = shape if nested else None

    def of(self, number: int) -> str:
        number += self.first
        if self._shape is None:
            return f"{self.where}[{number}]"
        steps = []
        for size in reversed(self._shape):
            number, step = divmod(number, size)
            steps.append(f"[{step}]")
        return self.where + "".join(reversed(steps))


def _flat(data: Any, shape: Sequence[int], count: int, where: str) -> list[Any]:
    """Return the elements in row-major order: `data` itself if it is flat, else a new list."""
    if not isinstance(data, list):
        raise _invalid(where, "an array", shown(data))
    nested = len(shape) > 1 and bool(data) and isinstance(data[0], list)
    if not nested:
        if len(data) != count:
            raise _invalid(where, f"{count} elements for shape {list(shape)}", str(len(data)))
        return data
    level: list[Any] = [data]
    for depth, size in enumerate(shape):
        places = _Places(where, shape[:depth], nested=True)
        for number, part in enumerate(level):
            if not isinstance(part, list):
                raise _invalid(places.of(number), f"an array of {size}", shown(part))
            if len(part) != size:
                raise _invalid(places.of(number), f"{size} elements", str(len(part)))
        level = [element for part in level for element in part]
    return level


def _refuse_types(elements: list[Any], known: Datatype, places: _Places) -> None:
    """Refuse elements whose types in JSON are not those of a datatype."""
    wanted: set[type]
    if known.name == "BYTES":
        wanted, expected = {str}, "a string for BYTES"
    elif known.name == "BOOL":
        wanted, expected = {bool}, "true or false for BOOL"
    elif known.name in _FLOATS:
        wanted, expected = {float, int}, f"a number for {known.name}"
    else:
        wanted, expected = {int}, f"an integer for {known.name}"
    if set(map(type, elements)) <= wanted:
        return
    for number, element in enumerate(elements):
        if type(element) in wanted:
            continue
        if known.name in _FLOATS and type(element) is str and element in NON_FINITE:
            continue
        raise _invalid(places.of(number), expected, shown(element))


def _refuse_out_of_range(elements: list[int], known: Datatype, places: _Places) -> None:
    limits = np.iinfo(known.dtype)
    low, high = int(limits.min), int(limits.max)
    if not elements or (min(elements) >= low and max(elements) <= high):
        return
    number = next(n for n, element in enumerate(elements) if not low <= element <= high)
    expected = f"an integer between {low} and {high} for {known.name}"
    raise _invalid(places.of(number), expected, shown(elements[number]))


def _floats(elements: list[Any], known: Datatype, places: _Places) -> bytes:
    """Encode numbers of a floating-point datatype; refuse those that it cannot represent."""
    numbers = elements
    if not set(map(type, elements)) <= {float, int}:
        _refuse_types(elements, known, places)
        numbers = [NON_FINITE[element] if type(element) is str else element for element in elements]
    try:
        wide = np.array(numbers, dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = wide.astype(known.dtype)
        overflown = np.isinf(narrow) & np.isfinite(wide)
        number = int(overflown.argmax()) if overflown.any() else None
    except OverflowError:
        # An integer: infinity, which may stand before it, is a number that can be held.
        number = next(n for n, each in enumerate(numbers) if _MAX_FP64 < abs(each) != math.inf)
    if number is not None:
        expected = f"a number that {known.name} can hold"
        raise _invalid(places.of(number), expected, shown(elements[number]))
    return narrow.tobytes()


_MAX_FP64 = np.finfo(np.float64).max.item()


def _strings(elements: list[Any], encoding: object, places: _Places) -> bytes:
    if encoding not in (None, BASE64):
        where = f"{places.where.removesuffix('.data')}.parameters.{ENCODING}"
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, where, expected=f'"{BASE64}" or none', got=shown(encoding)
        )
    _refuse_types(elements, DATATYPES["BYTES"], places)
    if encoding is None:
        return join_elements(elements, places.where)
    contents = []
    for number, element in enumerate(elements):
        try:
            contents.append(base64.b64decode(element, validate=True))
        except (binascii.Error, ValueError):
            raise _invalid(places.of(number), "base64", shown(element)) from None
    return join_elements(contents, places.where)


def _invalid(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_TENSOR, where, expected=expected, got=got)


# --- out --------------------------------------------------------------------------------------


def to_json(kind: Callable[..., JsonTensor], tensor: Tensor) -> JsonTensor:
    """Return a tensor as it is in JSON: an input or an output, as `kind` makes it."""
    elements, parameters = bytes_to_data(tensor)
    return kind(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=list(tensor.shape),
        data=elements,
        parameters=None if parameters is None else dict(parameters),
    )


def bytes_to_data(tensor: Tensor) -> tuple[list[Any], Mapping[str, str] | None]:
    """Return a tensor's elements for JSON, flat, and its `parameters` if they need any."""
    if tensor.datatype == "BYTES":
        contents = split_elements(tensor)
        try:
            return [content.decode() for content in contents], None
        except UnicodeDecodeError:
            encoded = [base64.b64encode(content).decode() for content in contents]
            return encoded, {ENCODING: BASE64}
    array = to_array(tensor).reshape(-1)
    if tensor.datatype not in _FLOATS:
        return array.tolist(), None
    if tensor.datatype == "BF16":
        array = array.astype(np.float32)
    elements: list[float] = array.tolist()
    if np.isfinite(array).all():
        return elements, None
    return [number if math.isfinite(number) else _non_finite(number) for number in elements], None


def _non_finite(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"
