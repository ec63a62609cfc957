"""Escape foreign text for a terminal: escape sequences could change the cursor or clipboard."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return the text with each unprintable character escaped, such as `\x1b`.

    Line ends are escaped as well: call it once per line.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
