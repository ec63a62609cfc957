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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.errors import Code, Rejected
from headrace.protocol.codec.faults import shown
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
_NUMBER_DATATYPES = frozenset(DATATYPES) - {"BYTES", "BOOL"}
_NUMBER_CHARACTERS = b"0123456789+-.eE \t\r\n"
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
    known = DATATYPES[datatype]
    if datatype == "BYTES":
        return _strings(elements, encoding, places)
    if datatype == "BOOL":
        _refuse_other_types(elements, {bool}, "true or false for BOOL", places)
    elif datatype in _FLOATS:
        return _floats(elements, known, places)
    else:
        _refuse_other_types(elements, {int}, f"an integer for {datatype}", places)
        _refuse_out_of_range(elements, known, places)
    return np.array(elements, dtype=known.dtype).tobytes()


def text_to_bytes(
    datatype: str,
    shape: Sequence[int],
    text: bytes | memoryview,
    encoding: object,
    where: str,
    part_bytes: int = TUNING.protocol.payload_part_bytes,
) -> bytes:
    """Do the same as `data_to_bytes` with the JSON text of `data`, which is valid JSON.

    Numbers, and strings that are not nested, are converted `part_bytes` of text at a time. So the
    thread releases the interpreter lock in between, and a large tensor never exists as a list of
    Python objects, which takes more memory than the text.

    Raises:
        Rejected: see `data_to_bytes`.
        msgspec.DecodeError, UnicodeDecodeError: `msgspec.Raw` accepts the text, but it has no value
            in Python.
    """
    text = bytes(text)
    parts: Iterator[list[Any]] | None = None
    if datatype in _NUMBER_DATATYPES and _has_nesting_of(text, shape):
        parts = _number_parts(text, part_bytes)
    elif datatype == "BYTES" and text.startswith(b"["):
        parts = _string_parts(text, part_bytes)
    if parts is not None:
        made: list[bytes] = []
        try:
            count = check_shape(datatype, shape, where)
            for part in parts:
                count -= len(part)
                made.append(data_to_bytes(datatype, [len(part)], part, encoding, where))
        except (Rejected, msgspec.DecodeError, UnicodeDecodeError):
            pass  # raised again below, where the path of the element is known
        else:
            if count == 0 and made:
                return b"".join(made)
    return data_to_bytes(datatype, shape, msgspec.json.decode(text), encoding, where)


def _has_nesting_of(text: bytes, shape: Sequence[int]) -> bool:
    """Return True if a JSON text holds only numbers, as many as the shape has, flat or nested."""
    if not shape or min(shape) < 1 or math.prod(shape) > len(text):
        return False
    found = text.translate(None, _NUMBER_CHARACTERS)
    if found == b"[%b]" % (b"," * (math.prod(shape) - 1)):
        return True
    nested = b""  # a number
    for size in reversed(shape):
        nested = b"[%b]" % b",".join([nested] * size)
    return found == nested


def _number_parts(text: bytes, part_bytes: int) -> Iterator[list[Any]]:
    """Yield the numbers of a text in parts, without their nesting."""
    numbers = text.translate(None, b"[]")
    start = 0
    while start < len(numbers):
        stop = numbers.find(b",", start + part_bytes)
        stop = len(numbers) if stop < 0 else stop
        yield msgspec.json.decode(b"[%b]" % numbers[start:stop])
        start = stop + 1


def _string_parts(text: bytes, part_bytes: int) -> Iterator[list[Any]]:
    """Yield the elements of an array in parts; each part but the last ends after a string.

    Raises:
        msgspec.DecodeError: the elements are arrays or objects.
    """
    start, end, size = 1, len(text) - 1, part_bytes
    while start < end:
        stop = end
        if end - start > size:
            part = text[start : start + size]
            if b"\\" in part:
                part = _ESCAPED.sub(b"..", part)
            quote = part.rfind(b'"')
            if part.count(b'"') % 2:  # the last one begins a string
                quote = part.rfind(b'"', 0, quote)
            if quote < 0:
                size *= 2
                continue
            stop = start + quote + 1
        yield msgspec.json.decode(b"[%b]" % text[start:stop])
        start = text.find(b",", stop) + 1 or end
        size = part_bytes


class _Places:
    """Paths of elements, by their index in row-major order."""

    def __init__(self, where: str, shape: Sequence[int], *, nested: bool) -> None:
        self.where = where
        self._shape = shape if nested else None

    def of(self, number: int) -> str:
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


def _refuse_other_types(
    elements: list[Any], wanted: set[type], expected: str, places: _Places
) -> None:
    if set(map(type, elements)) <= wanted:
        return
    number = next(n for n, element in enumerate(elements) if type(element) not in wanted)
    raise _invalid(places.of(number), expected, shown(elements[number]))


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
        numbers = [
            NON_FINITE.get(element, element) if type(element) is str else element
            for element in elements
        ]
        _refuse_other_types(numbers, {float, int}, f"a number for {known.name}", places)
    try:
        wide = np.array(numbers, dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = wide.astype(known.dtype)
        overflown = np.isinf(narrow) & np.isfinite(wide)
        number = int(overflown.argmax()) if overflown.any() else None
    except OverflowError:
        number = next(n for n, element in enumerate(numbers) if abs(element) > _MAX_FP64)
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
    _refuse_other_types(elements, {str}, "a string for BYTES", places)
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
