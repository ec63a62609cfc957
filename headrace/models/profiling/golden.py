"""Golden samples of a version: inputs, and the outputs that it must give before it serves.

Each file `<version>/golden/*.npz` has the arrays of a run: `inputs.NAME` for each input,
`outputs.NAME` for outputs to compare, and optionally `tolerance`, the allowed difference relative
to the output's scale.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigurationError, Fatal, NotLoadableHere, describe_error
from headrace.models.backends.port import Arrays
from headrace.models.backends.warmup import as_bytes
from headrace.models.profiling.batch_safety import output_scale, relative_difference
from headrace.models.signature import Signature


class Golden(NamedTuple):
    """One sample; `tolerance` is None where the version's own holds."""

    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]
    tolerance: float | None


def check_golden_samples(
    run: Callable[[Arrays], Arrays], signature: Signature, directory: Path, tolerance: float
) -> None:
    """Run the golden samples of a version, and compare its outputs with theirs.

    Args:
        run: of a loaded backend.
        signature: of the version.
        directory: of the version.
        tolerance: of samples that have none.

    Raises:
        ConfigurationError: a sample cannot be read or run, or an output differs.
        Fatal: the device failed.
    """
    for path in sorted((directory / "golden").glob("*.npz")):
        sample = _read(path, signature)
        try:
            outputs = run(sample.inputs)
        except Fatal:
            raise
        except Exception as error:  # a model may raise anything
            raise NotLoadableHere(f"{path}: the run failed: {describe_error(error)}") from error
        allowed = tolerance if sample.tolerance is None else sample.tolerance
        for name, expected in sample.outputs.items():
            got = np.asarray(outputs[name])
            if got.shape != expected.shape:
                raise ConfigurationError(
                    f"{path}: {name}: expected {list(expected.shape)}, got {list(got.shape)}"
                )
            difference = relative_difference(expected, got, output_scale(expected))
            if not difference <= allowed:
                raise ConfigurationError(
                    f"{path}: {name}: expected a difference of at most {allowed:.1e} of the "
                    f"output's scale, got {difference:.1e}"
                )


def _read(path: Path, signature: Signature) -> Golden:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = dict(arrays)
        tolerance = float(found.pop("tolerance")) if "tolerance" in found else None
    except Exception as error:  # from files, archives, headers and memory
        raise ConfigurationError(
            f"{path}: expected arrays as numpy.savez writes them, got {describe_error(error)}"
        ) from error
    expected = {f"inputs.{spec.name}" for spec in signature.inputs}
    allowed = expected | {f"outputs.{spec.name}" for spec in signature.outputs}
    if not expected < found.keys() <= allowed:
        raise ConfigurationError(
            f"{path}: expected {', '.join(sorted(expected))}, and one or more of "
            f"{', '.join(sorted(allowed - expected))}, got {', '.join(sorted(found))}"
        )
    parts: dict[str, dict[str, NDArray[Any]]] = {"inputs": {}, "outputs": {}}
    for key, array in found.items():
        kind, _, name = key.partition(".")
        parts[kind][name] = as_bytes(array) if array.dtype.kind in "SU" else array
    inputs = {name: np.ascontiguousarray(array) for name, array in parts["inputs"].items()}
    return Golden(inputs, parts["outputs"], tolerance)
