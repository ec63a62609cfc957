"""End of a command: its exit code, and its error message."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from headrace.errors import ConfigurationError, HeadraceError


class Exit(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_DRAINED = 3
    INTERRUPTED = 130


class Unsuccessful(Exception):
    """Ends a command whose results are already printed, with exit code 1 and no further output."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside the groups in which task groups raise them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def explain(error: BaseException) -> tuple[Exit, list[str]] | None:
    """Return exit code and lines for an error raised on purpose; None for a bug."""
    errors = list(leaves(error))
    if not all(isinstance(each, HeadraceError) for each in errors):
        return None
    wrong_settings = any(isinstance(each, ConfigurationError) for each in errors)
    lines = [line for each in errors for line in str(each).splitlines()]
    # Tasks of one group often fail for the same reason.
    return Exit.USAGE if wrong_settings else Exit.FAILED, list(dict.fromkeys(lines))
