"""The repository as files and syntax trees, for the tests that hold it to its own rules."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
CODE = ("headrace", "services", "tools", "benchmarks")
TESTS = ("tests",)

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_NOT_OURS = {"__pycache__", "build", "dist", "node_modules"}
_HIDDEN_BUT_OURS = {".ci", ".github"}


class Module(NamedTuple):
    """One Python file: where it is, relative to the root, and what is in it."""

    path: Path
    text: str
    tree: ast.Module

    def at(self, node: ast.stmt) -> str:
        """`path:line`, as editors take it."""
        return f"{self.path}:{node.lineno}"

    def functions(self) -> Iterator[Function]:
        """All functions and methods, inner ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


def files(*folders: str) -> Iterator[Path]:
    """All files below the folders (by default the whole repository) that belong to the project,
    each once: symbolic links are not followed.
    """
    for folder in folders or (".",):
        for place, subfolders, names in os.walk(ROOT / folder):
            subfolders[:] = [
                name
                for name in subfolders
                if name not in _NOT_OURS
                and (not name.startswith(".") or name in _HIDDEN_BUT_OURS)
                and not (Path(place) / name).is_symlink()
            ]
            yield from (Path(place, name).relative_to(ROOT) for name in names)


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All Python files below the folders, parsed."""
    found = []
    for path in sorted(path for path in files(*folders) if path.suffix == ".py"):
        text = (ROOT / path).read_text(encoding="utf-8")
        found.append(Module(path, text, ast.parse(text, filename=str(path))))
    return tuple(found)
