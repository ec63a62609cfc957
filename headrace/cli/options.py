"""Options of a command as one frozen value, and options shared by several commands."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from headrace.cli.settings import require_broker
from headrace.config import Settings
from headrace.errors import ConfigurationError

T = TypeVar("T")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]

TO_READ = "without one only a capture file can be read (--file)"
"""Why a command that reads a recording needs a broker."""

ANSWERS_FILE = click.option(
    "--answers-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Use the recorded answers in this capture file.",
)


class FiniteRange(click.FloatRange):
    """Parameter type for a finite number in a range; click's own also takes `inf` and `nan`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True)

json_option = click.option("--json", "in_json", is_flag=True, help="Write JSON.")


def check_period(first: str, from_ms: int | None, until_ms: int | None) -> None:
    """Raise `click.UsageError` for a period that has no time in it; `first` begins it."""
    if from_ms is not None and until_ms is not None and until_ms <= from_ms:
        raise click.UsageError(f"--until: expected a time after {first}, got one that is not")


def report_option(text: str) -> Option:
    """Return the option `--report FILE.html`; see `write_report`."""
    return click.option(
        "--report",
        "report_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.html",
        help=text,
    )


def options_as(
    kind: type[NamedTuple], *options: Option
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add options to a command, which receives their values as `given`, a `kind`.

    Args:
        kind: with exactly one field for each option's parameter.
        options: in the order of the help.
    """

    def add_to(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def with_options(*args: Any, **values: Any) -> T:
            given = kind._make(values.pop(name) for name in kind._fields)
            return function(*args, given=given, **values)

        command: Callable[..., T] = with_options
        for option in reversed(options):
            command = option(command)
        return command

    return add_to


def chosen_answers(
    settings: Settings, answers: str | None, answers_file: Path | None
) -> str | Path | None:
    """Return the location of recorded answers, if requested.

    Raises:
        click.UsageError: both a topic and a file.
        ConfigurationError: a topic, but no broker.
    """
    if answers is not None and answers_file is not None:
        raise click.UsageError("give either --answers or --answers-file")
    if answers is not None:
        require_broker(settings, TO_READ)
    return answers_file or answers


def write_report(path: Path, page: str) -> None:
    """Write the page; raise `ConfigurationError` if that fails."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--report: {path}: {error.strerror}") from error
