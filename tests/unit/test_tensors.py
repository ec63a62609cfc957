"""Tensors: what is refused before an array is made, and what is a view of what."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.errors import Code, Rejected
from headrace.protocol.messages import MAX_RANK, Tensor
from headrace.protocol.tensors import (
    DATATYPES,
    check_shape,
    check_tensor,
    datatype_of,
    from_array,
    join_elements,
    split_elements,
    split_rows,
    to_array,
)
from headrace.tuning import TUNING

FIXED = [name for name, datatype in DATATYPES.items() if datatype.itemsize]


def refusal(datatype: str, shape: list[int], content: bytes) -> str:
    """The message with which a tensor is refused."""
    with pytest.raises(Rejected) as refused:
        check_tensor(datatype, shape, content, "inputs[0]")
    assert refused.value.code is Code.INVALID_TENSOR
    return refused.value.message


@pytest.mark.parametrize(
    ("datatype", "shape", "size", "message"),
    [
        (
            "FP32",
            [1, 64],
            252,
            "inputs[0].data: expected 256 bytes for FP32 [1, 64], got 252 bytes",
        ),
        ("INT64", [], 4, "inputs[0].data: expected 8 bytes for INT64 [], got 4 bytes"),
        ("FP32", [-1, 64], 256, "inputs[0].shape: expected no negative dimension, got [-1, 64]"),
        ("FP32", [-8, -8], 256, "inputs[0].shape: expected no negative dimension, got [-8, -8]"),
        (
            "UINT8",
            [2**32, 2**32],
            0,
            "inputs[0].shape: expected less than 2^63 bytes, got UINT8 [4294967296, 4294967296]",
        ),
        (
            "FP64",
            [0, 2**40, 2**40],
            0,
            "inputs[0].shape: expected less than 2^63 bytes, "
            "got FP64 [0, 1099511627776, 1099511627776]",
        ),
        ("UINT8", [1] * 17, 1, "inputs[0].shape: expected at most 16 dimensions, got 17"),
    ],
)
def test_tensor_shape_that_does_not_fit_its_bytes_is_refused(
    datatype: str, shape: list[int], size: int, message: str
) -> None:
    """The message says what was expected, what came, and where."""
    assert refusal(datatype, shape, bytes(size)) == message


def test_unknown_datatype_is_refused_with_known_ones() -> None:
    """The message lists the protocol's datatypes."""
    message = refusal("FLOAT", [1], bytes(4))

    assert message == (
        "inputs[0].datatype: expected one of BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, "
        'INT32, INT64, FP16, BF16, FP32, FP64, BYTES, got "FLOAT"'
    )


def test_huge_dimensions_are_shown_short_in_errors() -> None:
    """JSON can bring such integers; they must not make the message long."""
    message = refusal("FP32", [10**4000], b"")

    assert message == "inputs[0].shape: expected less than 2^63 bytes, got FP32 [2^64 or more]"


class Uncounted(int):
    """A size that must not be multiplied."""

    def __rmul__(self, other: int) -> int:
        raise AssertionError(f"multiplied by {other}")


@pytest.mark.parametrize("datatype", ["FP32", "BOOL", "BYTES"])
def test_shape_of_too_many_dimensions_is_refused_before_sizes_are_multiplied(datatype: str) -> None:
    """The product of 100,000 sizes is a number of megabytes, which takes a minute."""
    message = refusal(datatype, [Uncounted(2**62)] * 100_000, bytes(8))

    assert message == f"inputs[0].shape: expected at most {MAX_RANK} dimensions, got 100000"


def test_bool_tensor_with_other_bytes_than_0_and_1_is_refused() -> None:
    """Any other byte would be undefined behaviour in a library that reads it as a bool."""
    assert "expected 0 or 1 in each byte of BOOL, got 2" in refusal("BOOL", [3], b"\x00\x02\x01")


@pytest.mark.parametrize(
    ("shape", "content", "fragment"),
    [
        ([1], b"", "at least 4 bytes"),
        ([1], b"\x05\x00\x00\x00abcd", "expected 9 bytes by the lengths"),
        ([1], b"\x04\x00\x00\x00abcdX", "expected 8 bytes by the lengths"),
        ([2], b"\x08\x00\x00\x00abcdefgh", "which end at element 1"),
        ([2], b"\xff\xff\xff\xff\x00\x00\x00\x00", "which end at element 1"),
        ([2**40], b"\x00\x00\x00\x00", "at least 4398046511104 bytes"),
    ],
)
def test_bytes_tensor_with_wrong_lengths_is_refused(
    shape: list[int], content: bytes, fragment: str
) -> None:
    """Lengths must lead from element to element and end with the last byte."""
    assert fragment in refusal("BYTES", shape, content)


def test_truth_value_of_other_byte_than_1_is_written_as_1() -> None:
    """A model in Python may view bytes as truth values, and JSON would have another one of 2 than a
    caller who reads the bytes.
    """
    array = np.array([[0, 1], [2, 255]], np.uint8).view(np.bool_)

    written = bytes(from_array("y", array).data), b"".join(split_rows("y", array, [1, 1]))

    assert written == (b"\0\1\1\1", b"\0\1\1\1")


@pytest.mark.parametrize("shape", [[0], [0, 64], [3, 0], []])
def test_empty_tensor_and_scalar_are_accepted(shape: list[int]) -> None:
    """Whether a batch may be empty is for the model's signature to say."""
    count = check_shape("FP32", shape, "inputs[0]")
    array = to_array(Tensor("x", "FP32", tuple(shape), bytes(4 * count)))

    assert array.shape == tuple(shape)


