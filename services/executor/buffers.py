"""Buffers: gather requests' tensors into one run's arrays, and scatter its outputs to the requests.

An instance gathers into two host blocks alternately, so that the next batch can be gathered while
one computes. A block has a part for each input, sized by the model's tensors, and is not
reallocated once the largest batch has been seen. It returns the same arrays for the same rows and
shapes (`headrace.models.backends.port.ReusedInputs`), so that a backend binds their addresses once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.models.backends.port import Arrays, ReusedInputs
from headrace.models.inputs.padding import cut, pad
from headrace.models.signature import Signature
from headrace.primitives.bounded_cache import BoundedCache
from headrace.protocol.messages import (
    IngestedRequest,
    Request,
    TensorMetadata,
    find_runs,
)
from headrace.protocol.tensors import DATATYPES, datatype_of, from_array, split_rows, to_array
from headrace.tuning import TUNING, ExecutorTuning

_ALIGNMENT_BYTES = 64
_described: BoundedCache[tuple[TensorMetadata, ...], tuple[TensorMetadata, ...]] = BoundedCache(
    TUNING.protocol.cached_output_metadata
)
"""One object for equal outputs of different runs, which later steps look for."""

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class _BlockLayout(NamedTuple):
    arrays: ReusedInputs
    targets: tuple[memoryview, ...]


class HostBlock:
    """Memory for the inputs of one batch.

    Args:
        signature: signature of a model for which `fits` is true.
        rows: rows of the largest batch.
        limit_bytes: upper bound of a part; larger inputs are not gathered here.
    """

    def __init__(
        self,
        signature: Signature,
        rows: int,
        limit_bytes: int,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        self._names = [spec.name for spec in signature.inputs]
        self._datatypes = [DATATYPES[spec.datatype] for spec in signature.inputs]
        self._batched = signature.batched
        self._limit_bytes = limit_bytes
        self._in_place_min_bytes = tuning.in_place_min_bytes
        self._copy_each_min_bytes = tuning.copy_each_min_bytes
        self._max_layouts = tuning.max_host_layouts
        self._layouts: dict[Shapes, _BlockLayout] = {}
        self._memory = [
            _aligned(min(limit_bytes, _known_bytes(spec.shape, datatype.itemsize, rows)))
            for spec, datatype in zip(signature.inputs, self._datatypes, strict=True)
        ]

    @staticmethod
    def fits(signature: Signature) -> bool:
        """Return True if the elements of all inputs have a fixed size."""
        return all(DATATYPES[spec.datatype].itemsize for spec in signature.inputs)

    def gather(self, requests: Sequence[IngestedRequest]) -> ReusedInputs | None:
        """Return the inputs of one run, with the requests' rows in order; None if they are not
        gathered here: they are too large, or a single request costs less where it is.

        Overwrites the batch gathered before.

        Args:
            requests: requests of one shape class, checked against the signature.
        """
        if len(requests) == 1 and requests[0].size_bytes >= self._in_place_min_bytes:
            return None
        shapes = self._shapes_of(requests)
        layout = self._layouts.get(shapes) or self._make_layout(shapes)
        if layout is None:
            return None
        for position, target in enumerate(layout.targets):
            copy_rows(requests, position, target, self._copy_each_min_bytes)
        return layout.arrays

    def _shapes_of(self, requests: Sequence[IngestedRequest]) -> Shapes:
        first = requests[0].inputs
        if not self._batched:
            return tuple([tensor.shape for tensor in first])
        rows = sum([request.rows for request in requests])
        return tuple([(rows, *tensor.shape[1:]) for tensor in first])

    def _make_layout(self, shapes: Shapes) -> _BlockLayout | None:
        """Create the arrays for new shapes; return None if an input is too large."""
        arrays = ReusedInputs()
        targets: list[memoryview] = []
        for position, shape in enumerate(shapes):
            datatype = self._datatypes[position]
            size_bytes = math.prod(shape) * datatype.itemsize
            if size_bytes > self._limit_bytes:
                return None
            if size_bytes > self._memory[position].size:
                self._grow(position, size_bytes)
            memory = self._memory[position][:size_bytes]
            arrays[self._names[position]] = memory.view(datatype.dtype).reshape(shape)
            targets.append(memory.data)
        if len(self._layouts) >= self._max_layouts:
            self._layouts.clear()
        layout = self._layouts[shapes] = _BlockLayout(arrays, tuple(targets))
        return layout

    def _grow(self, position: int, size_bytes: int) -> None:
        larger = max(size_bytes, 2 * self._memory[position].size)
        self._memory[position] = _aligned(min(self._limit_bytes, larger))
        self._layouts.clear()


def copy_rows(
    requests: Sequence[IngestedRequest], position: int, target: memoryview, each_min_bytes: int
) -> None:
    """Copy one input of all requests, in order, into memory of exactly their size.

    Tensors of at least `each_min_bytes` are copied one by one; smaller ones are joined first.
    """
    contents = _contents(requests, position)
    if len(contents[0]) < each_min_bytes:
        target[:] = b"".join(contents)
        return
    start = 0
    for content in contents:
        stop = start + len(content)
        target[start:stop] = content
        start = stop


def _contents(requests: Sequence[IngestedRequest], position: int) -> Sequence[memoryview | bytes]:
    """Return the bytes of one input of each request."""
    contents: list[memoryview | bytes] = []
    for chunk, places in find_runs(requests):
        part = slice(places.start, places.stop)
        if chunk is None:
            contents += [request.inputs[position].data for request in requests[part]]
        else:
            contents += chunk.data(position, part)
    return contents


def _known_bytes(shape: Sequence[int], itemsize: int, rows: int) -> int:
    """Return the size of an input of the largest batch, with 1 for each free dimension."""
    return rows * itemsize * math.prod(size for size in shape[1:] if size > 0)


def _aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory aligned for vector instructions."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes]


def gather(
    requests: Sequence[Request], signature: Signature, block: HostBlock | None = None
) -> dict[str, NDArray[np.generic]]:
    """Return the inputs of one run, with the requests' rows in order.

    The requests are of one shape class. Their rows are copied once, into the block if there is one
    and it takes them; a single request is otherwise not copied.

    Raises:
        Rejected: see `fit_inputs`.
    """
    fit_inputs(requests, signature)
    if signature.buckets:
        for request in requests:
            request.restore()
        pad(requests, signature)
    if len(requests) > 1 and any(-1 in spec.shape[1:] for spec in signature.inputs):
        _require_equal_rows(requests)
    placed = None if block is None else block.gather(requests)
    if placed is not None:
        return placed
    for request in requests:
        request.restore()
    if len(requests) == 1:
        (request,) = requests
        shape = request.inputs[0].shape
        if signature.batched and shape[:1] != (request.rows,):
            raise _misfit(f"{request.rows} rows", f"shape {list(shape)}")
        return {tensor.name: to_array(tensor) for tensor in request.inputs}
    return _join(requests, signature)


def fit_inputs(requests: Sequence[IngestedRequest], signature: Signature) -> None:
    """Bring the inputs of requests into the order of the signature.

    They were checked against a version of the same number. Its files may have been others: those
    before a reload, or those that the process with ingest has read.

    Raises:
        Rejected: `MODEL_NOT_READY`: the inputs of one have other names or datatypes.
    """
    specs = signature.inputs
    # Whole columns are compared first: that costs a third of looking at each request.
    columns = [request.inputs for request in requests]
    if {*map(len, columns)} == {len(specs)} and all(
        {inputs[place][0] for inputs in columns} == {spec.name}
        and {inputs[place][1] for inputs in columns} == {spec.datatype}
        for place, spec in enumerate(specs)
    ):
        return
    expected = {spec.name: spec.datatype for spec in specs}
    for request in requests:
        request.restore()
        found = {tensor.name: tensor for tensor in request.inputs}
        if {name: tensor.datatype for name, tensor in found.items()} != expected:
            got = _list_inputs(tensor[:2] for tensor in request.inputs)
            raise _misfit(_list_inputs(expected.items()), got)
        request.inputs = tuple([found[name] for name in expected])
        request.item = request.places = None  # they name the inputs in the former order


def _require_equal_rows(requests: Sequence[IngestedRequest]) -> None:
    """Refuse requests whose rows have different sizes: they share a shape class by the lengths to
    which they were padded with other files.
    """
    first = [tensor[2][1:] for tensor in requests[0].inputs]
    for request in requests:
        if [tensor[2][1:] for tensor in request.inputs] != first:
            raise _misfit("the same size of a row in all requests of a batch", "others")


def _list_inputs(inputs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {datatype}" for name, datatype in inputs)


def _misfit(expected: str, got: str) -> Rejected:
    return Rejected(
        Code.MODEL_NOT_READY,
        f"inputs: expected {expected}, got {got}",
        retry_after_ms=TUNING.transport.rebind_retry_after_ms,
    )


def _join(
    requests: Sequence[IngestedRequest], signature: Signature
) -> dict[str, NDArray[np.generic]]:
    """Return the requests' rows joined in new memory."""
    rows = sum(request.rows for request in requests)
    arrays: dict[str, NDArray[np.generic]] = {}
    for position, spec in enumerate(signature.inputs):
        head = requests[0].inputs[position]
        datatype = DATATYPES[spec.datatype]
        if datatype.itemsize == 0:
            parts = [to_array(request.inputs[position]) for request in requests]
            arrays[spec.name] = np.concatenate(parts)
            continue
        joined = b"".join([request.inputs[position].data for request in requests])
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
    metadata: dict[int, tuple[TensorMetadata, ...]] = {}
    data: Iterable[tuple[bytes | memoryview, ...]] = zip(*columns, strict=True)
    for request, own in zip(requests, data, strict=True):
        described = metadata.get(request.rows)
        if described is None:
            described = _describe_outputs(signature, outputs, request.rows, metadata)
        request.output_metadata = described
        request.output_data = own
        wanted = request.wanted
        if wanted is not None:
            request.outputs = tuple([one for one in request.outputs or () if one.name in wanted])
    if signature.buckets:
        cut(requests, signature)
    for request in requests:  # last: a run whose outputs cannot be divided is repeated in halves
        request.inputs = ()


def _describe_outputs(
    signature: Signature,
    outputs: Arrays,
    rows: int,
    shared: dict[int, tuple[TensorMetadata, ...]],
) -> tuple[TensorMetadata, ...]:
    """Return the outputs' metadata for this row count, and share it unless an output is BYTES."""
    found: list[TensorMetadata] = []
    has_bytes = False
    for spec in signature.outputs:
        array = outputs[spec.name]
        datatype = datatype_of(array.dtype, spec.name)
        has_bytes = has_bytes or not datatype.itemsize
        shape = (rows, *array.shape[1:]) if signature.batched else array.shape
        found.append((spec.name, datatype.name, shape))
    metadata = tuple(found)
    if not has_bytes:
        metadata = _described.get(metadata) or _described.add(metadata, metadata)
        shared[rows] = metadata
    return metadata
