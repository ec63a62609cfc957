"""Tests use the public face of the code: no private attributes, nothing replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.tree import TESTS, Module, modules

PRIVATE = {
    # Bugs of aiokafka, and results that come out of order, are planted in a fetcher of its own
    # types; a broker cannot be made to answer so.
    "tests/unit/test_kafka_fetched.py": "aiokafka's fetcher, whose results the adapter reads",
}
"""Files that use private attributes of other objects, and the reason."""

REPLACED = {
    ("tests/chaos/shifted_clock.py", "time.time"): "the clock of a whole process",
    ("tests/chaos/shifted_clock.py", "time.time_ns"): "the same, in nanoseconds",
    ("tests/unit/claims/test_fetcher.py", "os.read"): "no file system hangs when it is asked to",
    ("tests/unit/cli/test_doctor.py", "onnxruntime.get_available_providers"): "no GPU needed",
    (
        "tests/unit/models/test_onnx_runtime.py",
        "onnxruntime.get_available_providers",
    ): "no GPU needed",
    ("tests/unit/models/test_onnx_runtime.py", "onnxruntime.InferenceSession"): "no GPU needed",
}
"""Attributes of modules and classes that a file replaces, and the reason."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}


def test_tests_use_no_private_attributes() -> None:
    """A test that reads a private attribute fails when a class is rewritten that still works."""
    found = [
        f"{path}:{line}: {name}" for path, line, name in all_private_uses() if path not in PRIVATE
    ]

    assert not found, "\n".join(found)


def test_tests_replace_no_attributes() -> None:
    """Tests pass in what they change: by a constructor, a tuning value, or the log's faults."""
    found = [
        f"{path}:{line}: {target}"
        for path, line, target in all_replacements()
        if (path, target) not in REPLACED
    ]

    assert not found, "\n".join(found)


def test_tests_import_no_mocks() -> None:
    """A mock has every attribute that a test asks for, so that it hides renamed ones."""
    found = [str(module.path) for module in modules(*TESTS) if "unittest.mock" in imported(module)]

    assert not found


def test_exceptions_of_tests_are_in_use() -> None:
    """An exception that no file needs any longer would let it be needed again."""
    private = {path for path, _, _ in all_private_uses()}
    replaced = {(path, target) for path, _, target in all_replacements()}

    assert not PRIVATE.keys() - private
    assert not REPLACED.keys() - replaced


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("monkeypatch.setattr(Consumer, 'poll', poll)", "Consumer.poll"),
        ("patch.setattr('headrace.cli.demo.run', run)", "headrace.cli.demo.run"),
        ("pytest.MonkeyPatch().delattr(time, 'sleep')", "time.sleep"),
        ("time.sleep = wait", "time.sleep"),
        ("Consumer.LIMIT: int = 3", "Consumer.LIMIT"),
        ("Consumer.LIMIT += 3", "Consumer.LIMIT"),
        ("patch.setenv('HOME', '/')", None),
        ("monkeypatch.setitem(sys.modules, 'cupy', None)", None),
        ("consumer.limit = 3", None),
        ("setattr(request, 'key', b'')", None),
    ],
)
def test_replacement_of_attribute_is_recognized(line: str, target: str | None) -> None:
    """Under any name of the fixture, and as a plain assignment to a module or a class."""
    text = f"import time\nfrom headrace.log import Consumer\n{line}\n"
    found = [each for _, each in replacements(Module(Path("t.py"), text, ast.parse(text)))]

    assert found == ([] if target is None else [target])


@cache
def all_private_uses() -> list[tuple[str, int, str]]:
    """Return the file, line and name of each private attribute that a test uses."""
    return [
        (str(module.path), node.lineno, node.attr)
        for module in modules(*TESTS)
        for node in private_uses(module)
    ]


@cache
def all_replacements() -> list[tuple[str, int, str]]:
    """Return the file, line and dotted name of each attribute that a test replaces."""
    return [
        (str(module.path), line, target)
        for module in modules(*TESTS)
        for line, target in replacements(module)
    ]


def private_uses(module: Module) -> Iterator[ast.Attribute]:
    """Yield uses of private attributes of other objects than the method's own."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in {"self", "cls"}):
                yield node


def is_private(name: str) -> bool:
    """Return True for a name with one leading underscore that no NamedTuple has."""
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def replacements(module: Module) -> Iterator[tuple[int, str]]:
    """Yield where an attribute of a module or a class is replaced, with its dotted name.

    That is each call of a method `setattr` or `delattr`, which `pytest.MonkeyPatch` has, and each
    assignment to an attribute of an imported name.
    """
    names = set(imported(module))
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"), args=[ast.Constant(str(target)), *_]
            ):
                yield node.lineno, target
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"),
                args=[owner, ast.Constant(str(name)), *_],
            ):
                yield node.lineno, f"{ast.unparse(owner)}.{name}"
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr")):
                yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=ast.Name(owner), ctx=ast.Store() | ast.Del()) if (
                owner in names
            ):
                yield node.lineno, ast.unparse(node)


def imported(module: Module) -> Iterator[str]:
    """Yield the names that a module's imports give it, and the modules that they come from."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = node.module if isinstance(node, ast.ImportFrom) else None
            if source is not None:
                yield source
            for each in node.names:
                yield each.name
                yield each.asname or each.name.split(".")[0]
                if source is not None:
                    yield f"{source}.{each.name}"
