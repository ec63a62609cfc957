"""Import rules that import-linter's contracts cannot say; the others are in pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from headrace.log.kafka._aiokafka import PRIVATE_NAMES
from tests.support.tree import ROOT


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Return the imports within the package, and those of outside packages."""
    return grimp.build_graph("headrace", include_external_packages=True, cache_dir=None)


def test_import_graph_contains_services(graph: grimp.ImportGraph) -> None:
    """The link from the package to services/ is followed, or no rule about them would bite."""
    assert graph.find_children("headrace.services") >= {
        f"headrace.services.{stage}" for stage in ("ingest", "batcher", "executor", "responder")
    }


# It starts brokers and asks them, as any client would, whether they serve.
_OUTSIDE_THE_ADAPTER = frozenset({"headrace.tools.local_kafka.broker"})


def test_only_kafka_adapter_imports_aiokafka(graph: grimp.ImportGraph) -> None:
    """Only modules of `headrace.log.kafka` know aiokafka."""
    importers = graph.find_modules_that_directly_import("aiokafka")

    assert importers
    outside = {name for name in importers if not name.startswith("headrace.log.kafka.")}
    assert outside == _OUTSIDE_THE_ADAPTER


_ADAPTER = ROOT / "headrace" / "log" / "kafka"
_PRIVATE_ACCESS = _ADAPTER / "_aiokafka.py"
_DERIVED_FROM = {"AIOKafkaConnection", "BatchBuilder"}


def test_private_names_of_aiokafka_are_used_in_one_file() -> None:
    """No other module of the adapter uses a private attribute of another object, nor imports one.

    Only modules of the adapter import aiokafka; see above.
    """
    others = [path for path in sorted(_ADAPTER.glob("*.py")) if path != _PRIVATE_ACCESS]

    assert others
    found = {path.name: sorted(set(private_names(path))) for path in others}
    assert not {name: names for name, names in found.items() if names}


def test_private_names_of_aiokafka_are_checked_at_start_up() -> None:
    """The import of the file checks a table: it has each name that is used there, and no other."""
    checked = {name for names in PRIVATE_NAMES.values() for name in names if is_private(name)}

    assert checked
    assert set(private_names(_PRIVATE_ACCESS)) == checked


def private_names(path: Path) -> Iterator[str]:
    """The private names of other objects, or of aiokafka's modules, that a module uses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in {"self", "cls", "super()"}:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiokafka"):
            parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
            yield from filter(is_private, parts)
        elif isinstance(node, ast.ClassDef) and _DERIVED_FROM & set(map(ast.unparse, node.bases)):
            yield from private_names_of_self(node)


def private_names_of_self(derived: ast.ClassDef) -> Iterator[str]:
    """The private methods that a derived class replaces, and the attributes of its own object."""
    for node in ast.walk(derived):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            yield node.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")
