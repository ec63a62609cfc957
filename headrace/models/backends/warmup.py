"""Runs before the first request: they fill caches, and reveal what the model cannot do.

Their inputs are recorded or made up. Recorded inputs are in `<version>/warmup/*.npz`, with one
array per input, under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import (
    ConfigurationError,
    Fatal,
    HeadraceError,
    NotLoadableHere,
    describe_error,
)
from headrace.models.backends.port import Arrays, WarmUp
from headrace.models.config import ModelConfig
from headrace.models.inputs.ranges import clip_range
from headrace.models.signature import Signature, TensorSpec
from headrace.models.user_code import first_line, is_of_user_code
from headrace.protocol.tensors import DATATYPES
from headrace.tuning import TUNING, ModelTuning

HOW_TO_GIVE_ROWS = "put real rows into warmup/rows.npz of the version, an array for each input"


def warm_up(
    run: Callable[[Arrays], object],
    signature: Signature,
    config: ModelConfig,
    directory: Path,
    tuning: ModelTuning = TUNING.models,
) -> WarmUp:
    """Run 1, 2, 4, … rows up to the largest batch.

    The rows are copies of the first row of each sample in `<version>/warmup/*.npz`. Without samples
    they are made up: zeros, or the lowest allowed value, with 1 for each free dimension. A model
    need not accept made-up rows, so only recorded rows can fail a load.

    Raises:
        ConfigurationError: a recorded sample does not fit the signature, or cannot be run.
        Fatal: the device failed.
    """
    try:
        samples = list(_read_or_make_samples(signature, config, directory, tuning))
    except NoMadeUpInputsError as error:
        return WarmUp(omitted=f"{error}; {HOW_TO_GIVE_ROWS}")
    for where, sample in samples:
        for rows, inputs in _make_batches(sample, signature, config):
            try:
                run(inputs)
            except Fatal:
                raise
            except BaseException as error:  # a model may raise anything
                if not is_of_user_code(error):
                    raise
                text = first_line(describe_error(error))
                if rows > 1:
                    return WarmUp(f"a run of {rows} rows failed at warm-up with {where}: {text}")
                if where == MADE_UP:
                    return WarmUp(
                        omitted=f"the model fails with {where}: {text}; {HOW_TO_GIVE_ROWS}"
                    )
                raise NotLoadableHere(f"{directory}: warm-up with {where}: {text}") from error
    return WarmUp()


def make_sample_batch(
    signature: Signature,
    config: ModelConfig,
    directory: Path,
    rows: int,
    tuning: ModelTuning = TUNING.models,
) -> Inputs:
    """Return the first sample, recorded or made up, with `rows` rows.

    Raises:
        ConfigurationError: the sample does not fit the signature.
        NotMadeUpError: there is no sample, and none can be made up.
    """
    _, sample = next(_read_or_make_samples(signature, config, directory, tuning))
    return _repeat_rows(sample, rows) if signature.batched else sample


def make_sample_batches(
    signature: Signature,
    config: ModelConfig,
    directory: Path,
    tuning: ModelTuning = TUNING.models,
) -> Iterator[tuple[int, Inputs]]:
    """Yield the row counts of a warm-up, each with inputs from the first sample.

    Raises:
        ConfigurationError: the sample does not fit the signature.
        NotMadeUpError: there is no sample, and none can be made up.
    """
    _, sample = next(_read_or_make_samples(signature, config, directory, tuning))
    return _make_batches(sample, signature, config)


def _read_or_make_samples(
    signature: Signature, config: ModelConfig, directory: Path, tuning: ModelTuning
) -> Iterator[tuple[str, Inputs]]:
    samples = read_samples(signature, directory)
    first = next(samples, None)
    yield (MADE_UP, make_neutral_row(signature, config, tuning)) if first is None else first
    yield from samples


def _batch_sizes(sample: Inputs, signature: Signature, config: ModelConfig) -> Iterator[int]:
    """Yield the powers of two below the limit, and the limit itself."""
    limit = 1
    if signature.batched:
        row_bytes = sum(array[:1].nbytes for array in sample.values())
        limit = max(1, min(config.max_batch_size, config.max_batch_bytes // max(1, row_bytes)))
    size = 1
    while size < limit:
        yield size
        size *= 2
    yield limit


def _make_batches(
    sample: Inputs, signature: Signature, config: ModelConfig
) -> Iterator[tuple[int, Inputs]]:
    for rows in _batch_sizes(sample, signature, config):
        yield rows, _repeat_rows(sample, rows) if signature.batched else sample


def _repeat_rows(sample: Inputs, rows: int) -> Inputs:
    return {name: np.repeat(array[:1], rows, axis=0) for name, array in sample.items()}


Inputs = dict[str, NDArray[Any]]

MADE_UP = "made-up inputs"
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)


class NoMadeUpInputsError(HeadraceError):
    """Rows of a model's inputs would be too large to make up."""


def read_samples(signature: Signature, directory: Path) -> Iterator[tuple[str, Inputs]]:
    """Yield the samples of a version, each with its origin.

    Raises:
        ConfigurationError: a file cannot be read, or does not fit the signature.
    """
    for path in sorted((directory / "warmup").glob("*.npz")):
        yield f"warmup/{path.name}", _read_sample(path, signature)


def make_neutral_row(
    signature: Signature, config: ModelConfig, tuning: ModelTuning = TUNING.models
) -> Inputs:
    """Return a row of zeros, or lowest allowed values, with 1 for each free dimension.

    Raises:
        NotMadeUpError: it would be too large.
    """
    _check_row_size(signature, 1, tuning)
    return {
        spec.name: np.full(_row_shape(spec, 1), neutral_value(spec, config), _dtype(spec))
        for spec in signature.inputs
    }


