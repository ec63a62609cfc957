"""Printing of text that may come from callers, brokers or models."""

from __future__ import annotations

import os
import sys

import click

from headrace.log.port import Gap
from headrace.printable import printable


def say(text: str, *, err: bool = False) -> None:
    """Print lines of text, with unprintable characters escaped."""
    for line in text.splitlines() or [""]:
        click.echo(printable(line), err=err)


def say_gap(gap: Gap) -> None:
    """Report on standard error a range that a reader skipped."""
    say(f"headrace: {gap}", err=True)


def open_closed_streams() -> None:
    """Open the standard streams that the caller has closed, as by `>&-`.

    Python has None instead, and the first files of the process get their numbers, which uvloop ends
    a process for. Opened in this order, each gets its own.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def drop_unwritten_output() -> None:
    """Drop output that a full disk did not take: Python would try again at its end, and replace the
    exit code by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
