"""The top classes of an output: which they are, in which order, and how they are written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Rejected
from headrace.gateway.classification import classify, take_class_count


def of_row(values: list[Any], count: int, dtype: Any = np.float32) -> list[bytes]:
    """Classify one row."""
    found: list[bytes] = classify("y", np.array(values, dtype), count, batched=False).tolist()
    return found


def test_classes_come_largest_first_with_labels() -> None:
    """Each row of a batch by itself; a class beyond the labels has none."""
    array = np.array([[1, 5, 10, 4], [7, 0, 0, 9]], np.int32)

    found = classify("y", array, 2, batched=True, labels=[b"a", b"b", b"apple"])

    assert found.shape == (2, 2)
    assert found.tolist() == [[b"10:2:apple", b"5:1:b"], [b"9:3", b"7:0:a"]]


def test_equal_values_come_by_index() -> None:
    """The lowest indices are taken if more values are equal than are wanted."""
    assert of_row([2, 7, 7, 2, 7], 2) == [b"7.0:1", b"7.0:2"]


def test_nan_comes_last() -> None:
    """After the infinities, by index."""
    found = of_row([np.nan, -np.inf, 1, np.nan, np.inf], 5)

    assert found == [b"inf:4", b"1.0:2", b"-inf:1", b"nan:0", b"nan:3"]


def test_more_classes_than_elements_gives_all() -> None:
    """The answer has as many classes as there are; the dimensions of a row do not matter."""
    found = classify("y", np.zeros((2, 1, 3), np.uint8), 10, batched=True)

    assert found.tolist() == [[b"0:0", b"0:1", b"0:2"]] * 2


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (np.uint64, [2**64 - 1, 0], b"18446744073709551615:0"),
        (np.int8, [-128, 127], b"127:1"),
        (np.float16, [0.1, 0.2], b"0.2:1"),
        (ml_dtypes.bfloat16, [0.5, -2], b"0.5:0"),
        (np.float32, [0.1, 1e-9], b"0.1:0"),
        (np.float64, [-0.1, 1 / 3], b"0.3333333333333333:1"),
    ],
)
def test_value_is_written_in_shortest_form(
    dtype: Any, values: list[float], expected: bytes
) -> None:
    """Numbers of every kind are written over their whole range."""
    assert of_row(values, 1, dtype) == [expected]


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(1, 25))
def test_classes_are_those_of_full_sort(values: list[float], count: int) -> None:
    """The same as if all elements were sorted."""
    array = np.array(values, np.float32)
    order = sorted(range(len(values)), key=lambda i: (np.isnan(array[i]), -array[i], i))
    expected = [f"{array[i]!s}:{i}".encode() for i in order[:count]]

    assert of_row(values, count) == expected


@pytest.mark.parametrize("dtype", [np.bool_, object])
def test_output_without_numbers_is_refused(dtype: Any) -> None:
    """The sentence names the output."""
    with pytest.raises(Rejected, match="classification of y: expected an output of numbers"):
        of_row([True], 1, dtype)


@pytest.mark.parametrize("count", [-1, 1001, 2.0, "3", True])
def test_bad_number_of_classes_is_refused(count: Any) -> None:
    """The sentence names the parameter and its place."""
    with pytest.raises(Rejected, match=r"outputs\[0\]\.parameters\.classification"):
        take_class_count({"classification": count}, "outputs[0]")
