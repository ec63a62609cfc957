"""The documents against the repository: order, form, and that what they name is there."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.tree import ROOT, files

DECISIONS = sorted(path for path in files("docs/decisions") if path.suffix == ".md")
DOCUMENTS = sorted(path for path in files() if path.suffix == ".md")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
SECTION_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
PATH_IN_CODE = re.compile(
    r"`((?:headrace|services|tests|docs|deploy|schemas|benchmarks|tools)/[\w./-]*)`"
)


def test_decisions_are_numbered_without_gap() -> None:
    """The pages are 0001, 0002 and so on, and each title begins with its page's number."""
    titles = [
        (ROOT / path).read_text(encoding="utf-8").split(".", maxsplit=1)[0] for path in DECISIONS
    ]

    assert [path.name[:4] for path in DECISIONS] == [
        f"{number:04}" for number in range(1, len(DECISIONS) + 1)
    ]
    assert titles == [f"# {number}" for number in range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_decision_record_has_required_sections(path: Path) -> None:
    """A decision says whether it holds, and has its context, consequences and end condition."""
    text = (ROOT / path).read_text(encoding="utf-8")

    assert re.findall(r"^(Status: holds|## .+$)", text, flags=re.MULTILINE) == [
        "Status: holds",
        "## Context",
        "## Decision",
        "## Consequences",
        "## Undo if",
    ]


def test_glossary_explains_each_word_once_and_in_order() -> None:
    """The entries are in alphabetical order, and none comes twice."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [word.lower() for word in re.findall(r"^- \*\*(.+?)\*\*", text, flags=re.MULTILINE)]

    assert words
    assert [(one, next_) for one, next_ in pairwise(words) if one >= next_] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_documents_name_only_existing_files(path: Path) -> None:
    """Every relative link, and every path of the repository in code type, leads to a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    linked = [(ROOT / path).parent / target for target in LINK.findall(text)]
    named = [ROOT / target for target in PATH_IN_CODE.findall(text)]

    assert [str(target) for target in linked + named if not target.exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_section_links_lead_to_headings(path: Path) -> None:
    """Every `page.md#section` names a heading, in the form in which GitHub links to it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    broken = [
        f"{page}#{section}"
        for page, section in SECTION_LINK.findall(text)
        if section not in sections(ROOT / path.parent / page if page else ROOT / path)
    ]

    assert broken == []


def sections(path: Path) -> set[str]:
    """The names of a page's headings in links: lower case, with hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
