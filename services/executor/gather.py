"""Many requests' tensors into one run's arrays, and the run's outputs back into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.messages import Request, Tensor
from headrace.models.backend import Arrays
from headrace.models.signature import Signature
from headrace.tensors import DATATYPES, from_array, split_rows, to_array


def gather(requests: Sequence[Request], signature: Signature) -> dict[str, NDArray[np.generic]]:
    """The inputs of one run, each request's rows after the other's.

    The requests are of one shape class. A single request's bytes are used where they lie; those
    of several are copied once.
    """
    first = requests[0]
    if len(requests) == 1:
        return {tensor.name: to_array(tensor) for tensor in first.inputs}
    rows = sum(request.rows for request in requests)
    arrays: dict[str, NDArray[np.generic]] = {}
    for place, spec in enumerate(signature.inputs):
        head = first.inputs[place]
        datatype = DATATYPES[spec.datatype]
        if datatype.itemsize == 0:
            parts = [to_array(request.inputs[place]) for request in requests]
            arrays[spec.name] = np.concatenate(parts)
            continue
        joined = b"".join([request.inputs[place].data for request in requests])
        arrays[spec.name] = np.frombuffer(joined, dtype=datatype.dtype).reshape(
            rows, *head.shape[1:]
        )
    return arrays


def scatter(requests: Sequence[Request], signature: Signature, outputs: Arrays) -> None:
    """Give each request its rows of the outputs, as views where the datatype allows it."""
    rows = [request.rows for request in requests]
    columns: list[list[Tensor]] = []
    for spec in signature.outputs:
        array = outputs[spec.name]
        if signature.batched:
            columns.append(split_rows(spec.name, array, rows))
        else:
            columns.append([from_array(spec.name, array)])
    for request, tensors in zip(requests, zip(*columns, strict=True), strict=True):
        wanted = request.wanted
        request.outputs = (
            tensors if wanted is None else tuple(one for one in tensors if one.name in wanted)
        )
        request.inputs = ()
