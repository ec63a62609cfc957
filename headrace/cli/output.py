"""What commands print: lines whose text may come from callers, brokers or models."""

from __future__ import annotations

import click

from headrace.log.port import Gap
from headrace.printable import printable


def say(text: str, *, err: bool = False) -> None:
    """Print lines of text; what is not printable in them is escaped."""
    for line in text.splitlines() or [""]:
        click.echo(printable(line), err=err)


def say_gap(gap: Gap) -> None:
    """Say on standard error what a reader has passed over."""
    say(f"headrace: {gap}", err=True)
