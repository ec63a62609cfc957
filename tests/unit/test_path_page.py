"""The page that follows one request through the code, against the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.tree import ROOT, files

PAGE = (ROOT / "docs" / "path.md").read_text(encoding="utf-8")

# `services/ingest/service.py` · `IngestService._read`, or further names after "and", "or" or ","
STEP = re.compile(r"`([\w/]+\.py)`\s*·\s*(`[\w.]+`(?:\s*(?:,|and|or)\s*`[\w.]+`(?!\s*·))*)")
NAMED = sorted(
    {(path, name) for path, names in STEP.findall(PAGE) for name in re.findall(r"`(.+?)`", names)}
)
SERVICES = sorted(str(path) for path in files("services") if path.name == "service.py")


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_path_page_names_existing_definitions(path: str, name: str) -> None:
    """A function, class or method that the page names is defined in the file it names."""
    assert name in set(definitions(path))


@pytest.mark.parametrize("path", SERVICES)
def test_path_page_names_run_of_every_service(path: str) -> None:
    """The page names the public `run` of each service: the story passes through all of them."""
    runs = {name for name in definitions(path) if re.fullmatch(r"[A-Za-z]\w*\.run", name)}

    assert runs
    assert runs <= {name for file, name in NAMED if file == path}


def test_path_page_names_at_most_fifteen_files() -> None:
    """The first section is the fused form: what a reader opens to follow one request."""
    path = PAGE.split("\n## ")[1]

    assert len({file for file, _ in STEP.findall(path)}) <= 15


def test_path_page_writes_steps_in_checked_form() -> None:
    """Each dot on the page stands between a file and a name: a slip in the form hides nothing."""
    assert PAGE.count("·") == len(STEP.findall(PAGE))


def test_path_page_steps_are_numbered_without_gap() -> None:
    """The steps count from 1 on, through all sections."""
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE, flags=re.MULTILINE)]

    assert numbers == list(range(1, len(numbers) + 1))


def definitions(path: str) -> Iterator[str]:
    """The functions, classes and methods of a file: `function`, `Class` and `Class.method`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            )