@pytest.mark.parametrize("datatype", FIXED)
def test_array_of_tensor_is_view_of_its_bytes(datatype: str) -> None:
    """No copy is made of a tensor of fixed size, in either direction."""
    content = bytes(6 * DATATYPES[datatype].itemsize)

    array = to_array(Tensor("x", datatype, (2, 3), memoryview(content)))
    back = from_array("x", array)

    assert np.shares_memory(array, np.frombuffer(content, np.uint8))
    assert np.shares_memory(array, np.frombuffer(back.data, np.uint8))
    assert (back.datatype, back.shape, bytes(back.data)) == (datatype, (2, 3), content)


@pytest.mark.parametrize("datatype", sorted(set(FIXED) - {"BF16"}))
def test_big_endian_and_strided_arrays_become_little_endian_rows(datatype: str) -> None:
    """The bytes are those of the equal array in the protocol's layout."""
    dtype = DATATYPES[datatype].dtype
    plain = np.arange(6).reshape(2, 3).astype(dtype)
    strided = np.asfortranarray(plain.astype(dtype.newbyteorder(">")))

    tensor = from_array("x", strided)

    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    assert bytes(tensor.data) == plain.tobytes()


def test_bfloat16_array_becomes_bf16_tensor() -> None:
    """Its two bytes are the upper half of the FP32 number."""
    tensor = from_array("x", np.array([1.0, -2.0], dtype=ml_dtypes.bfloat16))

    assert (tensor.datatype, bytes(tensor.data)) == ("BF16", b"\x80\x3f\x00\xc0")
    assert to_array(tensor).tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, np.complex64, "datetime64[s]", "V2", [("a", "<f4")]]
)
def test_dtype_without_name_in_protocol_is_refused(dtype: Any) -> None:
    """The message names the dtype."""
    array = np.zeros(1, dtype=dtype)

    with pytest.raises(Rejected, match=re.escape(array.dtype.name)):
        from_array("x", array)


def test_equal_dtype_of_other_c_type_is_accepted() -> None:
    """`long long` and `long` are two types in NumPy and one in the protocol."""
    assert datatype_of(np.dtype(np.longlong)).name == "INT64"


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "é", ""], dtype=object),
        np.array([b"a", "é".encode(), b""], dtype=object),
        np.array(["a", "é", ""]),
        np.array([b"a", "é".encode(), b""]),
    ],
)
def test_text_and_bytes_arrays_become_bytes_tensors(array: Any) -> None:
    """Text is UTF-8; what comes back is always bytes."""
    tensor = from_array("x", array)

    assert tensor.datatype == "BYTES"
    assert to_array(tensor).tolist() == [b"a", "é".encode(), b""]


def test_bytes_elements_have_little_endian_lengths() -> None:
    """Each length is four bytes, as the protocol's binary extension says."""
    assert join_elements(["é"]) == struct.pack("<I", 2) + "é".encode()


def test_object_array_of_other_than_text_or_bytes_is_refused() -> None:
    """The message says which element, and what it is."""
    with pytest.raises(Rejected, match=r"x\[1\]: expected bytes or str .*, got int"):
        from_array("x", np.array(["a", 1], dtype=object))


def test_large_rows_are_views_of_batch() -> None:
    """Splitting a large output copies nothing."""
    batch = np.ones((4, TUNING.protocol.copied_row_bytes), np.float32)

    _, rows = split_rows("y", batch, [1, 2])

    assert np.shares_memory(batch, np.frombuffer(rows, np.uint8))
    assert bytes(rows) == batch[1:3].tobytes()


@pytest.mark.parametrize(
    "batch",
    [
        np.arange(12, dtype=np.int16).reshape(4, 3),
        np.arange(4, dtype=np.float64),
        np.zeros((4, 0), dtype=np.float32),
        np.arange(24, dtype=">i4").reshape(4, 3, 2),
        np.array(["a", "bc", "", "d"], dtype=object),
    ],
)
def test_batch_is_split_into_tensors_of_its_requests(batch: Any) -> None:
    """Each gets the bytes of its slice; rows beyond are padding."""
    parts = split_rows("y", batch, [1, 2])

    expected = [from_array("y", batch[0:1]), from_array("y", batch[1:3])]
    assert [bytes(part) for part in parts] == [bytes(each.data) for each in expected]


@pytest.mark.parametrize("batch", [np.zeros((2, 3), np.float32), np.zeros((), np.float32)])
def test_splitting_batch_of_too_few_rows_is_refused(batch: Any) -> None:
    """The model has broken its promise; nobody gets another's rows."""
    with pytest.raises(ValueError, match="y: expected 3 rows"):
        split_rows("y", batch, [1, 2])


def test_tensor_of_largest_rank_is_accepted() -> None:
    """`MAX_RANK` itself is within the limit."""
    shape = [1] * MAX_RANK

    check_tensor("FP32", shape, bytes(4), "inputs[0]")

    assert math.prod(shape) == check_shape("FP32", shape, "inputs[0]")


def test_tensor_elements_are_in_row_major_order() -> None:
    """The shape of a `BYTES` tensor is restored over them."""
    tensor = Tensor("x", "BYTES", (2, 2), join_elements([b"a", b"b", b"c", b"d"]))

    assert split_elements(tensor) == [b"a", b"b", b"c", b"d"]
    assert to_array(tensor).tolist() == [[b"a", b"b"], [b"c", b"d"]]
