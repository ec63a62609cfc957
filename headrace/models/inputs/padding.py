"""Padding to a few lengths, so that requests of different lengths share batches.

This is for models with a mask: masked positions do not count, so a text of 50 tokens gives the same
result in 64 positions as in 50. `sequence_buckets` in `model.toml` lists the lengths, and
`pad.<input>` sets the padding value; for the mask it is 0. Every free dimension except the batch is
padded to the next length; sizes above the largest length stay as they are.

A request is padded when its batch is gathered, to the length of its own shape class, independent of
the other requests, so the composition of the batch changes nothing. Its outputs are cut back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig
from headrace.models.inputs.ranges import clip_range
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.messages import Request, Tensor
from headrace.protocol.tensors import DATATYPES, from_array, to_array

Sizes = dict[str, tuple[int, int]]
"""Size in the batch and the request's own size, by dimension."""
_UNKNOWN = (-1, -1)


def add_padding(signature: Signature, config: ModelConfig) -> Signature:
    """Return the signature with the padding of `model.toml`.

    Raises:
        ConfigurationError: an input with a free dimension, other than the mask, has no padding
            value; another input has one; the value does not fit the datatype; or the mask is not an
            input with a free dimension.
    """
    if not config.sequence_buckets:
        return signature
    if not signature.batched:
        raise ConfigurationError(f"sequence_buckets: {signature.unbatched_reason}")
    free = [spec.name for spec in signature.inputs if any(_list_free_axes(spec))]
    if config.mask not in free:
        names = f"one of {', '.join(free)}" if free else "an input with a free dimension"
        raise ConfigurationError(f"mask: expected {names}, got {config.mask!r}")
    values = {config.mask: 0.0, **config.pad}
    for name in free:
        if name not in values:
            raise ConfigurationError(f"pad.{name}: expected a value, since {name} is padded")
    for name, value in values.items():
        if name not in free:
            raise ConfigurationError(f"pad.{name}: expected one of {', '.join(free)}")
        _check_value(next(spec for spec in signature.inputs if spec.name == name), value)
    inputs = tuple(
        spec._replace(pad=values[spec.name]) if spec.name in free else spec
        for spec in signature.inputs
    )
    return signature._replace(inputs=inputs, buckets=tuple(sorted(set(config.sequence_buckets))))


def find_bucket(size: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds a size; the size itself if there is none."""
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else size


def pad(requests: Sequence[Request], signature: Signature) -> None:
    """Pad requests to the sizes of their shape class; already padded ones are left unchanged."""
    for request in requests:
        if request.own_sizes is None:
            request.own_sizes = _own_sizes(request, signature)
            request.inputs = tuple(
                _pad_tensor(tensor, spec, signature.buckets)
                for tensor, spec in zip(request.inputs, signature.inputs, strict=True)
            )


def cut(requests: Sequence[Request], signature: Signature) -> None:
    """Cut the outputs of requests back to the sizes of their inputs."""
    specs = {spec.name: spec for spec in signature.outputs}
    for request in requests:
        sizes = request.own_sizes
        assert sizes is not None, "cut before it was padded"
        if any(padded != own for padded, own in sizes.values()):
            outputs = request.outputs or ()
            request.outputs = tuple(
                _cut_tensor(tensor, specs[tensor.name], sizes) for tensor in outputs
            )


def _check_value(spec: TensorSpec, value: float) -> None:
    datatype = DATATYPES[spec.datatype]
    if not datatype.itemsize:
        raise ConfigurationError(f"pad.{spec.name}: {spec.datatype} cannot be padded")
    dtype = datatype.dtype
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = value == int(value) and limits.min <= value <= limits.max
    elif dtype.kind == "b":
        fits = value in (0, 1)
    else:
        fits = clip_range(spec.datatype, (value, value)) is not None
    if not fits:
        raise ConfigurationError(
            f"pad.{spec.name}: expected a value of {spec.datatype}, got {value}"
        )


def _list_free_axes(spec: TensorSpec) -> Iterator[int]:
    """Return the free axes except the batch."""
    return (axis for axis, size in enumerate(spec.shape) if axis and size == -1)


def _own_sizes(request: Request, signature: Signature) -> Sizes:
    """Return the sizes by dimension name. Equal sizes of unnamed dimensions count as one."""
    sizes: Sizes = {}
    for tensor, spec in zip(request.inputs, signature.inputs, strict=True):
        for axis in _list_free_axes(spec):
            own = tensor.shape[axis]
            found = (find_bucket(own, signature.buckets), own)
            name = spec.dimension(axis)
            sizes[name] = found if sizes.get(name, found) == found else _UNKNOWN
    return sizes


def _pad_tensor(tensor: Tensor, spec: TensorSpec, buckets: Sequence[int]) -> Tensor:
    shape = list(tensor.shape)
    for axis in _list_free_axes(spec):
        shape[axis] = find_bucket(shape[axis], buckets)
    if tuple(shape) == tensor.shape:
        return tensor
    array = np.full(shape, spec.pad, DATATYPES[spec.datatype].dtype)
    array[tuple(slice(size) for size in tensor.shape)] = to_array(tensor)
    return from_array(tensor.name, array)


def _cut_tensor(tensor: Tensor, spec: TensorSpec, sizes: Sizes) -> Tensor:
    shape = list(tensor.shape)
    for axis in _list_free_axes(spec):
        padded, own = sizes.get(spec.dimension(axis), _UNKNOWN)
        if shape[axis] == padded:
            shape[axis] = own
    if tuple(shape) == tensor.shape:
        return tensor
    array = to_array(tensor)[tuple(slice(size) for size in shape)]
    return from_array(tensor.name, np.ascontiguousarray(array))
