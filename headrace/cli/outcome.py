"""How a command ends: its exit code, and what it says of an error."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from headrace.errors import ConfigurationError, HeadraceError


class Exit(IntEnum):
    """The exit codes of every command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class Unsuccessful(Exception):
    """Ends a command whose results are printed already, with exit code 1 and no further words."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors themselves, out of the groups in which task groups raise them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def explain(error: BaseException) -> tuple[Exit, list[str]] | None:
    """The exit code and the lines for an error raised on purpose; None for a defect of ours."""
    errors = list(leaves(error))
    if not all(isinstance(each, HeadraceError) for each in errors):
        return None
    wrong_settings = any(isinstance(each, ConfigurationError) for each in errors)
    lines = [line for each in errors for line in str(each).splitlines()]
    # The tasks of one group often fail of the same cause.
    return Exit.USAGE if wrong_settings else Exit.FAILED, list(dict.fromkeys(lines))
