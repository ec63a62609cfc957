"""Parsing of the inputs of `headrace infer` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Rejected
from headrace.protocol.tensors import DATATYPES, datatype_of

# JSON has only one number type. A fraction usually means FP32, which NumPy would not choose.
_DEFAULT_DATATYPES = {"f": "FP32", "i": "INT64", "b": "BOOL", "U": "BYTES"}


def parse_input(text: str) -> tuple[str, NDArray[Any]]:
    """Parse `NAME=JSON` or `NAME=@FILE.npy` to a named array.

    `NAME:DATATYPE=…` converts to a datatype of the Open Inference Protocol. Without one, an array
    file keeps its own, and JSON becomes FP32 (any fraction), INT64, BOOL or BYTES.

    Raises:
        ValueError: another form, an unreadable file, not an array, or an unknown datatype.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"expected NAME=JSON or NAME=@FILE.npy, got {text!r}")
    name, datatype = _split_datatype(name)
    array = _from_file(Path(value[1:])) if value.startswith("@") else _from_json(value)
    if datatype is None and not value.startswith("@"):
        datatype = _DEFAULT_DATATYPES.get(array.dtype.kind)
        if datatype is None:
            raise ValueError(f"{name}: expected numbers, booleans or strings, got {value}")
    return name, array if datatype is None else _converted(name, array, datatype)


def parse_inputs(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> dict[str, NDArray[Any]]:
    """Parse the inputs of an option, which must have different names; a click callback."""
    inputs: dict[str, NDArray[Any]] = {}
    for text in texts:
        try:
            name, array = parse_input(text)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if name in inputs:
            raise click.BadParameter(f"{name}: expected each input once", ctx, param)
        inputs[name] = array
    return inputs


def _split_datatype(name: str) -> tuple[str, str | None]:
    # Names such as `input:0` contain colons.
    before, colon, last = name.rpartition(":")
    return (before, last) if colon and before and last in DATATYPES else (name, None)


def _from_json(text: str) -> NDArray[Any]:
    try:
        return np.array(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON or @FILE.npy, got {text!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"expected rows of equal length in {text!r}: {error}") from error


def _from_file(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected an array written by numpy.save: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: expected one array in .npy, got an archive")  # noqa: TRY004 - a value of the user's, not a type
    try:
        datatype_of(array.dtype, str(path))
    except Rejected as error:
        raise ValueError(error.message) from error
    return array


def _converted(name: str, array: NDArray[Any], datatype: str) -> NDArray[Any]:
    if datatype == "BYTES":
        return array.astype(np.str_).astype(object) if array.dtype != object else array
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # is looked for below
            converted = array.astype(DATATYPES[datatype].dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: expected values of {datatype}: {error}") from error
    if array.dtype.kind in "iuf":
        is_whole = converted.dtype.kind in "biu"
        changed = converted != array if is_whole else np.isinf(converted) & np.isfinite(array)
        if changed.any():
            raise ValueError(f"{name}: expected values within {datatype}, got others")
    return converted
