"""Rule that tells whose fault it is that a version of a model cannot be opened or loaded."""

from __future__ import annotations

from headrace.errors import ConfigurationError, NotLoadableHere, Retriable

_OF_THE_PROCESS = (NotLoadableHere, Retriable, OSError, MemoryError, ImportError)
_MISSING_FILES = (FileNotFoundError, NotADirectoryError)


def is_fault_of_model(error: BaseException) -> bool:
    """Return whether the files or the configuration of a model are the reason of an error.

    No process can load such a version, so the request to load it is rejected. It is the process's
    fault, or unknown, if the error or one of its causes is `NotLoadableHere`, such as short memory,
    an error of the system other than a missing file, or a store that is unavailable; and if the
    error is no `ConfigurationError`.

    Args:
        error: raised while the version was opened or loaded.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _OF_THE_PROCESS) and not isinstance(cause, _MISSING_FILES):
            return False
        cause = cause.__cause__
    return isinstance(error, ConfigurationError)


def restore_fault(text: str, *, is_of_model: bool) -> ConfigurationError:
    """Return the error that another process met, whose class and causes are not here.

    Args:
        text: of the error.
        is_of_model: what `is_fault_of_model` said of it there.
    """
    return ConfigurationError(text) if is_of_model else NotLoadableHere(text)
