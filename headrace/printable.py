"""Text of others on a terminal, where an escape sequence could move the cursor or the clipboard."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return the text with each character that is not printable as its escape, such as `\x1b`.

    Line ends are escaped as well: call it for each line.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
