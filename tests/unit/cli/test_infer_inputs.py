"""Inputs as they are written on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.cli.infer_inputs import parse_input


@pytest.mark.parametrize(
    ("text", "dtype", "values"),
    [
        ("x=[[1, 2]]", np.int64, [[1, 2]]),
        ("x=[[1.5, 2]]", np.float32, [[1.5, 2.0]]),
        ("x=[true, false]", np.bool_, [True, False]),
        ("x:FP32=[[1, 2]]", np.float32, [[1.0, 2.0]]),
        ("x:UINT8=[255]", np.uint8, [255]),
        ("x:UINT8=[255.0]", np.uint8, [255]),
        ("x:BOOL=[0, 1.0]", np.bool_, [False, True]),
        ("x:FP16=[Infinity, 0.1]", np.float16, [np.inf, np.float16(0.1)]),
        ("x=7", np.int64, 7),
    ],
)
def test_json_input_becomes_array(text: str, dtype: type[np.generic], values: object) -> None:
    """JSON has the datatype that is named, or the likeliest one."""
    name, array = parse_input(text)
    assert (name, array.dtype) == ("x", np.dtype(dtype))
    np.testing.assert_array_equal(array, values)


def test_string_inputs_become_bytes_elements() -> None:
    """Strings in JSON are elements of a BYTES tensor."""
    _, array = parse_input('text=["größer", "a"]')
    assert array.tolist() == ["größer", "a"]
    assert array.dtype == object


def test_input_names_may_contain_colons() -> None:
    """Only the name of a datatype is split off."""
    assert parse_input("input:0=[1]")[0] == "input:0"
    assert parse_input("input:0:FP32=[1]")[0] == "input:0"


def test_array_files_keep_their_datatype(tmp_path: Path) -> None:
    """A file written by numpy.save is taken as it is."""
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float16))
    name, array = parse_input(f"x=@{tmp_path / 'x.npy'}")
    assert (name, array.shape) == ("x", (2, 3))
    assert array.dtype == np.float16


def test_array_files_are_converted_when_asked(tmp_path: Path) -> None:
    """A datatype in the name converts a file's array."""
    np.save(tmp_path / "x.npy", np.ones(3))
    assert parse_input(f"x:FP32=@{tmp_path / 'x.npy'}")[1].dtype == np.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "expected NAME=JSON"),
        ("=[1]", "expected NAME=JSON"),
        ("x=[1", "expected JSON"),
        ("x=[[1], [2, 3]]", "rows of equal length"),
        ("x={}", "expected numbers, booleans or strings"),
        ("x:UINT8=[256]", "values within UINT8"),
        ("x:INT32=[1.7]", "values within INT32"),
        ("x:INT64=[NaN]", "values within INT64"),
        ("x:FP16=[1e9]", "values within FP16"),
        ("x:BOOL=[0.5]", "values within BOOL"),
        ("x=[1e39]", "values within FP32"),
        ('x:FP32=["a"]', "expected values of FP32"),
        ("x=@nowhere.npy", "nowhere.npy: No such file"),
    ],
)
def test_invalid_input_is_refused(text: str, said: str) -> None:
    """The message says what was expected and what came."""
    with pytest.raises(ValueError, match=said):
        parse_input(text)


def test_pickled_array_files_are_refused(tmp_path: Path) -> None:
    """A file of Python objects is not loaded: it could run code."""
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"x\.npy"):
        parse_input(f"x=@{tmp_path / 'x.npy'}")
