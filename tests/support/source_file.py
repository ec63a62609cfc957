"""Import a Python file that belongs to no package, such as a model's transform."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_source(path: Path) -> ModuleType:
    """The module of a file, not entered in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
