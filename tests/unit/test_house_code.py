"""The shape of the code: sizes, names and docstrings. Import rules are import-linter's, and the
number of parameters and the complexity are ruff's; all of them run with `make lint`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.tree import CODE, TESTS, Function, Module, modules

MAX_MODULE_LINES = 600
MAX_BODY_LINES = 40
VAGUE = {"manager", "managers", "handler", "handlers", "helper", "helpers", "util", "utils"}
VAGUE_ALONE = {"data", "info", "misc", "common", "process()"}


def test_no_module_is_too_long_to_be_read_at_once() -> None:
    """A module has at most 600 lines."""
    lengths = {str(module.path): module.text.count("\n") for module in modules(*CODE, *TESTS)}

    too_long = {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES}

    assert not too_long


def test_no_function_is_too_long_to_be_read_at_once() -> None:
    """A function's body has at most 40 lines, its docstring not counted."""
    too_long = [
        f"{module.at(function)}: {function.name} has {body_lines(function)} lines"
        for module in modules(*CODE, *TESTS)
        for function in module.functions()
        if body_lines(function) > MAX_BODY_LINES
    ]

    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is_for() -> None:
    """A module opens with a docstring, unless it is empty."""
    silent = [
        str(module.path)
        for module in modules(*CODE, *TESTS)
        if module.tree.body and ast.get_docstring(module.tree) is None
    ]

    assert not silent


def test_every_test_says_what_behaviour_it_shows() -> None:
    """A test function has a docstring."""
    silent = [
        f"{module.at(function)}: {function.name}"
        for module in modules(*TESTS)
        for function in module.functions()
        if function.name.startswith("test_") and ast.get_docstring(function) is None
    ]

    assert not silent, "\n".join(silent)


def test_names_say_what_a_thing_is() -> None:
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
def test_plain_names_are_left_alone(name: str) -> None:
    """A name that only contains such a word, or qualifies it, passes."""
    assert not is_vague(name)


def body_lines(function: Function) -> int:
    """The lines of a function's body, from its first statement that is no docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) else function.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def names_of(module: Module) -> Iterator[tuple[str, str]]:
    """The names that a module gives to itself, its classes and its functions (with parentheses)."""
    yield str(module.path), module.path.stem
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield module.at(node), node.name
        elif isinstance(node, Function):
            yield module.at(node), f"{node.name}()"


def is_vague(name: str) -> bool:
    """Whether a name, in snake case or camel case, hides what the thing is."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return bool(VAGUE & set(words)) or name.lower() in VAGUE_ALONE
