"""The page of the promises, against the tests that are to show them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
PROMISES = re.split(r"^## (P\d)\. ", PAGE.split("\n## The chaos suite")[0], flags=re.MULTILINE)[1:]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_guarantees_page_names_existing_tests(path: str, name: str) -> None:
    """A test that the page names is defined in the file it names."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert name in functions


@pytest.mark.parametrize(("promise", "text"), list(zip(PROMISES[::2], PROMISES[1::2], strict=True)))
def test_guarantees_page_names_test_for_every_promise(promise: str, text: str) -> None:
    """Each promise says what it does not say, and names a test."""
    assert "**It does not say**" in text, promise
    assert re.search(r"`tests/[\w/]+\.py::\w+`", text.split("**Shown by**")[1]), promise


def test_guarantees_page_lists_promises_in_order() -> None:
    """They count from P1 to P7."""
    assert PROMISES[::2] == [f"P{number}" for number in range(1, 8)]


def test_guarantees_page_mentions_tests_in_checked_form() -> None:
    """Two colons stand between a file and a name alone: a slip in the form hides nothing."""
    assert PAGE.count("::") == len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE))
