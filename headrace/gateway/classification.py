"""Outputs as their top classes: Triton's classification extension.

A requested output with the parameter `classification` is answered as BYTES of the form
`<value>:<index>[:<label>]`, the largest value first. Source:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.models.answers import find_largest
from headrace.protocol.codec.faults import shown
from headrace.protocol.messages import Parameter
from headrace.tuning import TUNING

CLASSIFICATION = "classification"


def take_class_count(parameters: dict[str, Parameter], where: str) -> int:
    """Remove `classification` from the parameters of an output and return it; 0 if there is none.

    Raises:
        Rejected: `INVALID_REQUEST`: it is no number of classes.
    """
    limit = TUNING.gateway.max_classes
    count = parameters.pop(CLASSIFICATION, 0)
    if type(count) is not int or not 0 <= count <= limit:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            f"{where}.parameters.{CLASSIFICATION}",
            expected=f"an integer from 0 to {limit}",
            got=shown(count),
        )
    return count


def classify(
    name: str, array: NDArray[Any], count: int, *, batched: bool, labels: Sequence[bytes] = ()
) -> NDArray[Any]:
    """Return the `count` largest elements of each row, or all of them if there are fewer.

    Equal values are in the order of their indices, and NaN come after all others. The elements of a
    row count as one list, whatever its dimensions. Values are written in the shortest form that
    gives them back.

    Args:
        name: of the output.
        array: of numbers.
        count: at least 1.
        batched: whether dimension 0 has the rows; otherwise the array is one row.
        labels: by index; an index beyond them has none.

    Returns:
        An object array of bytes, of the shape [rows, count], or [count] without a batch dimension.

    Raises:
        Rejected: `INVALID_REQUEST`: the elements are texts or truth values.
    """
    if array.dtype.kind in "ObSU":
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            f"{CLASSIFICATION} of {name}",
            expected="an output of numbers",
            got="BOOL" if array.dtype.kind == "b" else "BYTES",
        )
    rows = array.reshape(array.shape[0] if batched else 1, -1)
    classes = np.empty((len(rows), min(count, rows.shape[1])), dtype=object)
    for number, row in enumerate(rows):
        for place, index in enumerate(find_largest(row, count).tolist()):
            text = f"{row[index]!s}:{index}".encode()
            if index < len(labels):
                text += b":" + labels[index]
            classes[number, place] = text
    return classes if batched else classes[0]
