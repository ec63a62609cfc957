"""The repository as files and syntax trees, for the tests that hold it to its own rules."""

from __future__ import annotations

import ast
import gc
import os
import re
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

    def definitions(self) -> Iterator[Function | ast.ClassDef]:
        """All functions, methods and classes, inner ones included.

        Only statements are visited: expressions hold no definitions, and are most of a tree.
        """
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                    waiting.append(child)
                if isinstance(child, Function | ast.ClassDef):
                    yield child

    def functions(self) -> Iterator[Function]:
        """All functions and methods, inner ones included."""
        return (node for node in self.definitions() if not isinstance(node, ast.ClassDef))


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


def code_blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page of `docs` in one language, in their order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All Python files below the folders, parsed."""
    return tuple(_parse(path) for path in sorted(files(*folders)) if path.suffix == ".py")


@cache
def _parse(path: Path) -> Module:
    text = (ROOT / path).read_text(encoding="utf-8")
    return Module(path, text, _tree_of(text, path))


def _tree_of(text: str, path: Path) -> ast.Module:
    """Parse a file while the garbage collector is off.

    A task that is collected meanwhile may be logged with a traceback, which parses its lines too.
    CPython 3.11 then raises SystemError (https://github.com/python/cpython/issues/106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text, filename=str(path))
    finally:
        if was_enabled:
            gc.enable()
