"""Golden samples: what a version must answer before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigurationError
from headrace.models.cores import Cores
from headrace.models.loader import BackendLoader
from headrace.models.registry import Models
from tests.support.models import add_version, digits, settings_for

PIXELS = np.ones((2, 64), np.float32)
SCORES = np.tile(64 * np.arange(10, dtype=np.float32), (2, 1))


def load(repository: Path, **arrays: Any) -> None:
    """Load a model with one golden sample, as an executor does."""
    add_version(repository, "digits", 1, digits())
    golden = repository / "digits" / "1" / "golden"
    golden.mkdir()
    np.savez(golden / "one.npz", **arrays)
    models = Models(settings_for(repository), executes=True)
    models.open()
    [version] = models.catalog.versions()
    BackendLoader(version, Cores(())).load(version.new_backend())


def test_version_with_expected_outputs_loads(tmp_path: Path) -> None:
    """The sample is that of the model."""
    load(tmp_path, **{"inputs.pixels": PIXELS, "outputs.scores": SCORES})


def test_version_with_other_outputs_is_refused(tmp_path: Path) -> None:
    """The reason names the file, the output and the difference."""
    with pytest.raises(
        ConfigurationError, match=r"one\.npz: scores: expected a difference .* got 1\.0e-01"
    ):
        load(tmp_path, **{"inputs.pixels": PIXELS, "outputs.scores": SCORES / 0.9})


def test_tolerance_of_sample_allows_difference(tmp_path: Path) -> None:
    """Each sample may say how far an output may be off."""
    load(
        tmp_path,
        **{"inputs.pixels": PIXELS, "outputs.scores": SCORES / 0.9, "tolerance": np.float64(0.2)},
    )


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"inputs.pixels": PIXELS}, "one or more of outputs.scores"),
        ({"outputs.scores": SCORES}, "expected inputs.pixels"),
        ({"inputs.pixels": PIXELS, "outputs.other": SCORES}, "got inputs.pixels, outputs.other"),
        ({"inputs.pixels": PIXELS, "outputs.scores": SCORES[:1]}, r"expected \[1, 10\], got"),
        ({"inputs.pixels": PIXELS[:, :3], "outputs.scores": SCORES}, "the run failed"),
    ],
    ids=["no-output", "no-input", "unknown-output", "rows", "shape"],
)
def test_sample_that_does_not_fit_model_is_refused(
    tmp_path: Path, arrays: dict[str, Any], text: str
) -> None:
    """A sample that checks nothing is a fault, too."""
    with pytest.raises(ConfigurationError, match=text):
        load(tmp_path, **arrays)
