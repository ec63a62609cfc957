"""Gather requests' tensors into one run's arrays, and scatter its outputs to the requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.backends.port import Arrays
from headrace.models.inputs.padding import cut, pad
from headrace.models.signature import Signature
from headrace.protocol.messages import Head, Request
from headrace.protocol.tensors import DATATYPES, datatype_of, from_array, split_rows, to_array
from headrace.services.executor.blocks import HostBlock


def gather(
    requests: Sequence[Request], signature: Signature, block: HostBlock | None = None
) -> dict[str, NDArray[np.generic]]:
    """Return the inputs of one run, with the requests' rows in order.

    The requests are of one shape class. Their rows are copied once, into the block if there is one
    and it takes them; a single request is otherwise not copied.
    """
    if signature.buckets:
        pad(requests, signature)
    placed = None if block is None else block.gather(requests)
    if placed is not None:
        return placed
    if len(requests) == 1:
        return {tensor.name: to_array(tensor) for tensor in requests[0].inputs}
    return _joined(requests, signature)


def _joined(requests: Sequence[Request], signature: Signature) -> dict[str, NDArray[np.generic]]:
    """Return the requests' rows joined in new memory."""
    rows = sum(request.rows for request in requests)
    arrays: dict[str, NDArray[np.generic]] = {}
    for place, spec in enumerate(signature.inputs):
        head = requests[0].inputs[place]
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
    """Give each request its rows of the outputs."""
    rows = [request.rows for request in requests]
    columns: list[list[bytes] | list[memoryview] | list[bytes | memoryview]] = []
    for spec in signature.outputs:
        array = outputs[spec.name]
        if signature.batched:
            columns.append(split_rows(spec.name, array, rows))
        else:
            columns.append([from_array(spec.name, array).data])
    heads = _Heads(signature, outputs)
    contents: Iterable[tuple[bytes | memoryview, ...]] = zip(*columns, strict=True)
    for request, own in zip(requests, contents, strict=True):
        request.heads = heads[request.rows]
        request.contents = own
        request.inputs = ()
        wanted = request.wanted
        if wanted is not None:
            request.outputs = tuple([one for one in request.outputs or () if one.name in wanted])
    if signature.buckets:
        cut(requests, signature)


class _Heads(dict[int, tuple[Head, ...]]):
    """Cache of output headers (name, datatype, shape) by row count; not for BYTES outputs."""

    def __init__(self, signature: Signature, outputs: Arrays) -> None:
        self._batched = signature.batched
        self._arrays = [(spec.name, outputs[spec.name]) for spec in signature.outputs]

    def __missing__(self, rows: int) -> tuple[Head, ...]:
        heads = tuple([self._head(rows, name, array) for name, array in self._arrays])
        if "BYTES" not in [datatype for _, datatype, _ in heads]:
            self[rows] = heads
        return heads

    def _head(self, rows: int, name: str, array: NDArray[Any]) -> Head:
        shape = (rows, *array.shape[1:]) if self._batched else array.shape
        return name, datatype_of(array.dtype, name).name, shape
