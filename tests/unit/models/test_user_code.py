"""Loading of the Python files of a model."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.models.user_code import load_module


def test_file_changed_within_second_is_loaded_as_it_is(tmp_path: Path) -> None:
    """Bytecode of the same size and second is not taken for that of the changed file."""
    path = tmp_path / "model.py"
    found = []
    for factor in (2, 3):
        path.write_text(f"factor = {factor}", encoding="utf-8")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        found.append(load_module(path).factor)
    assert found == [2, 3]


def test_loading_leaves_no_bytecode_in_repository(tmp_path: Path) -> None:
    """A repository may be read-only, and a manifest vouches for each file in it."""
    path = tmp_path / "model.py"
    path.write_text("factor = 2", encoding="utf-8")
    load_module(path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.py"]
