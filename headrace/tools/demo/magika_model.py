"""The model of the package magika, as an entry of a model repository.

The package (extra `demo`) contains its model; no part of it is stored here. Headrace adds
`magika/model.toml` and `magika/transform.py` beside this file.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.errors import ConfigurationError
from headrace.models.backends.onnx_session import import_runtime

NAME = "magika"
OUTPUT = "target_label"
_MODEL_FILE = "model.onnx"
_CONFIG_FILE = "config.min.json"
_MEASURED_ROWS = 8
_MEASURED_RUNS = 4
_OWN_FILES = ("model.toml", "transform.py")


class MagikaModel(NamedTuple):
    """Location of the installed package's model, and its labels in output order."""

    folder: Path
    labels: tuple[str, ...]

    def add_to(self, repository: Path) -> None:
        """Create the entry `magika`, version 1, of a model repository."""
        entry = repository / NAME
        version = entry / "1"
        version.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / _MODEL_FILE, version / _MODEL_FILE)
        shutil.copyfile(self.folder / _CONFIG_FILE, entry / _CONFIG_FILE)
        with as_file(files("headrace.tools.demo") / NAME) as own:
            for name in _OWN_FILES:
                shutil.copyfile(own / name, entry / name)

    def measure_rows_per_s(self) -> float:
        """Return how many files per second the model alone classifies, in batches of 8.

        Blocks for about 0.2 s on an idle machine of two cores.
        """
        session = import_runtime().InferenceSession(self.folder / _MODEL_FILE)
        (tensor,) = session.get_inputs()
        rows = np.zeros((_MEASURED_ROWS, tensor.shape[1]), np.int32)
        session.run(None, {tensor.name: rows})
        began_s = time.perf_counter()
        for _ in range(_MEASURED_RUNS):
            session.run(None, {tensor.name: rows})
        return _MEASURED_ROWS * _MEASURED_RUNS / (time.perf_counter() - began_s)


def find_magika() -> MagikaModel | None:
    """Find the installed package's model, without importing it; None if it is not installed.

    Raises:
        ConfigurationError: the package does not have the layout of magika 1.x.
    """
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    folders = [path.parent for path in sorted(package.glob(f"models/*/{_MODEL_FILE}"))]
    if len(folders) != 1:
        raise ConfigurationError(
            f"{package}/models: expected one folder with {_MODEL_FILE}, got {len(folders)}"
        )
    config = json.loads((folders[0] / _CONFIG_FILE).read_text(encoding="utf-8"))
    return MagikaModel(folders[0], tuple(config["target_labels_space"]))
