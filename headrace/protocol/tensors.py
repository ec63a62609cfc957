"""Convert tensors between the Open Inference Protocol v2 and NumPy arrays.

A tensor's bytes are raw, little-endian and row-major; `BYTES` elements are each preceded by
their length in 4 bytes, little-endian. `check_tensor` checks shape and bytes before any array is
created, with Python's integers, which do not overflow. Tensors of fixed-size datatypes and arrays
are converted without a copy wherever the memory layout allows it.

Protocol: https://github.com/kserve/open-inference-protocol (REST, "Tensor Data Types") and, for
the raw form, its binary tensor data extension.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.protocol.messages import MAX_RANK, Tensor
from headrace.tuning import TUNING

MAX_TENSOR_BYTES = 2**63 - 1
"""Limit of array libraries; a larger shape is refused even if the tensor is empty."""

_LENGTH = struct.Struct("<I")

B = TypeVar("B", bytes, memoryview)


class Datatype(NamedTuple):
    """Datatype of the protocol.

    Attributes:
        itemsize: bytes of one element; 0 for `BYTES`, whose elements differ.
        dtype: NumPy dtype, little-endian.
        onnx: its `onnx.TensorProto.DataType`.
    """

    name: str
    itemsize: int
    dtype: np.dtype[Any]
    onnx: int


def _fixed(name: str, dtype: Any, onnx: int) -> Datatype:
    little = np.dtype(dtype).newbyteorder("<")
    return Datatype(name, little.itemsize, little, onnx)


DATATYPES: dict[str, Datatype] = {
    datatype.name: datatype
    for datatype in (
        _fixed("BOOL", np.bool_, 9),
        _fixed("UINT8", np.uint8, 2),
        _fixed("UINT16", np.uint16, 4),
        _fixed("UINT32", np.uint32, 12),
        _fixed("UINT64", np.uint64, 13),
        _fixed("INT8", np.int8, 3),
        _fixed("INT16", np.int16, 5),
        _fixed("INT32", np.int32, 6),
        _fixed("INT64", np.int64, 7),
        _fixed("FP16", np.float16, 10),
        _fixed("BF16", ml_dtypes.bfloat16, 16),
        _fixed("FP32", np.float32, 1),
        _fixed("FP64", np.float64, 11),
        Datatype("BYTES", 0, np.dtype(object), 8),
    )
}

_BY_DTYPE = {datatype.dtype: datatype for datatype in DATATYPES.values()}
_NUMBER_SIZES = {
    datatype.name: datatype.itemsize
    for datatype in DATATYPES.values()
    if datatype.itemsize and datatype.name != "BOOL"
}


# --- checks -----------------------------------------------------------------------------------


def check_shape(datatype: str, shape: Sequence[int], where: str) -> int:
    """Check a tensor's shape and return its number of elements.

    A dimension of zero is valid here (an empty tensor); `headrace.models.signature`, which knows
    whether dimension 0 is the batch, checks that a batch has at least one row.

    `where` is the tensor's path in the message, such as `inputs[0]`.

    Raises:
        Rejected: `INVALID_TENSOR`: an unknown datatype, more than `MAX_RANK` dimensions, a
            negative dimension, or more bytes than a tensor can have.
    """
    known = DATATYPES.get(datatype)
    if known is None:
        raise _invalid(f"{where}.datatype", f"one of {', '.join(DATATYPES)}", f'"{datatype}"')
    if len(shape) > MAX_RANK:
        raise _invalid(f"{where}.shape", f"at most {MAX_RANK} dimensions", str(len(shape)))
    if shape and min(shape) < 0:
        raise _invalid(f"{where}.shape", "no negative dimension", _shown(shape))
    count = math.prod(shape)
    # A zero must not hide other dimensions that are too large for array libraries.
    extent = count or math.prod(size for size in shape if size)
    if extent * (known.itemsize or _LENGTH.size) > MAX_TENSOR_BYTES:
        raise _invalid(f"{where}.shape", "less than 2^63 bytes", f"{datatype} {_shown(shape)}")
    return count


def _shown(shape: Sequence[int]) -> str:
    # Integers in JSON may have thousands of digits.
    sizes = (str(size) if abs(size) < 2**64 else "2^64 or more" for size in shape)
    return f"[{', '.join(sizes)}]"


def check_tensor(
    datatype: str, shape: Sequence[int], content: memoryview | bytes, where: str
) -> None:
    """Check a tensor's bytes against its datatype and shape, before any array is made.

    Raises:
        Rejected: `INVALID_TENSOR`: see `check_shape`; or the number of bytes does not match the
            shape, a `BOOL` is neither 0 nor 1, or the lengths within `BYTES` do not match.
    """
    if len(shape) <= MAX_RANK:  # the product of more sizes may be a number of megabytes
        size_bytes = _NUMBER_SIZES.get(datatype, 0)
        for size in shape:
            if size < 1:
                break
            size_bytes *= size
        else:
            if size_bytes and size_bytes == len(content):
                return  # the usual tensor: no further checks
    count = check_shape(datatype, shape, where)
    itemsize = DATATYPES[datatype].itemsize
    if not itemsize:
        _check_elements(content, shape, count, where)
        return
    if len(content) != count * itemsize:
        raise _invalid(
            f"{where}.data",
            f"{count * itemsize} bytes for {datatype} {list(shape)}",
            f"{len(content)} bytes",
        )
    if datatype == "BOOL" and (wrong := bytes(content).translate(None, b"\x00\x01")):
        raise _invalid(f"{where}.data", "0 or 1 in each byte of BOOL", str(wrong[0]))


def _check_elements(
    content: memoryview | bytes, shape: Sequence[int], count: int, where: str
) -> None:
    """Check the lengths in a `BYTES` tensor, without keeping its elements."""
    total = len(content)
    if count * _LENGTH.size > total:
        raise _invalid(
            f"{where}.data",
            f"at least {count * _LENGTH.size} bytes for the lengths of BYTES {list(shape)}",
            f"{total} bytes",
        )
    unpack_from = _LENGTH.unpack_from
    last_start = total - _LENGTH.size
    stop = 0
    for index in range(count):
        if stop > last_start:
            raise _invalid(
                f"{where}.data",
                f"{count} elements for BYTES {list(shape)}",
                f"{total} bytes, which end at element {index}",
            )
        stop += _LENGTH.size + unpack_from(content, stop)[0]
    if stop != total:
        raise _invalid(
            f"{where}.data",
            f"{stop} bytes by the lengths of the {count} elements of BYTES {list(shape)}",
            f"{total} bytes",
        )


def _invalid(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_TENSOR, where, expected=expected, got=got)


# --- bytes to arrays --------------------------------------------------------------------------


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array of its shape.

    For datatypes of fixed size the array is a view of `tensor.data`, read-only if that is;
    `BYTES` become an object array of `bytes`.

    Raises:
        Rejected: `INVALID_TENSOR`, see `check_tensor`.
    """
    if tensor.datatype == "BYTES":
        elements = split_elements(tensor)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(tensor.shape)
    check_tensor(tensor.datatype, tensor.shape, tensor.data, tensor.name)
    return np.frombuffer(tensor.data, DATATYPES[tensor.datatype].dtype).reshape(tensor.shape)


