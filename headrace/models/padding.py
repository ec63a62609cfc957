"""Padding to a few lengths, so that requests of different lengths share batches.

For models that carry a mask: what it leaves out does not count, so that a text of 50 tokens gives
the same in 64 places as in 50. `sequence_buckets` in `model.toml` says which lengths there are, and
`pad.<input>` what stands in the places that are added; for the mask that is 0. Every free dimension
besides the batch goes up to the next length; longer ones stay as they are.

A request is padded when its batch is gathered, to the length of its shape class, which is its own
and not that of its mates: with whom it runs changes nothing. Its outputs are cut back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig
from headrace.models.ranges import limits_of
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.messages import Request, Tensor
from headrace.protocol.tensors import DATATYPES, from_array, to_array

Sizes = dict[str, tuple[int, int]]
"""By dimension: its size in the batch, and the request's own."""
_UNKNOWN = (-1, -1)


def with_padding(signature: Signature, config: ModelConfig) -> Signature:
    """The signature with what `model.toml` says of padding.

    Raises:
        ConfigurationError: an input with a free dimension has no value to be padded with, another
            one has a value, or cannot hold it, or the mask is none of them.
    """
    if not config.sequence_buckets:
        return signature
    if not signature.batched:
        raise ConfigurationError(f"sequence_buckets: {signature.unbatched_reason}")
    free = [spec.name for spec in signature.inputs if any(_free_axes(spec))]
    for name in free:
        if name not in config.pad:
            raise ConfigurationError(f"pad.{name}: expected a value, since {name} is padded")
    for name, value in config.pad.items():
        if name not in free:
            told = ", ".join(free) or "none, since no input has a free dimension"
            raise ConfigurationError(f"pad.{name}: expected one of {told}")
        _check_value(next(spec for spec in signature.inputs if spec.name == name), value)
    if config.mask not in free:
        told = f"one of {', '.join(free)}" if free else "an input with a free dimension"
        raise ConfigurationError(f"mask: expected {told}, got {config.mask!r}")
    inputs = tuple(
        spec._replace(pad=config.pad[spec.name]) if spec.name in free else spec
        for spec in signature.inputs
    )
    return signature._replace(inputs=inputs, buckets=tuple(sorted(set(config.sequence_buckets))))


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds a size; the size itself if none does."""
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else size


def pad(requests: Sequence[Request], signature: Signature) -> None:
    """Bring requests to the sizes of their shape class; those that are padded already stay."""
    for request in requests:
        if request.own_sizes is None:
            request.own_sizes = _own_sizes(request, signature)
            request.inputs = tuple(
                _padded(tensor, spec, signature.buckets)
                for tensor, spec in zip(request.inputs, signature.inputs, strict=True)
            )


def cut(requests: Sequence[Request], signature: Signature) -> None:
    """Give requests their outputs in the sizes that their inputs had."""
    specs = {spec.name: spec for spec in signature.outputs}
    for request in requests:
        sizes = request.own_sizes
        assert sizes is not None, "cut before it was padded"
        if any(padded != own for padded, own in sizes.values()):
            outputs = request.outputs or ()
            request.outputs = tuple(_cut(tensor, specs[tensor.name], sizes) for tensor in outputs)


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
        fits = limits_of(spec.datatype, (value, value)) is not None
    if not fits:
        raise ConfigurationError(
            f"pad.{spec.name}: expected a value of {spec.datatype}, got {value}"
        )


def _free_axes(spec: TensorSpec) -> Iterator[int]:
    """Besides the batch."""
    return (axis for axis, size in enumerate(spec.shape) if axis and size == -1)


def _own_sizes(request: Request, signature: Signature) -> Sizes:
    """By the names of the dimensions. Those without one count together, if they are all equal."""
    sizes: Sizes = {}
    for tensor, spec in zip(request.inputs, signature.inputs, strict=True):
        for axis in _free_axes(spec):
            own = tensor.shape[axis]
            found = (bucket_for(own, signature.buckets), own)
            name = spec.dimension(axis)
            sizes[name] = found if sizes.get(name, found) == found else _UNKNOWN
    return sizes


def _padded(tensor: Tensor, spec: TensorSpec, buckets: Sequence[int]) -> Tensor:
    shape = list(tensor.shape)
    for axis in _free_axes(spec):
        shape[axis] = bucket_for(shape[axis], buckets)
    if tuple(shape) == tensor.shape:
        return tensor
    array = np.full(shape, spec.pad, DATATYPES[spec.datatype].dtype)
    array[tuple(slice(size) for size in tensor.shape)] = to_array(tensor)
    return from_array(tensor.name, array)


def _cut(tensor: Tensor, spec: TensorSpec, sizes: Sizes) -> Tensor:
    shape = list(tensor.shape)
    for axis in _free_axes(spec):
        padded, own = sizes.get(spec.dimension(axis), _UNKNOWN)
        if shape[axis] == padded:
            shape[axis] = own
    if tuple(shape) == tensor.shape:
        return tensor
    array = to_array(tensor)[tuple(slice(size) for size in shape)]
    return from_array(tensor.name, np.ascontiguousarray(array))
