"""The shape of the code: names and docstrings. Import rules are import-linter's, and the complexity
is ruff's; both run with `make lint`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.tree import CODE, TESTS, Module, modules

VAGUE = {"manager", "managers", "handler", "handlers", "helper", "helpers", "util", "utils"}
VAGUE_ALONE = {"data", "info", "misc", "common", "process()"}


def test_every_module_has_docstring() -> None:
    """A module opens with a docstring, unless it is empty."""
    silent = [
        str(module.path)
        for module in modules(*CODE, *TESTS)
        if module.tree.body and ast.get_docstring(module.tree) is None
    ]

    assert not silent


def test_every_test_has_docstring() -> None:
    """A test function has a docstring."""
    silent = [
        f"{module.at(function)}: {function.name}"
        for module in modules(*TESTS)
        for function in module.functions()
        if function.name.startswith("test_") and ast.get_docstring(function) is None
    ]

    assert not silent, "\n".join(silent)


def test_names_are_not_vague() -> None:
    """No module, class or function is called a manager, a handler, a helper or a utility."""
    vague = [
        f"{where}: {name}"
        for module in modules(*CODE, *TESTS)
        for where, name in names_of(module)
        if is_vague(name)
    ]

    assert not vague, "\n".join(vague)


@pytest.mark.parametrize("name", ["BatchManager", "on_error_handler", "HTTPUtils", "process()"])
def test_vague_names_are_recognised(name: str) -> None:
    """Snake case, camel case and abbreviations do not hide a vague word."""
    assert is_vague(name)


@pytest.mark.parametrize(
    "name", ["process", "process_exit_code()", "datatype", "TopicInfo", "utilisation"]
)
def test_plain_names_are_accepted(name: str) -> None:
    """A name that only contains such a word, or qualifies it, passes."""
    assert not is_vague(name)


def names_of(module: Module) -> Iterator[tuple[str, str]]:
    """The names that a module gives to itself, its classes and its functions (with parentheses)."""
    yield str(module.path), module.path.stem
    for node in module.definitions():
        call = "" if isinstance(node, ast.ClassDef) else "()"
        yield module.at(node), f"{node.name}{call}"


def is_vague(name: str) -> bool:
    """Whether a name, in snake case or camel case, hides what the thing is."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return bool(VAGUE & set(words)) or name.lower() in VAGUE_ALONE
