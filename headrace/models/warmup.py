"""Runs before the first request: they fill caches, and show what the model cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from headrace.errors import ConfigurationError
from headrace.models.backend import Arrays
from headrace.models.config import ModelConfig
from headrace.models.samples import MADE_UP, Inputs, recorded, still_row
from headrace.models.signature import Signature


def warm_up(
    run: Callable[[Arrays], object], signature: Signature, config: ModelConfig, directory: Path
) -> str:
    """Run 1, 2, 4, … rows up to the largest batch; the reason why batching must be off, or "".

    The rows are the first of each sample in `<version>/warmup/*.npz`, or made up where there is
    none: zeros, or the lowest allowed value, with 1 for each free dimension.

    Raises:
        ConfigurationError: a sample does not fit the signature, or one row cannot be run.
    """
    for where, sample in _samples(signature, config, directory):
        for rows, inputs in _sized(sample, signature, config):
            try:
                run(inputs)
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
    _, sample = next(_samples(signature, config, directory))
    return _repeat(sample, rows) if signature.batched else sample


def all_sizes(
    signature: Signature, config: ModelConfig, directory: Path
) -> Iterator[tuple[int, Inputs]]:
    """The inputs of a warm-up, by rows: those of the first sample.

    Raises:
        ConfigurationError: the sample does not fit the signature.
    """
    _, sample = next(_samples(signature, config, directory))
    return _sized(sample, signature, config)


def _samples(
    signature: Signature, config: ModelConfig, directory: Path
) -> Iterator[tuple[str, Inputs]]:
    samples = recorded(signature, directory)
    made_up = (f"{MADE_UP} (put real ones into warmup/*.npz)", still_row(signature, config))
    yield next(samples, made_up)
    yield from samples


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


def _sized(
    sample: Inputs, signature: Signature, config: ModelConfig
) -> Iterator[tuple[int, Inputs]]:
    for rows in _sizes(sample, signature, config):
        yield rows, _repeat(sample, rows) if signature.batched else sample


def _repeat(sample: Inputs, rows: int) -> Inputs:
    return {name: np.repeat(array[:1], rows, axis=0) for name, array in sample.items()}