def split_elements(tensor: Tensor) -> list[bytes]:
    """Return the elements of a `BYTES` tensor, row-major. Raises `Rejected`, see `check_tensor`."""
    check_tensor(tensor.datatype, tensor.shape, tensor.data, tensor.name)
    content = memoryview(tensor.data)
    elements: list[bytes] = []
    stop = 0
    for _ in range(math.prod(tensor.shape)):
        start = stop + _LENGTH.size
        stop = start + _LENGTH.unpack_from(content, stop)[0]
        elements.append(bytes(content[start:stop]))
    return elements


# --- arrays to bytes --------------------------------------------------------------------------


def datatype_of(dtype: np.dtype[Any], where: str = "array") -> Datatype:
    """Return the protocol's datatype for a NumPy dtype of either byte order.

    Raises:
        Rejected: `INVALID_TENSOR`: the protocol has none, as for 8-bit floats, complex numbers
            and dates.
    """
    known = _BY_DTYPE.get(dtype)
    if known is None and dtype.kind in "SUT":
        known = DATATYPES["BYTES"]
    if known is None:
        known = _BY_DTYPE.get(dtype.newbyteorder("<"))
    if known is None:
        raise _invalid(where, f"a dtype of one of {', '.join(DATATYPES)}", dtype.name)
    return known


