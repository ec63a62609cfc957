"""Runs before the first request: they fill caches, and show what the model cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigurationError
from headrace.models.backend import Arrays
from headrace.models.config import ModelConfig
from headrace.models.signature import Signature, TensorSpec
from headrace.tensors import DATATYPES

Inputs = dict[str, NDArray[Any]]


def warm_up(
    run: Callable[[Arrays], object], signature: Signature, config: ModelConfig, directory: Path
) -> str:
    """Run 1, 2, 4, … rows up to the largest batch; the reason why batching must be off, or "".

    The rows are the first of each sample in `<version>/warmup/*.npz`, or made up where there is
    none: zeros, or the lowest allowed value, with 1 for each free dimension.

    Raises:
        ConfigurationError: a sample does not fit the signature, or one row cannot be run.
    """
    for where, sample in _samples(signature, config, directory / "warmup"):
        for rows in _sizes(sample, signature, config):
            try:
                run(_repeat(sample, rows) if signature.batched else sample)
            except Exception as error:  # a model may raise anything
                if rows == 1:
                    raise ConfigurationError(
                        f"{directory}: warm-up with {where}: {error}"
                    ) from error
                return f"a run of {rows} rows failed at warm-up with {where}: {error}"
    return ""


def sized_inputs(signature: Signature, config: ModelConfig, directory: Path, rows: int) -> Inputs:
    """The first sample, or what is made up in its place, with so many rows.

    Raises:
        ConfigurationError: the sample does not fit the signature.
    """
    _, sample = next(_samples(signature, config, directory / "warmup"))
    return _repeat(sample, rows) if signature.batched else sample


def _sizes(sample: Inputs, signature: Signature, config: ModelConfig) -> Iterator[int]:
    """Powers of two, and the limit itself."""
    limit = 1
    if signature.batched:
        row_bytes = sum(array[:1].nbytes for array in sample.values())
        limit = max(1, min(config.max_batch_size, config.max_batch_bytes // max(1, row_bytes)))
    size = 1
    while size < limit:
        yield size
        size *= 2
    yield limit


def _repeat(sample: Inputs, rows: int) -> Inputs:
    return {name: np.repeat(array[:1], rows, axis=0) for name, array in sample.items()}


def _samples(
    signature: Signature, config: ModelConfig, directory: Path
) -> Iterator[tuple[str, Inputs]]:
    paths = sorted(directory.glob("*.npz"))
    for path in paths:
        yield f"warmup/{path.name}", _read_sample(path, signature)
    if not paths:
        made_up = {spec.name: _made_up(spec, config) for spec in signature.inputs}
        yield "made-up inputs (put real ones into warmup/*.npz)", made_up


def _read_sample(path: Path, signature: Signature) -> Inputs:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            sample = dict(arrays)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    for spec in signature.inputs:
        array = sample.get(spec.name)
        if array is None:
            raise ConfigurationError(f"{path}: expected {spec.name}, got {', '.join(sample)}")
        fits = array.ndim == len(spec.shape) and all(
            size in (-1, given) for size, given in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or (signature.batched and not array.shape[0]):
            raise ConfigurationError(
                f"{path}: {spec.name}: expected {list(spec.shape)}, got {list(array.shape)}"
            )
        if spec.datatype == "BYTES":
            sample[spec.name] = _as_bytes(array)
        elif array.dtype != DATATYPES[spec.datatype].dtype:
            raise ConfigurationError(
                f"{path}: {spec.name}: expected {spec.datatype}, got {array.dtype}"
            )
    return {spec.name: np.ascontiguousarray(sample[spec.name]) for spec in signature.inputs}


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """NumPy's fixed-width strings, which is what a file can hold, as an object array of bytes."""
    encoded = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
    return encoded.astype(object)


def _made_up(spec: TensorSpec, config: ModelConfig) -> NDArray[Any]:
    shape = tuple(1 if size == -1 else size for size in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    low, high = config.range.get(spec.name, (0, 0))
    value = 0 if low <= 0 <= high else low
    return np.full(shape, value, DATATYPES[spec.datatype].dtype)
