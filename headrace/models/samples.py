"""Inputs to try a model with before its first request: recorded ones, or made up.

Recorded ones are in `<version>/warmup/*.npz`, one array for each input by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig
from headrace.models.signature import Signature, TensorSpec
from headrace.tensors import DATATYPES

Inputs = dict[str, NDArray[Any]]

MADE_UP = "made-up inputs"
_FREE_SIZES = (8, 1, 64, 224)
"""What a free dimension other than the batch may be, tried in this order."""
_SEED = 20_180_706
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)


def recorded(signature: Signature, directory: Path) -> Iterator[tuple[str, Inputs]]:
    """The samples of a version, each with where it is from.

    Raises:
        ConfigurationError: a file cannot be read, or does not fit the signature.
    """
    for path in sorted((directory / "warmup").glob("*.npz")):
        yield f"warmup/{path.name}", _read(path, signature)


def still_row(signature: Signature, config: ModelConfig) -> Inputs:
    """Zeros, or the lowest allowed value, with 1 for each free dimension."""
    return {spec.name: _still(spec, config) for spec in signature.inputs}


def distinct_rows(
    signature: Signature, config: ModelConfig, directory: Path, rows: int
) -> Iterator[tuple[str, Inputs]]:
    """Candidates of so many rows of one shape class that differ; the best come first.

    They are the recorded rows, with rolled copies where those are too few; where nothing was
    recorded, random values within the allowed range, for one size of the free dimensions after
    another. Integers without a range are 0 and 1, which every vocabulary has.

    Raises:
        ConfigurationError: see `recorded`.
    """
    samples = list(recorded(signature, directory))
    if samples:
        where, first = samples[0]
        alike = [sample for _, sample in samples if _row_shapes(sample) == _row_shapes(first)]
        yield where, _spread(alike, rows)
        return
    for size in _FREE_SIZES:
        random = np.random.default_rng(_SEED)
        yield (
            MADE_UP,
            {spec.name: _random(spec, config, (rows, size), random) for spec in signature.inputs},
        )
        if all(-1 not in spec.shape[1:] for spec in signature.inputs):
            return


def _read(path: Path, signature: Signature) -> Inputs:
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


def _still(spec: TensorSpec, config: ModelConfig) -> NDArray[Any]:
    shape = tuple(1 if size == -1 else size for size in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    low, high = config.range.get(spec.name, (0, 0))
    value = 0 if low <= 0 <= high else low
    return np.full(shape, value, DATATYPES[spec.datatype].dtype)


def _row_shapes(sample: Inputs) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in sample.values()]


def _spread(samples: list[Inputs], rows: int) -> Inputs:
    """The first rows of the samples; what is missing is made of them by rolling a row's values,
    all inputs alike, so that every value is one that the model was given once.
    """
    spread: Inputs = {}
    for name in samples[0]:
        there = np.concatenate([sample[name] for sample in samples])[:rows]
        rolled = [np.roll(there[place % len(there)], place // len(there)) for place in range(rows)]
        spread[name] = np.ascontiguousarray(np.stack(rolled))
    return spread


def _random(
    spec: TensorSpec, config: ModelConfig, sizes: tuple[int, int], random: np.random.Generator
) -> NDArray[Any]:
    rows, free = sizes
    shape = (rows, *(free if size == -1 else size for size in spec.shape[1:]))
    if spec.datatype == "BYTES":
        texts = [
            random.choice(_LETTERS, 1 + place % 24).tobytes() for place in range(_count(shape))
        ]
        array = np.empty(len(texts), dtype=object)
        array[:] = texts
        return array.reshape(shape)
    dtype = DATATYPES[spec.datatype].dtype
    limits = config.range.get(spec.name)
    if dtype.kind not in "iub":
        values = random.uniform(*limits, shape) if limits else random.standard_normal(shape)
        return values.astype(dtype)
    low, high = limits or ((0, 255) if spec.datatype == "UINT8" else (0, 1))
    return random.integers(int(low), int(high), shape, endpoint=True).astype(dtype)


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
