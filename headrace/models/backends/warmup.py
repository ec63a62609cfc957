"""Runs before the first request: they fill caches, and reveal what the model cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from headrace.errors import ConfigurationError, Fatal
from headrace.models.backends.port import Arrays, WarmUp
from headrace.models.backends.warmup_samples import (
    MADE_UP,
    Inputs,
    NotMadeUpError,
    recorded,
    still_row,
)
from headrace.models.config import ModelConfig
from headrace.models.signature import Signature
from headrace.models.user_code import describe, first_line, is_of_user_code
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
        samples = list(_samples(signature, config, directory, tuning))
    except NotMadeUpError as error:
        return WarmUp(omitted=f"{error}; {HOW_TO_GIVE_ROWS}")
    for where, sample in samples:
        for rows, inputs in _sized(sample, signature, config):
            try:
                run(inputs)
            except Fatal:
                raise
            except BaseException as error:  # a model may raise anything
                if not is_of_user_code(error):
                    raise
                told = first_line(describe(error))
                if rows > 1:
                    return WarmUp(f"a run of {rows} rows failed at warm-up with {where}: {told}")
                if where == MADE_UP:
                    return WarmUp(
                        omitted=f"the model fails with {where}: {told}; {HOW_TO_GIVE_ROWS}"
                    )
                raise ConfigurationError(f"{directory}: warm-up with {where}: {told}") from error
    return WarmUp()


def sized_inputs(
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
    _, sample = next(_samples(signature, config, directory, tuning))
    return _repeat(sample, rows) if signature.batched else sample


def all_sizes(
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
    _, sample = next(_samples(signature, config, directory, tuning))
    return _sized(sample, signature, config)


def _samples(
    signature: Signature, config: ModelConfig, directory: Path, tuning: ModelTuning
) -> Iterator[tuple[str, Inputs]]:
    samples = recorded(signature, directory)
    first = next(samples, None)
    yield (MADE_UP, still_row(signature, config, tuning)) if first is None else first
    yield from samples


def _sizes(sample: Inputs, signature: Signature, config: ModelConfig) -> Iterator[int]:
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


def _sized(
    sample: Inputs, signature: Signature, config: ModelConfig
) -> Iterator[tuple[int, Inputs]]:
    for rows in _sizes(sample, signature, config):
        yield rows, _repeat(sample, rows) if signature.batched else sample


def _repeat(sample: Inputs, rows: int) -> Inputs:
    return {name: np.repeat(array[:1], rows, axis=0) for name, array in sample.items()}
