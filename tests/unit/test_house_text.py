"""Rules for the text of all files in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tree import ROOT, files

# Split, so that they do not find themselves.
FOREIGN = {
    "a path on somebody's machine": r"(?<![\w.])/(?:wo" r"rk|ho" r"me|ro" r"ot|Use" r"rs)/\w",
    "a package index; which one is the reader's choice": r"pypi\.o" r"rg|pythonho" r"sted",
    "work left undone": r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_file_names_machine_paths_or_package_indexes(kind: str) -> None:
    """No text file names a machine's paths, a package index, or work left undone."""
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(FOREIGN[kind], line)
    ]

    assert not found, "\n".join(found)


def texts() -> Iterator[tuple[Path, str]]:
    """All files that are text, with their text."""
    for path in files():
        content = (ROOT / path).read_bytes()
        if b"\0" in content:
            continue
        try:
            yield path, content.decode()
        except UnicodeDecodeError:
            continue