def neutral_value(spec: TensorSpec, config: ModelConfig) -> Any:
    """Return zero, or the lowest allowed value; the empty string for BYTES."""
    if spec.datatype == "BYTES":
        return b""
    limits = clip_range(spec.datatype, config.range.get(spec.name))
    return limits[0] if limits and not limits[0] <= 0 <= limits[1] else 0


def make_distinct_rows(
    signature: Signature,
    config: ModelConfig,
    directory: Path,
    rows: int,
    tuning: ModelTuning = TUNING.models,
) -> Iterator[tuple[str, Inputs]]:
    """Yield candidates of `rows` different rows of one shape class, best first.

    They are the recorded rows, completed with rolled copies. Without recorded rows they are random
    values within the allowed range, for one size of the free dimensions after another. Integers
    without a range are 0 and 1, which every vocabulary has.

    Raises:
        ConfigurationError: see `read_samples`.
        NotMadeUpError: see `make_neutral_row`.
    """
    samples = list(read_samples(signature, directory))
    if samples:
        where, first = samples[0]
        matching = [sample for _, sample in samples if _row_shapes(sample) == _row_shapes(first)]
        yield where, _complete_rows(matching, rows)
        return
    for size in tuning.free_sizes:
        _check_row_size(signature, size, tuning)
        random = np.random.default_rng(tuning.seed)
        yield (
            MADE_UP,
            {
                spec.name: _make_random_values(spec, config, (rows, size), random)
                for spec in signature.inputs
            },
        )
        if all(-1 not in spec.shape[1:] for spec in signature.inputs):
            return


def _read_sample(path: Path, signature: Signature) -> Inputs:
    try:
        # Given a path, NumPy leaves the file open if it is not an archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            sample = dict(arrays)
    except Exception as error:  # from files, archives, headers and memory
        raise ConfigurationError(
            f"{path}: expected arrays as numpy.savez writes them, got {describe_error(error)}"
        ) from error
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
        if spec.datatype == "BYTES" and array.dtype.kind in "SU":
            sample[spec.name] = as_bytes(array)
        elif array.dtype != DATATYPES[spec.datatype].dtype:
            raise ConfigurationError(
                f"{path}: {spec.name}: expected {spec.datatype}, got {array.dtype}"
            )
    rows = {spec.name: len(sample[spec.name]) for spec in signature.inputs if spec.shape}
    if signature.batched and len(set(rows.values())) > 1:
        got = ", ".join(f"{count} of {name}" for name, count in rows.items())
        raise ConfigurationError(f"{path}: expected as many rows of each input, got {got}")
    return {spec.name: np.ascontiguousarray(sample[spec.name]) for spec in signature.inputs}


def as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Convert fixed-width strings, the only kind in a file, to an object array of bytes."""
    encoded = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
    return encoded.astype(object)


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return DATATYPES[spec.datatype].dtype


def _row_shape(spec: TensorSpec, free: int) -> tuple[int, ...]:
    """Return the shape of one row, with size `free` for each free dimension except the batch."""
    rows = tuple(1 if size == -1 else size for size in spec.shape[:1])
    return rows + tuple(free if size == -1 else size for size in spec.shape[1:])


def _check_row_size(signature: Signature, free: int, tuning: ModelTuning) -> None:
    """Refuse to make up arrays that do not fit into memory: a file may declare any dimension."""
    for spec in signature.inputs:
        shape = _row_shape(spec, free)
        itemsize = DATATYPES[spec.datatype].itemsize or tuning.made_up_text_bytes
        size_bytes = math.prod(shape) * itemsize
        if size_bytes > tuning.max_made_up_row_bytes:
            raise NoMadeUpInputsError(
                f"input {spec.name}: expected a row of at most {tuning.max_made_up_row_bytes} "
                f"bytes to make up, got {size_bytes} bytes of {spec.datatype} {list(shape)}"
            )


def _row_shapes(sample: Inputs) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in sample.values()]


def _complete_rows(samples: list[Inputs], rows: int) -> Inputs:
    """Return the first rows of the samples, completed with copies of which the values are rolled.

    All inputs of a row are rolled alike, so every value is one that the model was given once.
    """
    spread: Inputs = {}
    for name in samples[0]:
        there = np.concatenate([sample[name] for sample in samples])[:rows]
        rolled = [np.roll(there[place % len(there)], place // len(there)) for place in range(rows)]
        spread[name] = np.ascontiguousarray(np.stack(rolled))
    return spread


def _make_random_values(
    spec: TensorSpec, config: ModelConfig, sizes: tuple[int, int], random: np.random.Generator
) -> NDArray[Any]:
    rows, free = sizes
    shape = (rows, *_row_shape(spec, free)[1:])
    if spec.datatype == "BYTES":
        texts = [
            random.choice(_LETTERS, 1 + place % 24).tobytes()
            for place in range(_count_elements(shape))
        ]
        array = np.empty(len(texts), dtype=object)
        array[:] = texts
        return array.reshape(shape)
    dtype = _dtype(spec)
    limits = clip_range(spec.datatype, config.range.get(spec.name))
    if dtype.kind not in "iub":
        if limits is None:
            return random.standard_normal(shape).astype(dtype)
        part = random.random(shape)
        # `Generator.uniform` uses the difference of the limits, which may overflow.
        values: NDArray[Any] = limits[0] * (1 - part) + limits[1] * part
        return values.astype(dtype)
    low, high = limits or ((0, 255) if spec.datatype == "UINT8" else (0, 1))
    # 64-bit bounds fit into one of these two types; values cannot be drawn as np.bool_.
    drawn = np.uint64 if dtype.kind == "u" else np.int64
    return random.integers(low, high, shape, endpoint=True, dtype=drawn).astype(dtype)


def _count_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