def from_array(name: str, array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor; a little-endian, contiguous array is not copied.

    Raises:
        Rejected: `INVALID_TENSOR`: see `datatype_of`; or an object array contains other types
            than `bytes` and `str`.
    """
    datatype = datatype_of(array.dtype, name)
    if datatype.itemsize:
        return Tensor(name, datatype.name, array.shape, _raw(array, datatype))
    return Tensor(name, "BYTES", array.shape, join_elements(array.ravel().tolist(), name))


def join_elements(elements: Sequence[Any], where: str = "array") -> bytes:
    """Return the data of a `BYTES` tensor of `bytes` and `str` (as UTF-8) elements.

    Raises:
        Rejected: `INVALID_TENSOR`: an element is of another type.
    """
    parts: list[bytes] = []
    for index, element in enumerate(elements):
        content = element.encode() if isinstance(element, str) else element
        if not isinstance(content, bytes):
            got = type(element).__name__
            raise _invalid(f"{where}[{index}]", "bytes or str in an object array", got)
        parts.append(_LENGTH.pack(len(content)))
        parts.append(content)
    return b"".join(parts)


def _raw(array: NDArray[Any], datatype: Datatype) -> memoryview:
    # bfloat16 has no buffer format of its own, so every dtype is viewed as plain bytes.
    little = np.ascontiguousarray(array, dtype=datatype.dtype)
    content = little.reshape(-1).view(np.uint8)
    # NumPy takes any byte but 0 for true, the protocol 1 alone.
    if little.dtype.kind == "b" and (content > 1).any():
        content = np.minimum(content, 1)
    return content.data


def split_rows(
    name: str, array: NDArray[Any], rows: Sequence[int]
) -> list[bytes] | list[memoryview]:
    """Return the bytes of several requests' tensors from one array that has their rows in order.

    Equal to the data of `from_array` on each slice, but inspects the array only once. Rows beyond
    the sum of `rows` are padding and left out. Small rows are copied, larger ones are views.

    Raises:
        Rejected: `INVALID_TENSOR`, see `from_array`.
        ValueError: the array has no rows, or fewer than the sum of `rows`.
    """
    total = sum(rows)
    if not array.ndim or array.shape[0] < total:
        raise ValueError(f"{name}: expected {total} rows, got shape {list(array.shape)}")
    datatype = datatype_of(array.dtype, name)
    if not datatype.itemsize:
        parts = zip(accumulate(rows), rows, strict=True)
        return [
            join_elements(array[stop - size : stop].ravel().tolist(), name) for stop, size in parts
        ]
    row_bytes = datatype.itemsize * math.prod(array.shape[1:])
    if row_bytes > TUNING.protocol.copied_row_bytes:
        return _cut_up(_raw(array, datatype), row_bytes, rows)
    is_raw = array.dtype == datatype.dtype and array.dtype.kind != "b"
    content = array.tobytes() if is_raw else _raw(array, datatype).tobytes()
    if rows.count(1) == len(rows):  # as for most requests
        return list(_single_rows(row_bytes, len(rows)).unpack_from(content))
    return _cut_up(content, row_bytes, rows)


def _cut_up(content: B, row_bytes: int, rows: Sequence[int]) -> list[B]:
    stops = accumulate(rows)
    return [
        content[(stop - size) * row_bytes : stop * row_bytes]
        for stop, size in zip(stops, rows, strict=True)
    ]


@lru_cache(maxsize=TUNING.protocol.cached_row_layouts)
def _single_rows(row_bytes: int, count: int) -> struct.Struct:
    """Return a struct that unpacks so many rows, in a third of the time of slicing."""
    return struct.Struct(f"{row_bytes}s" * count)
